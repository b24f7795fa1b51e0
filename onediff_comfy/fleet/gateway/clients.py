"""The clients that listen on ``/ws``, and what they are sent."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import struct
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp
from aiohttp import web

from ..made_files import kept_name, made_files, tagged
from .journal import Ledger
from .link import Link, WorkerLost
from .prompt import Attempt, Prompt, as_handed_in, failed

log = logging.getLogger(__name__)

_ENDS = ("execution_success", "execution_error", "execution_interrupted")
_PREVIEW, _PREVIEW_WITH_METADATA = 1, 4  # BinaryEventTypes in ComfyUI's protocol.py
_IMAGE_TYPES = {"image/jpeg": 1, "image/png": 2}
_MOST_WAITING = 200
"""Messages that may wait for a slow client. Of more, previews are left out."""
_TOO_MANY = 10_000
"""Messages after which a client that reads nothing is let go: it can connect again."""


class Client:
    """One open connection. What is sent waits here, so that a slow client holds up nobody."""

    def __init__(self, socket: web.WebSocketResponse, connection: asyncio.Transport | None) -> None:
        self._connection = connection
        self.flags: dict[str, Any] = {}
        self._socket = socket
        self._waiting: asyncio.Queue[str | bytes] = asyncio.Queue()
        self._writer = asyncio.create_task(self._write())

    def send(self, content: str | bytes) -> None:
        """Have a message sent after those that wait."""
        if self._waiting.qsize() > _TOO_MANY:
            self.close()
            return
        if isinstance(content, bytes):
            if self._waiting.qsize() > _MOST_WAITING:
                return
            content = content if self.flags.get("supports_preview_metadata") is True else without_metadata(content)
        self._waiting.put_nowait(content)

    def event(self, kind: str, data: Any) -> None:
        """Have a JSON message sent."""
        self.send(json.dumps({"type": kind, "data": data}))

    async def _write(self) -> None:
        with contextlib.suppress(ConnectionError, aiohttp.ClientError):
            while True:
                content = await self._waiting.get()
                if isinstance(content, str):
                    await self._socket.send_str(content)
                else:
                    await self._socket.send_bytes(content)

    def close(self) -> None:
        """Send nothing any more, and end the connection."""
        self._writer.cancel()
        if self._connection is not None:
            self._connection.abort()  # a farewell would have to wait for what was sent before


def without_metadata(content: bytes) -> bytes:
    """Return a preview in the form for clients that do not know the newer one; any other message as it is.

    The layouts are ComfyUI's (server.py, send_image and send_image_with_metadata), numbers 4 bytes big-endian: type,
    length of the JSON, JSON, picture; and type, 1 for JPEG or 2 for PNG, picture.
    """
    if len(content) < 8 or struct.unpack_from(">I", content)[0] != _PREVIEW_WITH_METADATA:
        return content
    length = struct.unpack_from(">I", content, 4)[0]
    kind = _IMAGE_TYPES.get(json.loads(content[8 : 8 + length]).get("image_type"), 1)
    return struct.pack(">II", _PREVIEW, kind) + content[8 + length :]


class Clients:
    """Everybody who listens, by the id that they gave.

    Args:
        status: makes the data of a ``status`` message.
        features: makes that of a ``feature_flags`` message.
        shown: makes the messages for a client that connects again while a prompt of its runs.
    """

    def __init__(
        self,
        status: Callable[[], dict[str, Any]],
        features: Callable[[], Awaitable[Any]],
        shown: Callable[[str], list[str]],
    ) -> None:
        self._status, self._features, self._shown = status, features, shown
        self._open: dict[str, Client] = {}

    def get(self, client: str | None) -> Client | None:
        """Return the connection of a client that listens now."""
        return self._open.get(client) if client is not None else None

    def __contains__(self, client: object) -> bool:
        return client in self._open

    def __len__(self) -> int:
        return len(self._open)

    def tell_status(self) -> None:
        """Tell everybody how many prompts are unfinished."""
        status = json.dumps({"type": "status", "data": self._status()})
        for client in self._open.values():
            client.send(status)

    async def serve(self, request: web.Request) -> web.WebSocketResponse:
        """Answer ``GET /ws`` for as long as the client stays."""
        socket = web.WebSocketResponse(heartbeat=30)
        await socket.prepare(request)
        name = request.query.get("clientId") or uuid.uuid4().hex
        client = self._open[name] = Client(socket, request.transport)
        client.event("status", {**self._status(), "sid": name})
        for content in self._shown(name):
            client.send(content)
        try:
            async for received in socket:
                if received.type == aiohttp.WSMsgType.TEXT:
                    await self._hear(client, received.data)
        finally:
            client.close()
            if self._open.get(name) is client:  # and not a newer connection of the same id
                del self._open[name]
        return socket

    async def _hear(self, client: Client, content: str) -> None:
        """Take what a client tells of its abilities, the one thing that clients say."""
        with contextlib.suppress(ValueError, AttributeError):
            told = json.loads(content)
            if told.get("type") == "feature_flags":
                client.flags = dict(told.get("data") or {})
                client.event("feature_flags", await self._features())


class Told:
    """What workers tell of prompts: noted, and passed on to the clients.

    Args:
        lost: called with a worker that has died.
    """

    def __init__(self, ledger: Ledger, clients: Clients, lost: Callable[[Link], None]) -> None:
        self._ledger, self._clients, self._lost = ledger, clients, lost
        self._completing: set[str] = set()  # by worker's run: one that hangs in it holds up no other

    async def hear(self, link: Link, client: str, received: Any) -> None:
        """Take a message of a worker for a client, or None when the connection has ended."""
        try:
            if received is None:
                if not await link.answers():
                    self._lost(link)
            elif received.type == aiohttp.WSMsgType.TEXT:
                await self._hear_event(link, client, received.data)
            elif received.type == aiohttp.WSMsgType.BINARY:
                self._tell(client, received.data)
        except Exception:  # of one message, and the next ones are to be heard
            log.exception("a message of %s was not understood", link.name)

    def _tell(self, client: str | None, *contents: str | bytes) -> None:
        to = self._clients.get(client)
        for content in contents if to is not None else ():
            to.send(content)  # type: ignore[union-attr]

    async def _hear_event(self, link: Link, client: str, content: str) -> None:
        event = json.loads(content)
        kind, data = event.get("type"), event.get("data") or {}
        if kind in ("status", "feature_flags"):  # the gateway's own to say
            return
        if data.get("prompt_id") is None:
            self._tell(client, content)
            return
        prompt = link.prompts.get(data["prompt_id"])
        attempt = prompt.attempt if prompt is not None else None
        if attempt is None:  # another worker has it by now
            return
        if kind in _ENDS:
            attempt.end.append(content)
        elif kind == "executing" and data.get("node") is None:
            with contextlib.suppress(WorkerLost):  # of which the connection's end tells
                await self.complete(attempt, link, content)
        else:
            self._tell(client, self._noted(attempt, link, event, content))

    def _noted(self, attempt: Attempt, link: Link, event: dict[str, Any], content: str) -> str:
        """Note what an event says. Return what the client is told."""
        kind, data = event["type"], event["data"]
        if kind == "execution_start":
            attempt.started = True
            self._ledger.changed()
        elif kind == "executing":
            attempt.node = content
        elif kind == "executed" and isinstance(data.get("output"), dict):
            data["output"] = tagged({"": data["output"]}, link.tag(attempt.prompt))[""]
            return json.dumps(event)
        return content

    async def complete(self, attempt: Attempt, link: Link, last: str | None = None) -> bool:
        """Write the result, then tell the client: whoever is told asks for it at once.

        Args:
            attempt: what its worker is done with.
            link: to that worker.
            last: its last message about the prompt, if it arrived.

        Returns:
            False if the worker knows of no result.

        Raises:
            WorkerLost: it does not answer.
        """
        prompt = attempt.prompt
        tag = link.tag(prompt)
        if tag in self._completing:
            return True
        self._completing.add(tag)
        try:
            entry = await link.history(prompt.id)
            if entry is None:
                return False
            await self._keep_files(prompt, link, entry)
            entry["prompt"] = as_handed_in(prompt, entry["prompt"])
            entry["outputs"] = tagged(entry["outputs"], tag)
            if not await self._ledger.finish(prompt, entry, link.name):
                return True  # another worker was quicker, and its end is told
        except WorkerLost:
            raise
        except Exception as error:  # whatever a worker reports, the prompt ends
            log.exception("what %s reports of %s was not understood", link.name, prompt.id)
            await self.fail(prompt, f"{link.name} was done with it, and its result could not be read: {error}")
            return True
        finally:
            self._completing.discard(tag)
        self._tell(prompt.client, *attempt.end, last or _end_of(prompt))
        return True

    async def fail(self, prompt: Prompt, text: str, node_errors: Mapping[str, Any] | None = None) -> None:
        """Write why a prompt has no result, and tell the client as a worker would: unless there is one after all."""
        entry = failed(prompt, text, node_errors)
        if not await self._ledger.finish(prompt, entry):
            return
        for kind, data in entry["status"]["messages"]:
            self._tell(prompt.client, json.dumps({"type": kind, "data": data}))
        self._tell(prompt.client, _end_of(prompt))

    async def _keep_files(self, prompt: Prompt, link: Link, entry: dict[str, Any]) -> None:
        for shown in made_files(entry["outputs"]):
            try:
                content = await link.file(shown)
                if content is None:
                    log.error(
                        "%s lists the file %r of %s, and does not give it", link.name, shown["filename"], prompt.id
                    )
                else:
                    await self._ledger.journal.keep_file(kept_name(link.tag(prompt), shown), content)
            except Exception as error:  # the journal's, or of a name that cannot even be asked for: all else is kept
                if isinstance(error, WorkerLost) and not await link.answers():
                    raise
                self._ledger.counts["journal_errors"] += 1
                log.error("the file %r of %s is with %s alone: %s", shown["filename"], prompt.id, link.name, error)


def _end_of(prompt: Prompt) -> str:
    """Return the last message about a prompt."""
    return json.dumps({"type": "executing", "data": {"node": None, "prompt_id": prompt.id}})
