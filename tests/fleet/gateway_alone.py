"""The gateway's parts with workers that misbehave, in the environment of a fleet. Prints what came of it as JSON.

python gateway_alone.py FOLDER
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from aiohttp import web

from onediff_comfy.fleet.gateway.api import Gateway
from onediff_comfy.fleet.gateway.carrier import MOST_ATTEMPTS
from onediff_comfy.fleet.gateway.journal import Journal
from onediff_comfy.fleet.gateway.prompts import parse

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
    await gateway.application()
    prompt = parse({"prompt": WORKFLOW}, 0)
    await gateway.carrier.submit(prompt)
    victims = 0
    while prompt.id in gateway.ledger.open and victims < 2 * MOST_ATTEMPTS:
        async with _Dying() as url:
            victims += 1
            facts = {"name": f"worker {victims}", "run": "r", "url": url, "state": "ready"}
            gateway.carrier.register(facts)
            while facts["name"] in gateway.carrier.links:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)
    entry = await gateway.ledger.entry(prompt.id)
    await gateway.carrier.stop()
    return {"victims": victims, "messages": entry["status"]["messages"] if entry else None}


class _Dying:
    """A server that ends every connection."""

    async def __aenter__(self) -> str:
        async def die(request: web.Request) -> web.Response:
            assert request.transport is not None
            request.transport.close()
            return web.Response()

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", die)
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
    runner = web.AppRunner(await gateway.application())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    (folder / "unwritable").rmdir()
    (folder / "unwritable").touch()
    import aiohttp

    url = f"http://127.0.0.1:{runner.addresses[0][1]}/prompt"
    async with aiohttp.ClientSession() as session, session.post(url, json={"prompt": WORKFLOW}) as answer:
        said = {"status": answer.status, "message": (await answer.json())["error"]["message"]}
    await runner.cleanup()
    return {**said, "open": len(gateway.ledger.open)}


async def main() -> None:
    folder = Path(sys.argv[1])
    outcomes = [await race(folder), await poison(folder), await unwritable(folder)]
    sys.stdout.write(json.dumps(outcomes))


if __name__ == "__main__":
    asyncio.run(main())
