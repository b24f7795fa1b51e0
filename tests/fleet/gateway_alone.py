"""The gateway's parts with workers that misbehave, in the environment of a fleet. Prints what came of it as JSON.

python gateway_alone.py FOLDER
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from onediff_comfy.fleet.gateway import carrier
from onediff_comfy.fleet.gateway.api import Gateway
from onediff_comfy.fleet.gateway.carrier import MOST_ATTEMPTS
from onediff_comfy.fleet.gateway.journal import Journal
from onediff_comfy.fleet.gateway.prompt import parse

WORKFLOW = {"text": {"class_type": "PrimitiveString", "inputs": {"value": "x"}}}


async def race(folder: Path) -> dict[str, Any]:
    """Two gateways write ten results of one prompt at once, and again when all is over."""
    journals = [Journal((folder / "race").as_uri()) for _ in range(2)]
    await journals[0].write("id", {"id": "id", "number": 0, "body": {}})
    results = [{"id": "id", "entry": {}, "worker": str(number)} for number in range(10)]
    kept = await asyncio.gather(*(journals[n % 2].finish("id", result) for n, result in enumerate(results)))
    late = await journals[1].finish("id", {"id": "id", "entry": {}, "worker": "late"})
    workers = sorted({result["worker"] for result in (*kept, late)})
    written = json.loads((folder / "race" / "v1" / "results" / "id").read_text())
    unfinished = await Journal((folder / "race").as_uri()).unfinished()
    return {"workers": workers, "written": written["worker"], "unfinished": unfinished}


async def poison(folder: Path) -> dict[str, Any]:
    """Every worker dies as soon as it has a certain prompt; one that comes later lives."""
    gateway = Gateway(Journal((folder / "poison").as_uri()), {})
    runner, url = await _served(gateway)
    session = aiohttp.ClientSession()
    socket = await session.ws_connect(f"{url}/ws?clientId=person")
    prompt = parse({"prompt": WORKFLOW, "client_id": "person"}, 0)
    await gateway.carrier.submit(prompt)
    victims = 0
    while prompt.id in gateway.ledger.open and victims < 2 * MOST_ATTEMPTS:
        async with _Server(_die) as url:
            victims += 1
            facts = {"name": f"worker {victims}", "run": "r", "url": url, "state": "ready"}
            gateway.carrier.register(facts)
            while facts["name"] in gateway.carrier.links:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)
    entry = await gateway.ledger.entry(prompt.id)
    told = [await socket.receive_json(timeout=5)]
    while told[-1]["type"] != "executing":
        told.append(await socket.receive_json(timeout=5))
    await session.close()
    await runner.cleanup()
    messages = entry["status"]["messages"] if entry else None
    return {"victims": victims, "messages": messages, "told": [event["type"] for event in told[-3:]]}


async def _served(gateway: Gateway) -> tuple[web.AppRunner, str]:
    runner = web.AppRunner(await gateway.application())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


async def silence(folder: Path) -> dict[str, Any]:
    """A worker that has a prompt answers, but its heartbeats have ceased; another one comes."""
    carrier.LOST_AFTER_S, carrier._LOOK_EVERY_S = 0.3, 0.1
    gateway = Gateway(Journal((folder / "silence").as_uri()), {})
    await gateway.application()
    prompt = parse({"prompt": WORKFLOW}, 0)
    seen: list[Any] = []
    async with _Server(_slow) as silent, _Server(_slow) as other:
        gateway.carrier.register({"name": "silent", "run": "r", "url": silent, "state": "ready"})
        await gateway.carrier.submit(prompt)
        for _ in range(50):
            seen.append(getattr(prompt.worker, "name", None))
            gateway.carrier.register({"name": "other", "run": "r", "url": other, "state": "ready"})
            await asyncio.sleep(0.05)
        await gateway.carrier.stop()
    return {"first": seen[0], "last": seen[-1], "attempts": prompt.attempts}


async def _slow(request: web.Request) -> web.StreamResponse:
    """Answer as a ComfyUI does that never gets to the end of a prompt."""
    if request.path == "/ws":
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.receive()
        await socket.receive()
        return socket
    queue = request.app["queue"]
    if request.path == "/prompt":
        queue.append([0, (await request.json())["prompt_id"]])
    return web.json_response({"queue_running": queue} if request.path == "/queue" else {})


async def _die(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


class _Server:
    """A worker's server, given by what it answers."""

    def __init__(self, answer: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> None:
        self._answer = answer

    async def __aenter__(self) -> str:
        app = web.Application()
        app["queue"] = []
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()


async def unwritable(folder: Path) -> dict[str, Any]:
    """The journal's folder is a file by now."""
    gateway = Gateway(Journal((folder / "unwritable").as_uri()), {})
    runner, url = await _served(gateway)
    (folder / "unwritable").rmdir()
    (folder / "unwritable").touch()
    body = {"prompt": WORKFLOW}
    async with aiohttp.ClientSession() as session, session.post(f"{url}/prompt", json=body) as answer:
        said = {"status": answer.status, "message": (await answer.json())["error"]["message"]}
    await runner.cleanup()
    return {**said, "open": len(gateway.ledger.open)}


async def main() -> None:
    folder = Path(sys.argv[1])
    outcomes = [await race(folder), await poison(folder), await unwritable(folder), await silence(folder)]
    sys.stdout.write(json.dumps(outcomes))


if __name__ == "__main__":
    asyncio.run(main())
