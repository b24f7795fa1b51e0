"""The journal: every prompt before it is answered, one result for each, and the files that belong to results.

Kept in any object store by URL, or in a folder. Objects, all written whole:

    v1/prompts/<id>         a prompt without a result
    v1/results/<id>         its result; the first that is written stays
    v1/files/<id>/<run>/<type>/<subfolder>/<name>    what a result lists; the run is that of a worker's process
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any

from .prompt import BadPrompt, Prompt, is_id

log = logging.getLogger(__name__)

_PROMPTS, _RESULTS, _FILES = "v1/prompts", "v1/results", "v1/files"
_READ_AT_A_TIME = 50
KEPT_IN_VIEW = 1000
"""Results that the history shows. Older ones are found by their id."""


class Journal:
    """What a gateway must not forget. A second one may write to the same place: results stay single.

    Args:
        url: of an object store (``s3://bucket/folder``, ``gs://``, ``az://``) or of a folder (``file:///folder``).

    Raises:
        ValueError: no store can have this URL.
    """

    def __init__(self, url: str) -> None:
        from obstore.exceptions import BaseError
        from obstore.store import from_url

        self.url = url
        self.errors: tuple[type[Exception], ...] = (BaseError, OSError)
        try:
            self._store = from_url(url, mkdir=True) if url.startswith("file:") else from_url(url)
        except BaseError as error:
            raise ValueError(f"the journal cannot be at {url}: {error}") from error

    async def write(self, prompt_id: str, kept: Mapping[str, Any]) -> bool:
        """Keep a prompt; False if one of this id is there already."""
        return await self._create(f"{_PROMPTS}/{prompt_id}", kept)

    async def remove(self, prompt_id: str) -> None:
        """Forget a prompt that needs no result any more."""
        with contextlib.suppress(FileNotFoundError):
            await self._store.delete_async(f"{_PROMPTS}/{prompt_id}")

    async def finish(self, prompt_id: str, result: Mapping[str, Any]) -> dict[str, Any]:
        """Keep a result, unless there is one. Return the one that is kept."""
        if await self._create(f"{_RESULTS}/{prompt_id}", result):
            return dict(result)
        return await self.result(prompt_id) or dict(result)

    async def result(self, prompt_id: str) -> dict[str, Any] | None:
        """Return the result of a prompt, if there is one."""
        name = f"{_RESULTS}/{prompt_id}"
        content = await self._read(name)
        return None if content is None else _object_in(content, name)

    async def forget_result(self, prompt_id: str) -> None:
        """Delete a result and its files."""
        files = [name for name, _ in await self._names(f"{_FILES}/{prompt_id}")]
        for name in (f"{_RESULTS}/{prompt_id}", *files):
            with contextlib.suppress(FileNotFoundError):
                await self._store.delete_async(name)

    async def unfinished(self) -> list[dict[str, Any]]:
        """Return the prompts that have no result, as they were written."""
        done = {name.rsplit("/", 1)[1] for name, _ in await self._names(f"{_RESULTS}/")}
        names = [name for name, _ in await self._names(f"{_PROMPTS}/")]
        for name in names:
            if name.rsplit("/", 1)[1] in done:  # its gateway died between the two
                await self.remove(name.rsplit("/", 1)[1])
        return await self._read_all(name for name in names if name.rsplit("/", 1)[1] not in done)

    async def newest_results(self) -> list[dict[str, Any]]:
        """Return the last results, the oldest first."""
        newest = sorted(await self._names(f"{_RESULTS}/"), key=lambda found: found[1])[-KEPT_IN_VIEW:]
        return await self._read_all(name for name, _ in newest)

    async def keep_file(self, path: str, content: bytes | AsyncIterator[bytes]) -> None:
        """Keep a file of a result under a name of ``prompt.kept_name``."""
        await self._store.put_async(f"{_FILES}/{path}", content)

    async def file(self, path: str) -> bytes | None:
        """Return a file of a result, if it is there."""
        return await self._read(f"{_FILES}/{path}")

    async def _create(self, name: str, value: Mapping[str, Any]) -> bool:
        from obstore.exceptions import AlreadyExistsError

        try:
            await self._store.put_async(name, json.dumps(value).encode(), mode="create")
        except AlreadyExistsError:
            return False
        return True

    async def _read(self, name: str) -> bytes | None:
        try:
            return bytes(await (await self._store.get_async(name)).bytes_async())
        except (FileNotFoundError, ValueError):  # ValueError: no object can have this name
            return None

    async def _read_all(self, names: Iterable[str]) -> list[dict[str, Any]]:
        limit = asyncio.Semaphore(_READ_AT_A_TIME)

        async def read(name: str) -> dict[str, Any] | None:
            async with limit:
                content = await self._read(name)
            return None if content is None else _object_in(content, name)

        return [value for value in await asyncio.gather(*map(read, names)) if value is not None]

    async def _names(self, prefix: str) -> list[tuple[str, Any]]:
        return [(found["path"], found["last_modified"]) async for some in self._store.list(prefix) for found in some]


def _object_in(content: bytes, name: str) -> dict[str, Any] | None:
    """Return the JSON object of a prompt or a result. None of one that is damaged, as by a machine that lost power."""
    try:
        found = json.loads(content)
        if isinstance(found, dict) and isinstance(found.get("entry", {}), dict):
            return found
    except (ValueError, RecursionError):
        pass
    log.error("%s in the journal is damaged, and is left alone", name)
    return None


class Ledger:
    """The unfinished prompts and the results of one gateway, which are also in the journal.

    Attributes:
        open: unfinished prompts by id.
        history: entries as ComfyUI's, by prompt id, the oldest first.
        counts: what happened how often.
        watchers: called when a prompt comes, goes or changes hands.
        seconds: called with the seconds from a prompt's coming to its result.
    """

    def __init__(self, journal: Journal, seconds: Callable[[float], None]) -> None:
        self.journal, self.seconds = journal, seconds
        self.open: dict[str, Prompt] = {}
        self.history: dict[str, dict[str, Any]] = {}
        self.counts: Counter[str] = Counter()
        self.watchers: list[Callable[[], None]] = []

    async def recover(self, grace: float) -> None:
        """Take over what an earlier gateway left. No worker is looked for in the first ``grace`` seconds."""
        for kept in await self.journal.unfinished():
            try:
                prompt = Prompt.from_journal(kept)
            except BadPrompt as error:
                log.error("an unfinished prompt in the journal is left alone: %s", error)
                continue
            prompt.not_before = time.monotonic() + grace
            self.open[prompt.id] = prompt
            self.counts["recovered"] += 1
        for result in await self.journal.newest_results():
            if is_id(result.get("id")) and "entry" in result:
                self.history[result["id"]] = result["entry"]

    def changed(self) -> None:
        """Tell everybody who watches."""
        for watcher in self.watchers:
            watcher()

    def waiting(self) -> list[Prompt]:
        """Return the prompts that no worker has, in the order in which they go."""
        return sorted((prompt for prompt in self.open.values() if prompt.worker is None), key=lambda p: p.number)

    async def take(self, prompt: Prompt) -> None:
        """Write a prompt down."""
        await self.journal.write(prompt.id, prompt.to_journal())
        self.open[prompt.id] = prompt

    async def finish(self, prompt: Prompt, entry: dict[str, Any]) -> bool:
        """Write a result; if there is one already, that one counts. Return False if the prompt was finished before."""
        if self.open.get(prompt.id) is not prompt:
            prompt.take_back()
            return False
        worker = getattr(prompt.worker, "name", None)
        result: dict[str, Any] = {"id": prompt.id, "entry": entry, "worker": worker, "attempts": prompt.attempts}
        try:
            result = await self.journal.finish(prompt.id, result)
            await self.journal.remove(prompt.id)
        except self.journal.errors as error:
            self.counts["journal_errors"] += 1
            log.error("the result of %s is in memory alone: %s", prompt.id, error)
        if self.open.pop(prompt.id, None) is None:
            return False
        self.history[prompt.id] = result["entry"]
        if len(self.history) > KEPT_IN_VIEW:
            del self.history[next(iter(self.history))]
        self.counts[(result["entry"].get("status") or {}).get("status_str") or "success"] += 1
        self.seconds(time.monotonic() - prompt.since)
        prompt.take_back()
        self.changed()
        return True

    async def forget(self, prompt: Prompt) -> None:
        """Give up a prompt that gets no result."""
        self.open.pop(prompt.id, None)
        prompt.take_back()
        self.changed()
        await self.journal.remove(prompt.id)

    async def forget_result(self, prompt_id: str) -> None:
        """Delete a result and its files, if there is one."""
        if is_id(prompt_id):
            self.history.pop(prompt_id, None)
            await self.journal.forget_result(prompt_id)

    async def entry(self, prompt_id: str) -> dict[str, Any] | None:
        """Return the history entry of a prompt, however long ago it was."""
        if prompt_id in self.open or not is_id(prompt_id):
            return None
        if prompt_id not in self.history:
            result = await self.journal.result(prompt_id)
            return None if result is None else result.get("entry")
        return self.history[prompt_id]
