"""What comes late, against the gateway alone: answers of workers that were lost by then; see ``gateway_alone``.

Nothing here depends on how quick the machine is: what is to come late waits until it is let go.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web
from misbehaving import Server, hand_in, looked, register, slow, until, visited

from onediff_comfy.fleet.gateway import carrier
from onediff_comfy.fleet.gateway.api import Gateway
from onediff_comfy.fleet.gateway.carrier import MOST_ATTEMPTS
from onediff_comfy.fleet.gateway.prompt import Prompt, parse

Answer = Callable[[Server, web.Request], Awaitable[web.StreamResponse]]


def _late(path: str, begun: asyncio.Event, go: asyncio.Event, status: int = 200) -> Answer:
    """Answer as ``slow`` does; requests for a path when they are let go, and then with a status."""

    async def answer(server: Server, request: web.Request) -> web.StreamResponse:
        if request.path.startswith(path):
            begun.set()
            await go.wait()
            if status != 200:
                return web.json_response({"error": "late"}, status=status)
        return await slow(server, request)

    return answer


def _gone(gateway: Gateway, name: str, run: str) -> None:
    gateway.carrier.register({"name": name, "run": run, "url": "", "state": "gone"})


def _only(gateway: Gateway) -> Prompt:
    (prompt,) = gateway.ledger.open.values()
    return prompt


def _writing_when_let_go(gateway: Gateway) -> asyncio.Event:
    """Have the journal write prompts once the event that this returns is set."""
    write, written = gateway.ledger.journal.write, asyncio.Event()

    async def writes(*prompt: Any) -> bool:
        await written.wait()
        return await write(*prompt)

    gateway.ledger.journal.write = writes  # type: ignore[method-assign]
    return written


async def on_its_way(folder: Path) -> dict[str, Any]:
    """The journal takes its time, and a worker to check a prompt; it shows its queue meanwhile. Nobody looks for it."""
    begun, go = asyncio.Event(), asyncio.Event()
    async with visited(folder) as (gateway, session, url), Server(_late("/prompt", begun, go)) as worker:
        written = _writing_when_let_go(gateway)
        register(gateway, "worker", worker)
        handing_in = asyncio.create_task(hand_in(session, url))
        await until(lambda: gateway.carrier.links["worker"].prompts)
        await looked(gateway)
        written.set()
        await begun.wait()
        await looked(gateway)
        attempts = _only(gateway).attempts
        go.set()
        return {"status": await handing_in, "attempts": attempts, "handed": worker.asked.count("/prompt")}


async def belated(folder: Path) -> dict[str, Any]:
    """A worker says that it has no prompt when it was given up and another one has it. It stays there."""
    begun, go = asyncio.Event(), asyncio.Event()
    async with (
        visited(folder) as (gateway, session, url),
        Server(_late("/history/", begun, go)) as one,
        Server(slow) as two,
    ):
        register(gateway, "one", one)
        await hand_in(session, url)
        one.queue.clear()
        looking = asyncio.create_task(looked(gateway))
        await begun.wait()
        register(gateway, "two", two)
        _gone(gateway, "one", "one")
        await until(lambda: two.queue)
        go.set()
        await looking
        return {"attempts": _only(gateway).attempts, "handed": len(two.queue)}


async def lost_while_written(folder: Path) -> dict[str, Any]:
    """A worker is lost while the journal writes the prompt that was to be its. Another one gets it, and it does not."""
    async with visited(folder) as (gateway, session, url), Server(slow) as one, Server(slow) as two:
        written = _writing_when_let_go(gateway)
        register(gateway, "one", one)
        handing_in = asyncio.create_task(hand_in(session, url))
        await until(lambda: gateway.carrier.links["one"].prompts)
        _gone(gateway, "one", "one")
        register(gateway, "two", two)
        written.set()
        status = await handing_in
        await until(lambda: two.queue)
        return {"status": status, "handed": [each.asked.count("/prompt") for each in (one, two)]}


async def refused_late(folder: Path) -> dict[str, Any]:
    """A worker refuses a prompt when another one has it: one that waited for it, and one that went there at once."""
    found = []
    for waits in (False, True):
        begun, go = asyncio.Event(), asyncio.Event()
        async with (
            visited(folder / str(waits)) as (gateway, session, url),
            Server(_late("/prompt", begun, go, 500)) as one,
            Server(slow) as two,
        ):
            if not waits:
                register(gateway, "one", one)
            handing_in = asyncio.create_task(hand_in(session, url))
            if waits:
                await handing_in
                register(gateway, "one", one)
            await begun.wait()
            register(gateway, "two", two)
            _gone(gateway, "one", "one")
            await until(lambda two=two: two.queue)
            go.set()
            await until(lambda gateway=gateway: _only(gateway).attempt.taken)  # type: ignore[union-attr]
            found.append([await handing_in, getattr(_only(gateway).worker, "name", None)])
    return {"found": found}


async def runs_it_late(folder: Path) -> dict[str, Any]:
    """A worker says that it runs a prompt when it was lost. The prompt waits, and can be taken off the queue."""
    begun, go = asyncio.Event(), asyncio.Event()

    async def answer(server: Server, request: web.Request) -> web.StreamResponse:
        if request.path == "/queue":
            begun.set()
            await go.wait()
        return await slow(server, request)

    async with visited(folder) as (gateway, session, url), Server(answer) as one:
        register(gateway, "one", one)
        await hand_in(session, url)
        prompt = _only(gateway)
        looking = asyncio.create_task(looked(gateway))
        await begun.wait()
        _gone(gateway, "one", "one")
        go.set()
        await looking
        return {"started": prompt.started, "deleted": await gateway.carrier.delete(prompt.id)}


async def gone_late(folder: Path) -> dict[str, Any]:
    """A process of a worker says that it is gone when another one has come in its place."""
    async with visited(folder) as (gateway, _, _):
        for run in ("first", "second"):
            gateway.carrier.register({"name": "worker", "run": run, "url": "http://nowhere", "state": "ready"})
        _gone(gateway, "worker", "first")
        there = [link.run for link in gateway.carrier.links.values()]
        _gone(gateway, "worker", "second")
        return {"there": there, "left": len(gateway.carrier.links)}


async def given_up(folder: Path) -> dict[str, Any]:
    """Workers die of a prompt, and more of them come while the journal writes why it has no result."""
    written = asyncio.Event()
    async with visited(folder) as (gateway, session, url):
        finish = gateway.ledger.journal.finish

        async def finishes(*result: Any) -> dict[str, Any]:
            await written.wait()
            return await finish(*result)

        gateway.ledger.journal.finish = finishes  # type: ignore[method-assign]
        listening = await session.ws_connect(f"{url}/ws?clientId=person")
        await hand_in(session, url, client_id="person")
        prompt, victims = _only(gateway), 0
        for number in range(MOST_ATTEMPTS + 2):
            async with Server(slow) as worker:
                register(gateway, str(number), worker)
                if gateway.carrier.links[str(number)].prompts:
                    victims += await until(lambda worker=worker: worker.queue)
                _gone(gateway, str(number), str(number))
        again = asyncio.create_task(gateway.carrier.told.fail(prompt, "it is given up once more"))
        await asyncio.sleep(0)
        written.set()
        await again
        await until(lambda: not gateway.ledger.open)
        person = gateway.clients.get("person")
        assert person is not None
        person.event("that was all", None)
        told: list[str] = []
        while told[-1:] != ["that was all"]:
            told.append((await listening.receive_json(timeout=20))["type"])
        errors = told.count("execution_error")
        return {"victims": victims, "errors": errors, "open": len(gateway.ledger.open)}


async def deleted_on_its_way(folder: Path) -> dict[str, Any]:
    """Somebody takes a prompt off the queue while a worker checks it. The worker drops it when it has it."""
    begun, go = asyncio.Event(), asyncio.Event()
    dropped: list[Any] = []

    async def answer(server: Server, request: web.Request) -> web.StreamResponse:
        if request.method == "POST" and request.path in ("/queue", "/interrupt"):
            dropped.append([request.path, await request.json()])
        return await _late("/prompt", begun, go)(server, request)

    async with visited(folder) as (gateway, session, url), Server(answer) as worker:
        register(gateway, "worker", worker)
        handing_in = asyncio.create_task(hand_in(session, url))
        await begun.wait()
        name = _only(gateway).id
        async with session.post(f"{url}/queue", json={"delete": [name]}) as answered:
            status = answered.status
        early = list(dropped)
        go.set()
        await handing_in
        asked = [["/queue", {"delete": [name]}], ["/interrupt", {"prompt_id": name}]]
        return {"status": status, "early": early, "dropped": dropped == asked, "open": len(gateway.ledger.open)}


async def done_when_deleted(folder: Path) -> dict[str, Any]:
    """A prompt is done while its worker is asked to take it off the queue."""
    async with visited(folder) as (gateway, session, url):

        async def answer(server: Server, request: web.Request) -> web.StreamResponse:
            if request.method == "POST" and request.path == "/queue":
                server.queue.clear()
                await gateway.ledger.finish(_only(gateway), {"outputs": {}})
            return await slow(server, request)

        async with Server(answer) as worker:
            register(gateway, "worker", worker)
            await hand_in(session, url)
            prompt = _only(gateway)
            return {"deleted": await gateway.carrier.delete(prompt.id), "kept": prompt.id in gateway.ledger.history}


async def adopted_late(folder: Path) -> dict[str, Any]:
    """A worker that runs a prompt of an earlier gateway takes its time to say so. It is handed to nobody meanwhile."""
    begun, go = asyncio.Event(), asyncio.Event()
    carrier.GRACE_S = 0.0
    prompt = parse({"prompt": {"text": {"class_type": "PrimitiveString", "inputs": {"value": "x"}}}}, 0)
    (folder / "v1" / "prompts").mkdir(parents=True)
    (folder / "v1" / "prompts" / prompt.id).write_text(
        json.dumps({**prompt.to_journal(), "gateway": str(uuid.uuid4())})
    )
    async with (
        visited(folder) as (gateway, _, _),
        Server(_late("/queue", begun, go)) as one,
        Server(slow) as other,
    ):
        carrier.GRACE_S = 60.0
        one.queue.append([0, prompt.id])
        register(gateway, "one", one)
        await begun.wait()
        register(gateway, "other", other)
        await until(lambda: "/queue" in other.asked)
        gateway.carrier.hand_out()
        go.set()
        found = await until(lambda: _only(gateway).worker is gateway.carrier.links["one"])
        return {"found": found, "handed": [*one.asked, *other.asked].count("/prompt")}


COME_LATE = (
    on_its_way,
    belated,
    lost_while_written,
    refused_late,
    runs_it_late,
    gone_late,
    given_up,
    deleted_on_its_way,
    done_when_deleted,
    adopted_late,
)
