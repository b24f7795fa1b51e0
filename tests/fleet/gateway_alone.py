"""The gateway's parts with workers that misbehave, in the environment of a fleet. Prints what came of it as JSON.

python gateway_alone.py FOLDER
"""

from __future__ import annotations

import asyncio
import json
import sys
import traceback
from pathlib import Path
from typing import Any

import aiohttp
import gateway_asked
import gateway_attacked
import gateway_late
import gateway_lied_to
from aiohttp import web
from misbehaving import WORKFLOW, Server, looked, patient, register, served, silenced, slow, until

from onediff_comfy.fleet.gateway.api import Gateway
from onediff_comfy.fleet.gateway.carrier import MOST_ATTEMPTS
from onediff_comfy.fleet.gateway.journal import Journal
from onediff_comfy.fleet.gateway.prompt import parse


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
    runner, url = await served(gateway)
    session = aiohttp.ClientSession()
    socket = await session.ws_connect(f"{url}/ws?clientId=person")
    prompt = parse({"prompt": WORKFLOW, "client_id": "person"}, 0)
    await gateway.carrier.submit(prompt)
    workers = 0
    while prompt.id in gateway.ledger.open and gateway.ledger.counts["retried"] < 2 * MOST_ATTEMPTS:
        async with Server(_die) as worker:
            workers += 1
            register(gateway, f"worker {workers}", worker)
            while gateway.carrier.links:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)
    # Not the workers that came: while what became of the prompt is being written, more come, and are not given it.
    victims = gateway.ledger.counts["retried"] + 1
    entry = await gateway.ledger.entry(prompt.id)
    told = [await socket.receive_json(timeout=5)]
    while told[-1]["type"] != "executing":
        told.append(await socket.receive_json(timeout=5))
    await session.close()
    await runner.cleanup()
    messages = entry["status"]["messages"] if entry else None
    return {"victims": victims, "messages": messages, "told": [event["type"] for event in told[-3:]]}


async def silence(folder: Path) -> dict[str, Any]:
    """A worker that has a prompt answers, but its heartbeats have ceased; another one comes."""
    gateway = Gateway(Journal((folder / "silence").as_uri()), {})
    await gateway.application()
    prompt = parse({"prompt": WORKFLOW}, 0)
    async with Server(slow) as silent, Server(slow) as other:
        register(gateway, "silent", silent)
        await gateway.carrier.submit(prompt)
        seen = [getattr(prompt.worker, "name", None)]
        register(gateway, "other", other)
        silenced(gateway, "silent")
        await looked(gateway)
        await until(lambda: prompt.worker is gateway.carrier.links["other"])
        seen.append(getattr(prompt.worker, "name", None))
        await gateway.carrier.stop()
    return {"first": seen[0], "last": seen[-1], "attempts": prompt.attempts}


async def _die(_server: Server, request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def unwritable(folder: Path) -> dict[str, Any]:
    """The journal's folder is a file by now."""
    gateway = Gateway(Journal((folder / "unwritable").as_uri()), {})
    runner, url = await served(gateway)
    (folder / "unwritable").rmdir()
    (folder / "unwritable").touch()
    body = {"prompt": WORKFLOW}
    async with aiohttp.ClientSession() as session, session.post(f"{url}/prompt", json=body) as answer:
        said = {"status": answer.status, "message": (await answer.json())["error"]["message"]}
    await runner.cleanup()
    return {**said, "open": len(gateway.ledger.open)}


async def main() -> None:
    outcomes = {}
    for happens in (
        race,
        poison,
        unwritable,
        silence,
        *gateway_attacked.ATTACKS,
        *gateway_late.COME_LATE,
        *gateway_lied_to.LIES,
        *gateway_asked.REQUESTS,
    ):
        folder = Path(sys.argv[1]) / happens.__name__
        folder.mkdir()
        patient()
        try:
            outcomes[happens.__name__] = await happens(folder)
        except Exception:  # the others' outcomes are to be seen all the same
            outcomes[happens.__name__] = {"raised": traceback.format_exc()}
    sys.stdout.write(json.dumps(outcomes))


if __name__ == "__main__":
    asyncio.run(main())
