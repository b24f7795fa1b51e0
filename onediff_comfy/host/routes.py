"""HTTP routes that the pack adds to ComfyUI's server.

GET /onediff/report   what was compiled, what served how many calls, and why anything was slow: of this process,
                      under "objects" of everything that is accelerated now, and under "problems" what
                      this host no longer has that we rely on
"""

from __future__ import annotations

import logging

from .compatibility import host_changed, host_changes
from .versions import torch_too_old

log = logging.getLogger(__name__)


def add_routes() -> None:
    """Add the routes to the running server; without one (nodes only imported), or without its API, do nothing."""
    if torch_too_old() is not None:
        return
    try:
        from aiohttp import web
        from server import PromptServer

        routes = PromptServer.instance.routes
    except (ImportError, AttributeError) as error:
        log.debug("no /onediff/report on this host: %s", error)
        return

    @routes.get("/onediff/report")
    async def report(_request: web.Request) -> web.Response:
        problems = host_changes()
        if host_changed("everything") is not None:
            return web.json_response({"objects": [], "problems": problems})
        from .report.report import live_objects, process_report

        return web.json_response({**process_report(), "objects": live_objects(), "problems": problems})
