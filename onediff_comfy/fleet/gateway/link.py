"""One worker as the gateway sees it: what it has, whether it answers, and what it tells about whose prompt."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Container, Coroutine, Mapping
from typing import Any

import aiohttp

from .prompt import Attempt, Prompt

log = logging.getLogger(__name__)

HEARTBEAT_S = 2.0
"""How often a worker says that it is there, if its ComfyUI answers."""
READY_S = 5 * HEARTBEAT_S
"""How long a worker that says nothing is still handed prompts."""
LOST_AFTER_S = 60.0
"""How long a worker may say nothing. Loading a large model can keep ComfyUI from answering for a while."""

_ANSWER_S = 60.0  # a workflow of thousands of nodes is checked before it is answered
_PING_S = 5.0
_WHOLE_FILE = 16 << 20
_CHUNK = 1 << 20

Listener = Callable[["Link", str, Any], Coroutine[Any, Any, None]]


class WorkerLost(Exception):
    """A worker does not answer."""


class Link:
    """The HTTP and WebSocket connections to one ComfyUI.

    Args:
        session: the gateway's.
        facts: what the worker says of itself: ``name``, ``url``, ``run`` (another for each process), ``state``.
        listener: called with this, a client's id and an ``aiohttp.WSMessage`` for each message to a client; and with
            None in place of a message where the connection ended.
    """

    def __init__(self, session: aiohttp.ClientSession, facts: Mapping[str, Any], listener: Listener) -> None:
        self.facts = dict(facts)
        self.seen = time.monotonic()
        self.prompts: dict[str, Prompt] = {}
        self.checkpoint: tuple[str, ...] | None = None
        self.last_used = 0.0
        self.lost = False
        self.report: dict[str, Any] = {}
        self.listening = Listening(session, self, listener)
        self._session = session
        self.nobody = f"onediff-fleet-{uuid.uuid4().hex}"  # the client of prompts that have none

    @property
    def name(self) -> str:
        """Return the worker's name: the same for all processes that follow each other in one place."""
        return str(self.facts["name"])

    @property
    def run(self) -> str:
        """Return the name of this process of the worker."""
        return str(self.facts["run"])

    @property
    def ready(self) -> bool:
        """Return True if it takes prompts."""
        return self.facts["state"] == "ready" and time.monotonic() - self.seen < READY_S

    @property
    def load(self) -> int:
        """Return how many prompts it has."""
        return len(self.prompts)

    def url(self, path: str) -> str:
        """Return the address of a path that begins with ``/``."""
        return f"{self.facts['url']}{path}"

    def tag(self, prompt: Prompt) -> str:
        """Return the name of this worker's run of a prompt."""
        return f"{prompt.id}.{self.run}"

    def assign(self, prompt: Prompt) -> Attempt:
        """Count a prompt as this worker's, from now on."""
        prompt.attempt = Attempt(prompt, self)
        prompt.attempts += 1
        self.prompts[prompt.id] = prompt
        self.checkpoint, self.last_used = prompt.checkpoint, time.monotonic()
        return prompt.attempt

    # -- requests ------------------------------------------------------------------------------

    async def hand_in(self, attempt: Attempt) -> tuple[int, Any]:
        """Give a prompt to the worker. Return the status and JSON of its answer; 200 and None if it need not any more.

        Raises:
            WorkerLost: it did not answer; it may have taken the prompt.
        """
        prompt = attempt.prompt
        client = prompt.client or self.nobody
        try:
            if not attempt.over:
                await self.listening.to(client)
            if attempt.over:
                return 200, None
            return await self.ask("POST", "/prompt", {**prompt.to_worker(), "client_id": _to_worker(client)})
        finally:
            attempt.taken = True

    async def ask(self, method: str, path: str, body: Any = None, seconds: float = _ANSWER_S) -> tuple[int, Any]:
        """Return the status and the JSON of an answer, None where that is no JSON.

        Raises:
            WorkerLost: there was none within ``seconds``.
        """
        timeout = aiohttp.ClientTimeout(total=seconds)
        try:
            async with self._session.request(method, self.url(path), json=body, timeout=timeout) as response:
                content = await response.read()
        except (aiohttp.ClientError, TimeoutError, asyncio.TimeoutError, OSError) as error:
            raise WorkerLost(f"{self.name} does not answer ({error})") from error
        try:
            return response.status, json.loads(content)
        except (ValueError, RecursionError):
            return response.status, None

    async def history(self, prompt_id: str) -> dict[str, Any] | None:
        """Return what the worker knows of a prompt that it is done with: nothing, if that is no entry of a history."""
        _, found = await self.ask("GET", f"/history/{prompt_id}")
        entry = found.get(prompt_id) if isinstance(found, dict) else None
        whole = isinstance(entry, dict) and isinstance(entry.get("outputs"), dict) and "prompt" in entry
        return entry if whole else None

    async def queued(self) -> dict[str, bool]:
        """Return the ids of the prompts that the worker has, and whether it runs them now."""
        _, queue = await self.ask("GET", "/queue", seconds=_PING_S)
        return {
            item[1]: name == "queue_running"
            for name, items in (queue.items() if isinstance(queue, dict) else ())
            for item in (items if isinstance(items, list) else ())
            if isinstance(item, list) and len(item) > 1 and isinstance(item[1], str)
        }

    async def answers(self) -> bool:
        """Return True if the worker's server is there."""
        try:
            await self.queued()
        except WorkerLost:
            return False
        return True

    async def file(self, shown: Mapping[str, Any]) -> bytes | AsyncIterator[bytes] | None:
        """Return a file that the worker lists: whole, a large one in pieces, None if there is none.

        Raises:
            WorkerLost: it did not answer.
        """
        params = {name: str(shown.get(name, "")) for name in ("filename", "subfolder", "type")}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_PING_S, sock_read=_ANSWER_S)
        try:
            response = await self._session.get(self.url("/view"), params=params, timeout=timeout)
            if response.status != 200:
                response.release()
                return None
            if (response.content_length or 0) > _WHOLE_FILE:
                return self._pieces(response)
            return await response.read()
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            raise WorkerLost(f"{self.name} does not answer ({error})") from error

    async def _pieces(self, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        try:
            async for piece in response.content.iter_chunked(_CHUNK):
                yield piece
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            raise WorkerLost(f"{self.name} does not answer ({error})") from error


def _to_worker(client: str) -> str:
    """Return the id that a worker knows a client by, the same one for every gateway.

    What clients call themselves goes into no address: a worker refuses one that is too long.
    """
    return hashlib.sha256(client.encode("utf-8", "surrogatepass")).hexdigest()


class Listening:
    """The WebSocket connections to a worker: one for each client that has prompts there."""

    def __init__(self, session: aiohttp.ClientSession, link: Link, listener: Listener) -> None:
        self._session, self._link, self._listener = session, link, listener
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def to(self, client: str) -> None:
        """Take what the worker tells a client from now on.

        Raises:
            WorkerLost: it could not be reached.
        """
        task = self._tasks.get(client)
        if task is not None and not task.done():
            return
        try:
            connecting = self._session.ws_connect(
                self._link.url("/ws"), params={"clientId": _to_worker(client)}, max_msg_size=0, heartbeat=30
            )
            socket = await asyncio.wait_for(connecting, _ANSWER_S)  # a process that was stopped takes connections
            # Previews with the prompt's name on them; clients.py makes plain ones of them for who knows no others.
            await socket.send_json({"type": "feature_flags", "data": {"supports_preview_metadata": True}})
        except aiohttp.WSServerHandshakeError as error:  # an answer; the prompt's end is found by looking
            log.error("%s takes nobody on /ws: %s", self._link.name, error)
            return
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            raise WorkerLost(f"{self._link.name} does not answer ({error})") from error
        self._tasks[client] = asyncio.create_task(self._read(client, socket))

    async def _read(self, client: str, socket: Any) -> None:
        try:
            async for received in socket:
                await self._listener(self._link, client, received)
        finally:
            await socket.close()
        await self._listener(self._link, client, None)

    def keep(self, clients: Container[str]) -> None:
        """Stop listening for all clients but some and those that have prompts here."""
        needed = {prompt.client or self._link.nobody for prompt in self._link.prompts.values()}
        for client in [client for client in self._tasks if client not in needed and client not in clients]:
            self._tasks.pop(client).cancel()

    def close(self) -> None:
        """Stop listening for everybody."""
        for task in self._tasks.values():
            if task is not asyncio.current_task():
                task.cancel()
        self._tasks.clear()
