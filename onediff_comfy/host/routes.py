"""HTTP routes that the pack adds to ComfyUI's server.

GET /onediff/report   what was compiled, what served how many calls, and why anything was slow
"""

from __future__ import annotations


def add_routes() -> None:
    """Add the routes to the running server, if there is one (there is none when nodes are only imported)."""
    from server import PromptServer

    server = getattr(PromptServer, "instance", None)
    if server is None:
        return
    from aiohttp import web

    from .versions import torch_too_old

    if torch_too_old() is not None:
        return
    from .process import metrics

    @server.routes.get("/onediff/report")
    async def report(_request: web.Request) -> web.Response:
        return web.json_response(metrics().snapshot())
