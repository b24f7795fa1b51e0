"""Everything of ComfyUI's server that is the same for all workers: passed on to one of them, as it came."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import mimetypes
import re
import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web
from yarl import URL

from ..made_files import kept_name
from .journal import Journal
from .link import Link, WorkerLost

log = logging.getLogger(__name__)

_CHUNK = 1 << 16
_CONNECT_S = 5.0
_ANSWER_S = 60.0
# Of one connection, and not of what is carried (RFC 9110, 7.6.1); Origin and its kin are judged here already.
_OF_A_CONNECTION = {
    *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding"),
    *("upgrade", "host", "content-length", "origin", "sec-fetch-site"),
}
_UNPACKED = ("gzip", "deflate", "br", "zstd")  # what aiohttp's server unpacks before a body is passed on
_TAG = re.compile(r"[0-9a-f-]{36}\.\w+")
_SHOWN_IN_A_PAGE = ("image/", "video/", "audio/")
_SCRIPTED = "image/svg+xml"


class Forwarding:
    """Passes requests on.

    Args:
        links: the gateway's workers by name, as they come and go.
    """

    def __init__(self, links: Mapping[str, Link], journal: Journal) -> None:
        self._links, self._journal = links, journal
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
        connector = aiohttp.TCPConnector(limit=0)  # one that is slow holds up nobody
        jar = aiohttp.DummyCookieJar()
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False, cookie_jar=jar
        )

    async def close(self) -> None:
        """Let go of the connections."""
        await self._session.close()

    def _able(self) -> list[Link]:
        return sorted(self._links.values(), key=lambda link: (not link.ready, link.name))

    async def front(self, request: web.Request) -> web.StreamResponse:
        """Answer as the first worker does: always the same one, as long as it is there."""
        # A worker could take a path that leads up for one of those that the gateway answers itself.
        if request.path.startswith("/fleet") or ".." in request.path.split("/"):
            raise web.HTTPNotFound
        for link in self._able():
            try:
                return await self._pass_on(request, link, request.rel_url.raw_query_string)
            except WorkerLost:
                if request.method not in ("GET", "HEAD"):
                    break
        return web.Response(status=503, text=self._nobody(), headers={"Retry-After": "2"})

    def _nobody(self) -> str:
        states = ", ".join(f"{link.name} is {link.facts['state']}" for link in self._able()) or "none has started yet"
        return f"The fleet has no worker that answers ({states}). /fleet shows them."

    async def features(self) -> Any:
        """Return what ComfyUI's server says of its abilities."""
        for link in self._able():
            try:
                return (await link.ask("GET", "/features"))[1] or {}
            except WorkerLost:
                continue
        return {}

    async def everywhere(self, request: web.Request) -> web.Response:
        """Hand a POST with JSON to all workers. The worst answer counts."""
        body = await request.json() if request.can_read_body else None
        answers = await asyncio.gather(
            *(link.ask("POST", request.path, body) for link in self._links.values()), return_exceptions=True
        )
        heard = [answer for answer in answers if not isinstance(answer, BaseException)]
        status, found = max(heard, key=lambda answer: answer[0], default=(503, None))
        return web.Response(status=status) if found is None else web.json_response(found, status=status)

    async def view(self, request: web.Request) -> web.StreamResponse:
        """Answer ``GET /view``: from the worker that made the file; if that is gone, from the journal."""
        tag, _, subfolder = request.query.get("subfolder", "").partition("/")
        if not _TAG.fullmatch(tag):
            return await self.front(request)
        asked = {**request.query, "subfolder": subfolder}
        maker = next((link for link in self._links.values() if link.run == tag.partition(".")[2]), None)
        if maker is not None:
            try:
                return await self._pass_on(request, maker, asked, refuse=404)
            except WorkerLost:
                pass
        content = await self._journal.file(kept_name(tag, {"type": "output", "filename": "", **asked}))
        if content is None:
            raise web.HTTPNotFound
        return web.Response(body=content, headers=_file_headers(asked.get("filename", "")))

    async def _pass_on(
        self, request: web.Request, link: Link, query: str | Mapping[str, str], refuse: int = 0
    ) -> web.StreamResponse:
        """Answer with what a worker answers.

        Raises:
            WorkerLost: it answers nothing, or the status ``refuse``.
        """
        unpacked = request.headers.get("Content-Encoding", "").lower() in _UNPACKED
        left_out = {*_OF_A_CONNECTION, "content-encoding"} if unpacked else _OF_A_CONNECTION
        headers = {name: text for name, text in request.headers.items() if name.lower() not in left_out}
        body = request.content if request.can_read_body else None
        url = link.url(request.rel_url.raw_path)
        target = f"{url}?{query}" if isinstance(query, str) and query else url
        options: dict[str, Any] = {} if isinstance(query, str) else {"params": query}
        try:
            asking = self._session.request(
                request.method,
                URL(target, encoded=True) if not options else target,
                headers=headers,
                data=body,
                allow_redirects=False,
                **options,
            )
            # A process that was stopped takes connections and says nothing. An upload may take its time.
            answer = await asyncio.wait_for(asking, _ANSWER_S if body is None else None)
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            raise WorkerLost(f"{link.name} does not answer ({error})") from error
        async with answer:
            if answer.status == refuse:
                raise WorkerLost(f"{link.name} answered {refuse}")
            response = web.StreamResponse(status=answer.status, reason=answer.reason)
            for name, text in answer.headers.items():
                if name.lower() not in _OF_A_CONNECTION:
                    response.headers.add(name, text)
            response.content_length = answer.content_length
            await response.prepare(request)
            async for chunk in answer.content.iter_chunked(_CHUNK):
                await response.write(chunk)
            await response.write_eof()
            return response


def _file_headers(name: str) -> dict[str, str]:
    """Return headers for a file that nobody has looked into: what could run scripts is downloaded, never shown."""
    kind = mimetypes.guess_type(name)[0] or ""
    shown = kind.startswith(_SHOWN_IN_A_PAGE) and kind != _SCRIPTED
    quoted = "".join(character for character in name if character.isprintable() and character not in '\\"')
    return {
        "Content-Type": kind if shown else "application/octet-stream",
        "Content-Disposition": f'{"" if shown else "attachment; "}filename="{quoted}"',
        "X-Content-Type-Options": "nosniff",
    }


@web.middleware
async def same_origin(request: web.Request, handler: Any) -> web.StreamResponse:
    """Refuse what another site's page sends to a gateway on this machine, as ComfyUI does (server.py)."""
    if request.headers.get("Sec-Fetch-Site") == "cross-site":
        raise web.HTTPForbidden
    host, origin = urlsplit(f"//{request.headers.get('Host', '')}"), urlsplit(request.headers.get("Origin", ""))
    ports = origin.port is not None and host.port is not None
    same = origin.netloc.lower() == host.netloc.lower() if ports else origin.hostname == host.hostname
    if origin.netloc and not same and await _is_this_machine(host.hostname):
        raise web.HTTPForbidden
    return await handler(request)


async def _is_this_machine(name: str | None) -> bool:
    """Return True if a name leads to this machine alone, as the owner of any domain can have it do."""
    if name is None:
        return False
    try:
        found = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # this machine knows no such name
        return False
    addresses = [ipaddress.ip_address(address[0]) for *_, address in found]
    plain = [getattr(address, "ipv4_mapped", None) or address for address in addresses]
    return all(address.is_loopback or address.is_unspecified for address in plain)
