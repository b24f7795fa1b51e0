"""Workers' servers and journals that misbehave, for what runs in the environment of a fleet."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from onediff_comfy.fleet.gateway import carrier, clients, journal, link
from onediff_comfy.fleet.gateway.api import Gateway
from onediff_comfy.fleet.gateway.journal import Journal

SOON_S = 20.0
"""How long something may take that is to happen."""

WORKFLOW = {"text": {"class_type": "PrimitiveString", "inputs": {"value": "x"}}}


class Server:
    """A worker's server, given by what it answers; an asynchronous context manager.

    Attributes:
        url: its address.
        asked: the paths of all requests.
        queue: what ``/queue`` shows as running.
        sockets: connections of ``/ws`` that are open.
    """

    def __init__(self, answer: Callable[[Server, web.Request], Awaitable[web.StreamResponse]]) -> None:
        self._answer = answer
        self.asked: list[str] = []
        self.queue: list[Any] = []
        self.sockets: set[web.WebSocketResponse] = set()

    async def __aenter__(self) -> Server:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.path)
        return await self._answer(self, request)

    async def listened_to(self, request: web.Request) -> web.WebSocketResponse:
        """Answer ``/ws`` and say nothing."""
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self.sockets.add(socket)
        async for _ in socket:
            pass
        self.sockets.discard(socket)
        return socket


async def slow(server: Server, request: web.Request) -> web.StreamResponse:
    """Answer as a ComfyUI does that never gets to the end of a prompt."""
    if request.path == "/ws":
        return await server.listened_to(request)
    if request.path == "/prompt":
        server.queue.append([0, (await request.json())["prompt_id"]])
    return web.json_response({"queue_running": server.queue} if request.path == "/queue" else {})


async def served(gateway: Gateway) -> tuple[web.AppRunner, str]:
    """Start a gateway. Return what to end it by, and its address."""
    runner = web.AppRunner(await gateway.application(), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


_TIMES = [
    (module, name, getattr(module, name))
    for module, names in (
        (carrier, ("LIFE_S", "_LOOK_EVERY_S")),
        (clients, ("_TOO_MANY",)),
        (journal, ("LIFE_S", "_DEAD_AFTER_S")),
        (link, ("_ANSWER_S",)),
    )
    for name in names
]


def patient() -> None:
    """Put back how long the gateway waits for what, and how much it bears, as it is without tests."""
    for module, name, value in _TIMES:
        setattr(module, name, value)


def register(gateway: Gateway, name: str, server: Server) -> None:
    """Have a worker say that it is ready."""
    gateway.carrier.register({"name": name, "run": name, "url": server.url, "state": "ready"})


@contextlib.asynccontextmanager
async def visited(folder: Path) -> AsyncIterator[tuple[Gateway, aiohttp.ClientSession, str]]:
    """A gateway on a journal in a folder, a client's session, and the gateway's address."""
    gateway = Gateway(Journal(folder.as_uri()), {})
    runner, url = await served(gateway)
    async with aiohttp.ClientSession() as session:
        yield gateway, session, url
    await runner.cleanup()


async def until(condition: Callable[[], object]) -> bool:
    """Wait until something is so. Return False if it does not become so."""
    with contextlib.suppress(asyncio.TimeoutError):
        async with asyncio.timeout(SOON_S):
            while not condition():
                await asyncio.sleep(0.02)
    return bool(condition())


async def looked(gateway: Gateway) -> None:
    """Look after the workers once, to the end."""
    await gateway.carrier._look_after()
    await until(lambda: not gateway.carrier._looked_at)


def silenced(gateway: Gateway, name: str) -> None:
    """Have a worker be one whose heartbeats ceased too long ago."""
    gateway.carrier.links[name].seen -= carrier.LOST_AFTER_S + 1


async def hand_in(session: aiohttp.ClientSession, url: str, **more: Any) -> int:
    """Hand a prompt in. Return the answer's status."""
    async with session.post(f"{url}/prompt", json={"prompt": WORKFLOW, **more}) as answer:
        return answer.status
