"""ComfyUI's API as a gateway answers it: of prompts, queue and history by itself, of all else through a worker."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from aiohttp import web

from .carrier import Carrier
from .clients import Clients
from .figures import Figures
from .forwarding import Forwarding, same_origin
from .journal import Journal, Ledger
from .prompt import BadPrompt, Prompt, finished_job, open_job, parse, queue_item

log = logging.getLogger(__name__)

_PAGE = Path(__file__).with_name("page.html")
_MOST_BYTES = 100 << 20  # of a request, as in ComfyUI
_JOB_STATES = ("pending", "in_progress", "completed", "failed", "cancelled")


Answers = Mapping[tuple[str, str], Callable[[web.Request], Awaitable[web.StreamResponse]]]
"""What answers a method and a path."""


class PromptRoutes:
    """What is on its way: ``/prompt``, ``/queue``, ``/interrupt``."""

    def __init__(self, ledger: Ledger, carrier: Carrier) -> None:
        self._ledger, self._carrier = ledger, carrier
        self._counter = 0
        self._handing_in: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by an id of a client's

    def answers(self) -> Answers:
        """Return what this answers."""
        return {
            ("GET", "/prompt"): self._get_prompt,
            ("POST", "/prompt"): self._post_prompt,
            ("GET", "/queue"): self._get_queue,
            ("POST", "/queue"): self._post_queue,
            ("POST", "/interrupt"): self._interrupt,
        }

    async def _get_prompt(self, _request: web.Request) -> web.Response:
        return web.json_response({"exec_info": {"queue_remaining": len(self._ledger.open)}})

    async def _post_prompt(self, request: web.Request) -> web.Response:
        body = await request.json()
        prompt = parse(body, self._counter)
        self._counter += 1
        if body.get("prompt_id") is None:
            return await self._submitted(prompt)
        async with self._handing_in.setdefault(prompt.id, asyncio.Lock()):
            if prompt.id in self._ledger.open or await self._ledger.entry(prompt.id) is not None:
                # Handed in again by a client that got no answer.
                return web.json_response({"prompt_id": prompt.id, "number": prompt.number, "node_errors": {}})
            return await self._submitted(prompt)

    async def _submitted(self, prompt: Prompt) -> web.Response:
        status, answer = await self._carrier.submit(prompt)
        return web.json_response(answer, status=status)

    async def _get_queue(self, _request: web.Request) -> web.Response:
        prompts = sorted(self._ledger.open.values(), key=lambda prompt: prompt.number)
        running = [queue_item(prompt) for prompt in prompts if prompt.started]
        pending = [queue_item(prompt) for prompt in prompts if not prompt.started]
        return web.json_response({"queue_running": running, "queue_pending": pending})

    async def _post_queue(self, request: web.Request) -> web.Response:
        body = await request.json()
        for name in list(self._ledger.open) if body.get("clear") else body.get("delete", ()):
            await self._carrier.delete(name)
        return web.Response()

    async def _interrupt(self, request: web.Request) -> web.Response:
        try:
            body = await request.json()
        except json.JSONDecodeError:
            body = {}
        await self._carrier.interrupt(body.get("prompt_id") or None)
        return web.Response()


class ResultRoutes:
    """What came of it: ``/history``, and ``/api/jobs`` which is of both."""

    def __init__(self, ledger: Ledger, carrier: Carrier) -> None:
        self._ledger, self._carrier = ledger, carrier

    def answers(self) -> Answers:
        """Return what this answers, here and below ``/api``."""
        return {
            ("GET", "/history"): self._get_history,
            ("GET", "/history/{id}"): self._get_entry,
            ("POST", "/history"): self._post_history,
        }

    def jobs(self) -> Answers:
        """Return what this answers in one place alone."""
        return {
            ("GET", "/api/jobs"): self._get_jobs,
            ("GET", "/api/jobs/{id}"): self._get_job,
            ("POST", "/api/jobs/cancel"): self._cancel,
            ("POST", "/api/jobs/{id}/cancel"): self._cancel,
        }

    async def _get_history(self, request: web.Request) -> web.Response:
        most = int(request.query.get("max_items", len(self._ledger.history)))
        offset = int(request.query.get("offset", -1))
        start = offset if offset >= 0 else max(0, len(self._ledger.history) - most)
        return web.json_response(dict(list(self._ledger.history.items())[start : start + most]))

    async def _get_entry(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        entry = await self._ledger.entry(name)
        return web.json_response({} if entry is None else {name: entry})

    async def _post_history(self, request: web.Request) -> web.Response:
        body = await request.json()
        for name in list(self._ledger.history) if body.get("clear") else body.get("delete", ()):
            await self._ledger.forget_result(name)
        return web.Response()

    async def _get_jobs(self, request: web.Request) -> web.Response:
        query = request.query
        wanted = [state.strip().lower() for state in query.get("status", "").split(",") if state.strip()]
        if unknown := [state for state in wanted if state not in _JOB_STATES]:
            return web.json_response({"error": f"Invalid status value(s): {', '.join(unknown)}"}, status=400)
        jobs = [open_job(prompt) for prompt in self._ledger.open.values()]
        jobs += [finished_job(name, entry) for name, entry in self._ledger.history.items()]
        jobs = [job for job in jobs if not wanted or job["status"] in wanted]
        if "workflow_id" in query:
            jobs = [job for job in jobs if job.get("workflow_id") == query["workflow_id"]]
        by_duration = query.get("sort_by") == "execution_duration"
        jobs.sort(key=_duration if by_duration else _created, reverse=query.get("sort_order", "desc") == "desc")
        offset = max(0, int(query.get("offset", 0)))
        limit = int(query["limit"]) if "limit" in query else None
        page = jobs[offset:] if limit is None else jobs[offset : offset + limit]
        more = offset + len(page) < len(jobs)
        pagination = {"offset": offset, "limit": limit, "total": len(jobs), "has_more": more}
        return web.json_response({"jobs": page, "pagination": pagination})

    async def _get_job(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        prompt = self._ledger.open.get(name)
        if prompt is not None:
            return web.json_response(open_job(prompt))
        entry = await self._ledger.entry(name)
        if entry is None:
            return web.json_response({"error": "Job not found"}, status=404)
        return web.json_response(finished_job(name, entry, whole=True))

    async def _cancel(self, request: web.Request) -> web.Response:
        name = request.match_info.get("id")
        names = [name] if name is not None else (await request.json()).get("job_ids")
        if not isinstance(names, list):
            return web.json_response({"error": "job_ids must be a list"}, status=400)
        done = [await self._carrier.delete(job) or await self._carrier.interrupt(job) for job in names if job]
        return web.json_response({"cancelled": any(done)})


class Gateway:
    """The server that all clients talk to. Must be made where an event loop runs.

    Args:
        journal: where prompts and results are written.
        about: what ``/fleet/status`` says of the gateway besides.
    """

    def __init__(self, journal: Journal, about: Mapping[str, Any]) -> None:
        self.figures = Figures(about)
        self.ledger = Ledger(journal, self.figures.took)
        self.clients = Clients(self._status, self._features, self._shown)
        self.carrier = Carrier(self.ledger, self.clients)
        self._forwarding = Forwarding(self.carrier.links, journal)

    async def application(self) -> web.Application:
        """Return the server, having taken over what an earlier one left.

        Raises:
            Exception: one of ``journal.errors``: it cannot be read.
        """
        await self.carrier.start()
        self.ledger.watchers.append(self.clients.tell_status)
        self.figures.watch(self.ledger, self.carrier.links, self.clients)
        app = web.Application(middlewares=[self._words, same_origin], client_max_size=_MOST_BYTES)
        results = ResultRoutes(self.ledger, self.carrier)
        own: Answers = {
            ("GET", "/ws"): self.clients.serve,
            ("POST", "/free"): self._forwarding.everywhere,
            ("POST", r"/onediff/panel/{what:\w+}"): self._forwarding.everywhere,
            ("GET", "/view"): self._forwarding.view,
            **PromptRoutes(self.ledger, self.carrier).answers(),
            **results.answers(),
        }
        single: Answers = {
            **results.jobs(),
            ("GET", "/fleet"): self._page,
            ("GET", "/fleet/status"): self._fleet_status,
            ("GET", "/metrics"): self._metrics,
            ("*", "/{path:.*}"): self._forwarding.front,
        }
        twins = {(method, f"/api{path}"): answer for (method, path), answer in own.items()}
        for (method, path), answer in {**own, **twins, **single}.items():
            app.router.add_route(method, path, answer)
        app.on_shutdown.append(lambda _app: self.stop())
        return app

    async def stop(self) -> None:
        """Let go of every connection; prompts stay in the journal."""
        await self.carrier.stop()
        await self._forwarding.close()

    @web.middleware
    async def _words(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Say in a form that ComfyUI's clients show what is wrong with a request or with the journal."""
        try:
            return await handler(request)
        except BadPrompt as error:
            return web.json_response(error.answer, status=400)
        except (ValueError, RecursionError, AttributeError, TypeError) as error:
            log.info("a request was refused", exc_info=True)
            text = f"{request.method} {request.path} was not understood: {error}"
            return web.json_response({"error": text}, status=400)
        except self.ledger.journal.errors as error:
            if isinstance(error, ConnectionError):  # the client's, who has gone
                raise
            reason = str(error).strip().partition("\n")[0]
            text = f"the fleet's journal does not answer, so nothing is taken: {reason}"
            said = {"type": "journal", "message": text, "details": text, "extra_info": {}}
            return web.json_response({"error": said, "node_errors": {}}, status=503)

    # -- what clients are told -----------------------------------------------------------------

    def _status(self) -> dict[str, Any]:
        return {"status": {"exec_info": {"queue_remaining": len(self.ledger.open)}}}

    async def _features(self) -> Any:
        return await self._forwarding.features()

    def _shown(self, client: str) -> list[str]:
        mine = (prompt.attempt for prompt in self.ledger.open.values() if prompt.client == client)
        return [attempt.node for attempt in mine if attempt is not None and attempt.node is not None]

    # -- the fleet itself ----------------------------------------------------------------------

    async def _page(self, _request: web.Request) -> web.FileResponse:
        return web.FileResponse(_PAGE)

    async def _fleet_status(self, _request: web.Request) -> web.Response:
        return web.json_response(self.figures.status())

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=self.figures.prometheus(), headers={"Content-Type": "text/plain; version=0.0.4"})


def _created(job: Mapping[str, Any]) -> float:
    return float(job.get("create_time") or 0)


def _duration(job: Mapping[str, Any]) -> float:
    return float((job.get("execution_end_time") or 0) - (job.get("execution_start_time") or 0))
