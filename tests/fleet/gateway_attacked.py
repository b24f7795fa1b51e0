"""Hostile clients, damaged journals and frozen workers, against the gateway alone; see ``gateway_alone``."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web
from misbehaving import SOON_S, WORKFLOW, Server, hand_in, looked, register, silenced, slow, until, visited

from onediff_comfy.fleet.gateway import carrier, clients, journal, link
from onediff_comfy.fleet.gateway.prompt import parse


async def collision(folder: Path) -> dict[str, Any]:
    """Ten clients hand in a prompt of one id at once, while two workers are free."""
    async with visited(folder) as (gateway, session, url), Server(slow) as one, Server(slow) as two:
        register(gateway, "one", one)
        register(gateway, "two", two)
        name = uuid.uuid4()
        statuses = await asyncio.gather(*(hand_in(session, url, prompt_id=str(name)) for _ in range(10)))
        handed = [*one.asked, *two.asked].count("/prompt")
        loads = sum(worker.load for worker in gateway.carrier.links.values())
    return {"statuses": sorted(set(statuses)), "handed": handed, "loads": loads}


async def linked(folder: Path) -> dict[str, Any]:
    """The checkpoint's name comes from another node."""
    loader = {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": ["text", 0]}}
    async with visited(folder) as (_, session, url):
        return {"status": await hand_in(session, url, prompt={**WORKFLOW, "loader": loader})}


async def damaged(folder: Path) -> dict[str, Any]:
    """The journal has rubbish beside one prompt and one result that are whole."""
    good = parse({"prompt": WORKFLOW}, 3)
    kept = {"id": str(uuid.uuid4()), "entry": {"prompt": [0, "", {}, {}, []], "outputs": {}, "status": {}}}
    for kind, whole in (("prompts", good.to_journal()), ("results", kept)):
        (folder / "v1" / kind).mkdir(parents=True)
        wrong = [whole | {"id": "../x"}, whole | {"id": 7}, {}, [1], "x", {"id": good.id, "number": 0, "body": {}}]
        wrong += [whole | {"entry": 5, "body": 5}, good.to_journal() | {"number": float("nan")}]
        texts = [json.dumps(each) for each in wrong] + ["", "{", "[" * 100_000, "\0"]
        for text in texts:
            (folder / "v1" / kind / str(uuid.uuid4())).write_text(text)
        (folder / "v1" / kind / whole["id"]).write_text(json.dumps(whole))
    async with visited(folder) as (gateway, session, url):
        async with session.get(f"{url}/history/{kept['id']}") as answer:
            found = await answer.json()
        for damaged_one in (folder / "v1" / "results").iterdir():
            async with session.get(f"{url}/history/{damaged_one.name}") as answer:
                assert answer.status == 200, damaged_one.read_text()[:100]
        return {"open": list(gateway.ledger.open) == [good.id], "found": list(found) == [kept["id"]]}


async def requests(folder: Path) -> dict[str, Any]:
    """What no client of ComfyUI sends. Each is answered, none with 500, and nothing is lost by it."""
    kept, file = str(uuid.uuid4()), folder / "v1" / "files" / "a"
    async with visited(folder) as (gateway, session, url):
        await gateway.ledger.journal.finish(kept, {"id": kept, "entry": {"outputs": {}}})
        await gateway.ledger.journal.keep_file("a", b"a person's")
        prompt, deep = {"prompt": WORKFLOW}, "[" * 100_000
        bodies: list[Any] = [
            [],
            "x",
            None,
            7,
            {"prompt": 5},
            prompt | {"extra_data": "x"},
            prompt | {"extra_data": [1]},
        ]
        bodies += [prompt | {"number": number} for number in ("x", [], None, float("nan"), float("inf"), 10**400)]
        bodies += [prompt | {"prompt_id": name} for name in (7, "../x", str(uuid.uuid4()).upper(), "")]
        texts = [json.dumps(body) for body in bodies] + [deep, "{", "\0", ""]
        asked = [("POST", "/prompt", text) for text in texts]
        names: list[Any] = ["", "../results", f"../results/{kept}", "x" * 5000, 7, None, [kept], {}]
        for path in ("/history", "/queue"):
            asked += [("POST", path, json.dumps({"delete": [name]})) for name in names]
            asked += [("POST", path, text) for text in (deep, "[]", '"x"', '{"delete": 7}')]
        asked += [("GET", f"/history/{name}", "") for name in ("%2e%2e%2fprompts%2fx", "x" * 5000, "%00", "..%2f")]
        asked += [("GET", f"/history?{query}", "") for query in ("max_items=x", "offset=-9", "max_items=-5")]
        asked += [("GET", "/api/jobs?limit=x", ""), ("POST", "/api/jobs/cancel", "[]")]
        tag = f"{uuid.uuid4()}.abc"
        for name in ("../../prompts/x", "a%00b", "x" * 5000):
            asked += [("GET", f"/view?subfolder={tag}&filename={name}", "")]
            asked += [("GET", f"/view?subfolder={tag}/{name}&filename=x&type=../results", "")]
        statuses = {}
        for method, path, text in asked:
            async with session.request(method, url + path, data=text.encode()) as answer:
                statuses[f"{method} {path[:60]} {text[:60]}"] = answer.status
        left = (await gateway.ledger.entry(kept), file.exists(), len(gateway.ledger.open))
    return {"failed": [line for line, status in statuses.items() if status == 500], "left": left}


async def flood(folder: Path) -> dict[str, Any]:
    """One client sends too much, one reads nothing of what it is told; a third one is served."""
    clients._TOO_MANY = 100
    async with visited(folder) as (gateway, session, url):
        large = await session.ws_connect(f"{url}/ws?clientId=large")
        deaf = await session.ws_connect(f"{url}/ws?clientId=deaf")
        assert deaf._response.connection is not None
        deaf._response.connection.transport.pause_reading()
        with contextlib.suppress(ConnectionError):
            await large.send_str("x" * (8 << 20))
        gone = await until(lambda: "large" not in gateway.clients)
        one = gateway.clients.get("deaf")
        while "deaf" in gateway.clients and one is not None:
            one.event("status", "x" * 100_000)
            await asyncio.sleep(0.001)
        good = await session.ws_connect(f"{url}/ws?clientId=good")
        told = await good.receive_json(timeout=5)
    return {"large": gone, "deaf": "deaf" not in gateway.clients, "told": told["type"]}


async def unheard(folder: Path) -> dict[str, Any]:
    """Clients that are not there hand in what a worker refuses. No connection to it stays open."""

    async def refuse(server: Server, request: web.Request) -> web.StreamResponse:
        return await slow(server, request) if request.path != "/prompt" else web.json_response({}, status=400)

    carrier._LOOK_EVERY_S = 0.1
    async with visited(folder) as (gateway, session, url), Server(refuse) as worker:
        register(gateway, "worker", worker)
        for number in range(20):
            assert await hand_in(session, url, client_id=str(number)) == 400
        most = worker.asked.count("/ws")
        await until(lambda: not worker.sockets)
        return {"connections": most, "left": len(worker.sockets)}


async def frozen(folder: Path) -> dict[str, Any]:
    """A worker takes connections and says nothing, as one that was stopped. Another is there."""

    async def nothing(_server: Server, _request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(SOON_S)
        return web.Response()

    link._ANSWER_S = 0.3
    async with visited(folder) as (gateway, session, url), Server(nothing) as stopped, Server(slow) as other:
        register(gateway, "stopped", stopped)
        handing_in = asyncio.create_task(hand_in(session, url))
        await asyncio.sleep(0.1)
        register(gateway, "other", other)
        status = await asyncio.wait_for(handing_in, SOON_S)
        moved = await until(lambda: other.queue)
    return {"status": status, "moved": moved}


async def half_done(folder: Path) -> dict[str, Any]:
    """A worker is done, and freezes while its picture is fetched. Another one does the prompt."""

    def done(freezes: bool) -> Callable[[Server, web.Request], Awaitable[web.StreamResponse]]:
        async def answer(server: Server, request: web.Request) -> web.StreamResponse:
            if request.path.startswith("/history/") and server.queue:
                name = request.path.rpartition("/")[2]
                shown = {"filename": "x.png", "type": "output", "subfolder": ""}
                return web.json_response({name: {"prompt": [], "outputs": {"n": {"images": [shown]}}, "status": {}}})
            if request.path == "/view":
                await asyncio.sleep(2 * SOON_S if freezes else 0)
                return web.Response(body=b"picture")
            if request.path == "/queue":
                return web.json_response({"queue_running": []})
            return await slow(server, request)

        return answer

    async with visited(folder) as (gateway, session, url), Server(done(True)) as one, Server(done(False)) as two:
        register(gateway, "one", one)
        await hand_in(session, url)
        (prompt,) = gateway.ledger.open.values()
        await gateway.carrier._look_after()
        assert await until(lambda: "/view" in one.asked)
        register(gateway, "two", two)
        silenced(gateway, "one")
        await gateway.carrier._look_after()
        assert await until(lambda: prompt.attempt is not None and prompt.attempt.taken)
        await gateway.carrier._look_after()
        assert await until(lambda: not gateway.ledger.open)
        written = [json.loads(path.read_text())["worker"] for path in (folder / "v1" / "results").iterdir()]
        return {"open": len(gateway.ledger.open), "written": written}


async def liar(folder: Path) -> dict[str, Any]:
    """A worker tells the end of a prompt that it was not given, and has a history of it."""

    async def lie(server: Server, request: web.Request) -> web.StreamResponse:
        if request.path.startswith("/history/"):
            name = request.path.rpartition("/")[2]
            return web.json_response({name: {"prompt": [], "outputs": {}, "status": {"status_str": "success"}}})
        return await slow(server, request)

    async with visited(folder) as (gateway, session, url), Server(slow) as honest, Server(lie) as other:
        register(gateway, "honest", honest)
        await hand_in(session, url)
        (name,) = gateway.ledger.open
        register(gateway, "other", other)
        await gateway.carrier.links["other"].listening.to("somebody")
        await until(lambda: other.sockets)
        for socket in other.sockets:
            for data in ({"node": None, "prompt_id": name}, {"node": None, "prompt_id": [name]}, [], None):
                await socket.send_json({"type": "executing", "data": data})
            await socket.send_str("[]")
            await socket.send_bytes(b"\0")
        await asyncio.sleep(0.3)
        return {"open": list(gateway.ledger.open) == [name], "worker": gateway.ledger.open[name].worker is not None}


async def heirs(folder: Path) -> dict[str, Any]:
    """A gateway takes a prompt while another one runs on the same journal, and ends without it."""
    journal.LIFE_S = carrier.LIFE_S = 0.1
    journal._DEAD_AFTER_S = 1.0
    async with visited(folder) as (heir, _, _):
        async with visited(folder) as (first, session, url):
            await hand_in(session, url)
            (name,) = first.ledger.open
            await asyncio.sleep(2.5)
            early = list(heir.ledger.open)
        late = await until(lambda: name in heir.ledger.open)
        done = await heir.ledger.finish(heir.ledger.open[name], {"outputs": {}})
        await asyncio.sleep(0.5)
        return {"early": early, "late": late, "done": done, "again": list(heir.ledger.open)}


async def strangers(folder: Path) -> dict[str, Any]:
    """Clients call themselves what fits into no address, or hand in what makes a connection break."""

    async def breaks(server: Server, request: web.Request) -> web.StreamResponse:
        if request.path == "/prompt" and b"poison" in await request.read():
            assert request.transport is not None
            request.transport.close()
        return await slow(server, request)

    names, outcomes = ("x" * 9000, "\ud800", "\r\nX: y", "\0", "poison"), []
    for number, name in enumerate(names):
        async with visited(folder / str(number)) as (gateway, session, url), Server(breaks) as worker:
            register(gateway, "worker", worker)
            assert await hand_in(session, url, client_id="honest") == 200
            (honest,) = gateway.ledger.open.values()
            workflow = {**WORKFLOW, "more": {"class_type": "PrimitiveString", "inputs": {"value": name}}}
            assert await hand_in(session, url, prompt=workflow, client_id=name) == 200
            assert await until(lambda worker=worker: len(worker.queue) == 2)
            for _ in range(3):
                await looked(gateway)
            outcomes.append([gateway.ledger.counts["workers_lost"], honest.attempts, len(worker.queue)])
    return {"outcomes": outcomes}


async def jobs(folder: Path) -> dict[str, Any]:
    """Clients write what they like beside their prompts, and the journal has results of odd forms. All are listed."""
    item: list[Any] = [0, "x", {}, {}, []]
    odd: list[Any] = [{}, {"prompt": 5}, {"prompt": [1, 2, 3, 4]}, {"prompt": item, "outputs": 5, "status": "ok"}]
    odd += [{"prompt": item, "outputs": {"n": [5]}, "status": {"messages": told}} for told in (5, [5], [[[], 5]])]
    odd += [
        {"prompt": item, "status": {"messages": [["execution_start", 5], ["execution_success", {"timestamp": "x"}]]}}
    ]
    odd += [{"prompt": [0, "x", {}, {"create_time": created}, []]} for created in ("yesterday", 10**400, [])]
    (folder / "v1" / "results").mkdir(parents=True)
    for entry in odd:
        name = str(uuid.uuid4())
        (folder / "v1" / "results" / name).write_text(json.dumps({"id": name, "entry": entry}))
    extras = [
        {"create_time": "yesterday"},
        {"create_time": []},
        {"extra_pnginfo": "x"},
        {"extra_pnginfo": {"workflow": 5}},
    ]
    statuses = []
    async with visited(folder) as (gateway, session, url):
        for extra in extras:
            assert await hand_in(session, url, extra_data=extra) == 200
        for order in ("", "?sort_by=execution_duration", "?workflow_id=x", "?status=completed"):
            async with session.get(f"{url}/api/jobs{order}") as answer:
                statuses.append([answer.status, len((await answer.json()).get("jobs", ()))])
        for name in gateway.ledger.history:
            async with session.get(f"{url}/api/jobs/{name}") as answer:
                assert answer.status == 200, gateway.ledger.history[name]
    return {"listed": statuses, "known": [len(odd), len(extras)]}


async def undone(folder: Path) -> dict[str, Any]:
    """A machine lost power while a result was written: it is empty, and the prompt is still there."""
    prompt = parse({"prompt": WORKFLOW}, 3)
    for kind, text in (("prompts", json.dumps(prompt.to_journal())), ("results", "")):
        (folder / "v1" / kind).mkdir(parents=True)
        (folder / "v1" / kind / prompt.id).write_text(text)
    async with visited(folder) as (gateway, _, _):
        taken = list(gateway.ledger.open) == [prompt.id]
        done = taken and await gateway.ledger.finish(gateway.ledger.open[prompt.id], {"outputs": {"n": {}}})
    async with visited(folder) as (gateway, _, _):
        return {"taken": taken, "done": done, "kept": await gateway.ledger.entry(prompt.id)}


async def litter(folder: Path) -> dict[str, Any]:
    """The journal's folders have what no gateway puts there beside a prompt and a result."""
    prompt, kept = parse({"prompt": WORKFLOW}, 3), {"id": str(uuid.uuid4()), "entry": {"outputs": {}}}
    for kind, whole in (("prompts", prompt.to_journal()), ("results", kept), ("gateways", {"id": "x"})):
        there = folder / "v1" / kind
        there.mkdir(parents=True)
        (there / str(whole["id"])).write_text(json.dumps(whole))
        (there / "a\nb").touch()
        (there / os.fsdecode(b"\xff\xfe")).touch()
        (there / str(uuid.uuid4())).symlink_to("/nowhere")
        (there / "loop").symlink_to(there)
        (there / "a\nfolder").mkdir()
        (there / str(uuid.uuid4())).mkdir()
        os.mkfifo(there / str(uuid.uuid4()))
    async with visited(folder) as (gateway, _, _):
        await journal.Succession(gateway.ledger).look()
        return {
            "open": list(gateway.ledger.open) == [prompt.id],
            "history": list(gateway.ledger.history) == [kept["id"]],
        }


ATTACKS = (
    heirs,
    undone,
    litter,
    jobs,
    strangers,
    collision,
    linked,
    damaged,
    requests,
    flood,
    unheard,
    frozen,
    half_done,
    liar,
)
