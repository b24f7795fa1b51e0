"""A fleet's gateway without Ray, for benchmarks.fleet: it is told of its workers by a file.

    python -m benchmarks.fleet_gateway JOURNAL_URL PORT WORKERS

WORKERS is a JSON list of ``{"name", "run", "url"}``, read every two seconds. Who is in it and answers is registered, as
each worker does by itself under Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from pathlib import Path

import aiohttp
from aiohttp import web

from onediff_comfy.fleet.gateway.api import Gateway
from onediff_comfy.fleet.gateway.journal import Journal
from onediff_comfy.fleet.gateway.link import HEARTBEAT_S

_ANSWER_S = 30.0


async def main() -> None:
    """Serve until the process is ended."""
    journal, port, workers = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    gateway = Gateway(Journal(journal), {"pid": os.getpid(), "journal": journal})
    runner = web.AppRunner(await gateway.application(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_ANSWER_S)) as session:

        async def beat(facts: dict[str, str]) -> None:
            with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError, OSError):
                async with session.get(f"{facts['url']}/prompt") as answer:
                    if answer.status == 200:
                        gateway.carrier.register({**facts, "state": "ready"})

        while True:
            listed = json.loads(workers.read_text())
            names = {facts["name"] for facts in listed}
            for name in [name for name in gateway.carrier.links if name not in names]:
                gateway.carrier.register({"name": name, "state": "gone"})
            beats = [asyncio.ensure_future(beat(facts)) for facts in listed]
            await asyncio.sleep(HEARTBEAT_S)
            for task in beats:
                if task.done():
                    task.result()


if __name__ == "__main__":
    asyncio.run(main())
