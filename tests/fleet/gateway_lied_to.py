"""Workers that report what no ComfyUI does, against the gateway alone; see ``gateway_alone``."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from misbehaving import WORKFLOW, Server, register, slow, until, visited

from onediff_comfy.fleet.gateway import carrier
from onediff_comfy.fleet.gateway.api import Gateway

Answer = Callable[[Server, web.Request], Awaitable[web.StreamResponse]]

PICTURE = {"filename": "x.png", "subfolder": "", "type": "output"}
BREAKS = "a line feed, which ComfyUI puts into a header"
WHOLE = {"outputs": {"n": {"images": [PICTURE]}}, "status": {"status_str": "success", "messages": []}}


def done(entry: Any, **others: Any) -> Answer:
    """Answer as a ComfyUI does that is done with each prompt at once.

    Args:
        entry: what its history has of each, besides the prompt.
        others: what other paths answer, by their last step.
    """

    async def answer(server: Server, request: web.Request) -> web.StreamResponse:
        last = request.path.rpartition("/")[2]
        if last in others:
            return web.json_response(others[last])
        if request.path.startswith("/history/"):
            item = [0, last, WORKFLOW, {}, []]
            return web.json_response({last: {"prompt": item, **entry} if isinstance(entry, dict) else entry})
        if request.path == "/view":
            if request.query["filename"] == BREAKS:
                assert request.transport is not None
                request.transport.close()
            return web.Response(body=b"picture")
        if request.path == "/queue":
            return web.json_response({"queue_running": [], "queue_pending": []})
        return await slow(server, request)

    return answer


async def _ended(gateway: Gateway, session: aiohttp.ClientSession, url: str, worker: Server) -> dict[str, Any] | None:
    """Hand a prompt in. Return its history entry, if it ends."""
    carrier._LOOK_EVERY_S = 0.05
    register(gateway, "worker", worker)
    async with session.post(f"{url}/prompt", json={"prompt": WORKFLOW, "client_id": "person"}) as answer:
        name = (await answer.json())["prompt_id"]

    def ends() -> bool:
        link = gateway.carrier.links["worker"]
        link.seen = time.monotonic()
        return name not in gateway.ledger.open

    await until(ends)
    return await gateway.ledger.entry(name)


async def names(folder: Path) -> dict[str, Any]:
    """A worker lists files by names that no store takes as they are. Each is kept, and found when it is gone."""
    folders = ("cat\n", "\t", ".", "..", "a//b", "a/../b", "./2026", "a%0Ab", "x#1", "a\\b", "日本", "\x7f")
    files = [{**PICTURE, "subfolder": name} for name in folders]
    files += [{**PICTURE, "filename": name} for name in ("cat\n.png", "...", "\0", "\ud800", "x" * 300, BREAKS)]
    reported = {"outputs": {"n": {"images": files}}, "status": {"status_str": "success", "messages": []}}
    async with visited(folder) as (gateway, session, url):
        async with Server(done(reported)) as worker:
            entry = await _ended(gateway, session, url, worker)
            load = gateway.carrier.links["worker"].load
        gateway.carrier.register({"name": "worker", "run": "worker", "state": "gone"})
        lost = []
        for file in entry["outputs"]["n"]["images"] if entry else ():
            if "\ud800" in file["filename"]:  # no client can ask for it either
                continue
            async with session.get(f"{url}/view", params=file) as answer:
                if await answer.read() != b"picture":
                    lost.append(file["filename"][:20])
        return {"ended": entry is not None, "load": load, "lost": lost}


async def reports(folder: Path) -> dict[str, Any]:
    """A worker's entries and queues are of odd forms. Every prompt ends, and no place at the worker is lost."""
    entries: list[Any] = [WHOLE | more for more in ({"status": "ok"}, {"status": None}, {"prompt": {}}, {"prompt": 5})]
    entries += [WHOLE | {"status": {"status_str": [], "messages": told}} for told in ([5], 5, [["execution_start", 5]])]
    entries += [WHOLE | {"outputs": {"n": {"images": [{**PICTURE, "subfolder": {}, "type": "output"}]}}}]
    outcomes = []
    for number, entry in enumerate(entries):
        async with visited(folder / str(number)) as (gateway, session, url), Server(done(entry)) as worker:
            ended = await _ended(gateway, session, url, worker)
            outcomes.append((ended is not None, gateway.carrier.links["worker"].load))
    for number, queue in enumerate(([], "x", {"queue_running": 5}, {"queue_pending": [5, [], [0, []]]})):
        answer = done(WHOLE, queue=queue)
        async with visited(folder / f"queue {number}") as (gateway, session, url), Server(answer) as worker:
            ended = await _ended(gateway, session, url, worker)
            outcomes.append((ended is not None, gateway.carrier.links["worker"].load))
    return {"ended": sorted(set(outcomes))}


async def deaf(folder: Path) -> dict[str, Any]:
    """A worker answers what it is asked, and refuses whoever wants to listen to it."""

    async def refuses(server: Server, request: web.Request) -> web.StreamResponse:
        return web.json_response({}, status=403) if request.path == "/ws" else await done(WHOLE)(server, request)

    async with visited(folder) as (gateway, session, url), Server(refuses) as worker:
        entry = await _ended(gateway, session, url, worker)
        lost = gateway.ledger.counts["workers_lost"]
    return {"ended": entry is not None, "lost": lost, "client": entry and entry["prompt"][3].get("client_id")}


async def refusals(folder: Path) -> dict[str, Any]:
    """A worker refuses what has waited, in forms that ComfyUI does not have."""
    outcomes: list[Any] = []
    answers: list[tuple[int, Any]] = [(400, ["no"]), (400, {"error": "no"}), (500, "no"), (500, {"error": 5})]
    for number, (status, answer) in enumerate(answers):

        async def refuses(server: Server, request: web.Request, status: int = status, answer: Any = answer) -> Any:
            found = request.path == "/prompt"
            return web.json_response(answer, status=status) if found else await slow(server, request)

        async with visited(folder / str(number)) as (gateway, session, url), Server(refuses) as worker:
            async with session.post(f"{url}/prompt", json={"prompt": WORKFLOW}) as taken:
                name = (await taken.json())["prompt_id"]
            register(gateway, "worker", worker)
            await until(lambda gateway=gateway: not gateway.ledger.open)
            entry = await gateway.ledger.entry(name)
            outcomes.append(entry and entry["status"]["messages"][-1][1]["exception_message"])
    return {"said": outcomes}


async def boasts(folder: Path) -> dict[str, Any]:
    """A worker's report of itself is of an odd form. Another one's is shown all the same."""
    lies: list[Any] = [5, [], {"graphs": "abc"}, {"graphs": [5, {"how": "compiled"}]}, {"fallbacks": [1]}]
    lies += [{"a-b": 1, "é": 2, "": 3}, {"x": {"a-b": 1}}, {"x": 10**400, "y": float("nan"), "z": {"w": -(10**400)}}]
    outcomes = []
    async with visited(folder) as (gateway, session, url), Server(slow) as worker:
        for name in ("honest", "liar"):
            register(gateway, name, worker)
        gateway.carrier.links["honest"].report = {"served": 7, "graphs": [{"how": "loaded"}], "times": {"mean": 2.5}}
        for lie in lies:
            gateway.carrier.links["liar"].report = lie if isinstance(lie, dict) else {}
            async with session.get(f"{url}/fleet/status") as answer:
                shown = [len(each["graphs"]) for each in (await answer.json()).get("workers", ())]
                outcomes.append([answer.status, *shown[:1]])
            async with session.get(f"{url}/metrics") as answer:
                outcomes.append(
                    [answer.status, 'onediff_worker_times_mean{worker="honest"} 2.5' in await answer.text()]
                )
    return {"shown": [each for each in outcomes if each not in ([200, 1], [200, True])]}


LIES = (boasts, deaf, refusals, names, reports)
