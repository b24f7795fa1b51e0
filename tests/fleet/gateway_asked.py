"""Requests that ComfyUI's own server refuses or answers, against the gateway alone; see ``gateway_alone``."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

from aiohttp import web
from misbehaving import Server, register, slow, visited

EVIL = "http://evil.com"


async def _raw(url: str, line: str, *headers: str, body: bytes = b"") -> int:
    """Send a request as it is written. Return the answer's status."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    lines = [line, *headers, f"Content-Length: {len(body)}", "Connection: close", "", ""]
    writer.write("\r\n".join(lines).encode() + body)
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return int(answer.split()[1])


async def origins(folder: Path) -> dict[str, Any]:
    """Pages of other sites hand in prompts, by names that lead to this machine. Others' names are a proxy's."""
    mine = ("127.0.0.1", "localhost", "LOCALHOST", "2130706433", "0x7f.1", "0.0.0.0", "[::1]", "[::ffff:127.0.0.1]")
    statuses: dict[str, list[int]] = {"mine": [], "own": [], "proxied": []}
    async with visited(folder) as (_, _, url):
        for name in mine:
            for port in ("", ":80"):
                asked = ("POST /queue HTTP/1.1", f"Host: {name}{port}")
                statuses["mine"].append(await _raw(url, *asked, f"Origin: {EVIL}{port}", body=b"{}"))
                statuses["own"].append(await _raw(url, *asked, f"Origin: http://{name}{port}", body=b"{}"))
        for name in ("93.184.216.34", "fleet.invalid"):
            asked = ("POST /queue HTTP/1.1", f"Host: {name}", f"Origin: {EVIL}")
            statuses["proxied"].append(await _raw(url, *asked, body=b"{}"))
        odd = [
            await _raw(url, "GET /queue HTTP/1.1", f"Host: {host}", f"Origin: {EVIL}:80") for host in ("[", "x:99999")
        ]
    return {**{name: sorted(set(found)) for name, found in statuses.items()}, "odd": odd}


async def detours(folder: Path) -> dict[str, Any]:
    """Paths lead through others to what the gateway answers itself."""
    paths = ("/onediff/panel/..%2f..%2fprompt", "/onediff/panel/%2e%2e/%2e%2e/prompt", "/x/../prompt", "/x/..%2fprompt")
    async with visited(folder) as (gateway, _, url), Server(slow) as worker:
        register(gateway, "worker", worker)
        body = json.dumps({"prompt": {}, "prompt_id": "x"}).encode()
        statuses = [await _raw(url, f"POST {path} HTTP/1.1", "Host: x", body=body) for path in paths]
        statuses += [await _raw(url, f"POST /api{path} HTTP/1.1", "Host: x", body=body) for path in paths]
        cleared = await _raw(url, "POST /onediff/panel/clear HTTP/1.1", "Host: x")
        return {"statuses": sorted(set(statuses)), "cleared": cleared, "asked": worker.asked}


async def packed(folder: Path) -> dict[str, Any]:
    """A client sends a file packed with gzip."""

    async def kept(_server: Server, request: web.Request) -> web.StreamResponse:
        return web.Response(body=await request.read())

    async with visited(folder) as (gateway, session, url), Server(kept) as worker:
        register(gateway, "worker", worker)
        for name in ("gzip", "GZIP"):
            content, headers = gzip.compress(b"a file"), {"Content-Encoding": name}
            async with session.post(f"{url}/userdata/x", data=content, headers=headers) as answer:
                found = [answer.status, (await answer.read()).decode(errors="replace")]
    return {"found": found}


REQUESTS = (origins, detours, packed)
