"""HTTP routes that the pack adds to ComfyUI's server.

GET  /onediff/report         what was compiled, what served how many calls, and why anything was slow: of this process,
                             under "objects" of everything that is accelerated now, and under "problems" what this host
                             no longer has that we rely on
GET  /onediff/panel          what the editor's sidebar shows (report/panel.py)
POST /onediff/panel/remove   {"keys": [...]}: removes these graphs from disk and memory
POST /onediff/panel/clear    removes all of them
POST /onediff/panel/free     throws away what graphs hold in memory
POST /onediff/validate       whether this host would take a prompt, without taking it: status 200, or 400 and the answer
                             of its own /prompt; 501 where it cannot be asked. For a fleet, whose prompts may wait

Those of the panel that change something answer 409, with an "error" for people, while the host is running a prompt.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

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

    _add_panel(routes, web)
    _add_validation(routes, web, PromptServer)


def _add_panel(routes: Any, web: Any) -> None:
    """Add the routes of the sidebar. Files are read and removed on a thread, so that the server goes on answering."""

    async def answer(work: Callable[[], Any]) -> Any:
        if host_changed("everything") is not None:
            return web.json_response({"problems": host_changes()}, status=503)
        try:
            return web.json_response(await asyncio.to_thread(work))
        except _panel().Busy as error:
            from .language import in_their_language

            return web.json_response({"error": in_their_language(str(error))}, status=409)

    @routes.get("/onediff/panel")
    async def panel(_request: web.Request) -> web.Response:
        return await answer(lambda: _panel().panel())

    @routes.post("/onediff/panel/remove")
    async def remove(request: web.Request) -> web.Response:
        body = await request.json()
        keys = body.get("keys") if isinstance(body, dict) else None
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
            return web.json_response({"error": "keys must be a list of keys"}, status=400)
        return await answer(lambda: {"removed": _panel().remove(keys)})

    @routes.post("/onediff/panel/clear")
    async def clear(_request: web.Request) -> web.Response:
        return await answer(lambda: {"removed": _panel().clear()})

    @routes.post("/onediff/panel/free")
    async def free(_request: web.Request) -> web.Response:
        return await answer(lambda: {"freed_bytes": _panel().free_memory()})


def _panel() -> Any:
    from .report import panel  # imports the core, which may be too old a torch's

    return panel


def _add_validation(routes: Any, web: Any, server: Any) -> None:
    """Add the check of a prompt that is to wait elsewhere."""

    @routes.post("/onediff/validate")
    async def validate(request: web.Request) -> web.Response:
        try:
            refusal = await _refusal(server.instance, await request.json())
        except Exception as error:  # whatever another release of the host raises
            log.debug("the host cannot be asked to check a prompt: %r", error)
            return web.json_response({"error": str(error)}, status=501)
        return web.json_response(refusal or {}, status=200 if refusal is None else 400)


async def _refusal(server: Any, body: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what the host's ``/prompt`` would answer to a prompt that it refuses, or None (server.py, post_prompt)."""
    import execution

    prompt = body["prompt"]
    replacements = getattr(server, "node_replace_manager", None)  # older hosts have none
    if replacements is not None:
        replacements.apply_replacements(prompt)
    targets = body.get("partial_execution_targets")
    valid, error, _, node_errors, *_ = await execution.validate_prompt(body.get("prompt_id"), prompt, targets)
    return None if valid else {"error": error, "node_errors": node_errors}
