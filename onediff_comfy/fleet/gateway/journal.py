"""The journal: every prompt before it is answered, one result for each, and the files that belong to results.

Kept in any object store by URL, or in a folder. Objects, all written whole:

    v1/prompts/<id>         a prompt without a result
    v1/results/<id>         its result; the first that is written stays
    v1/gateways/<id>        a gateway that lives: written anew every ten seconds
    v1/files/<id>/<run>/<type>/<subfolder>/<name>    what a result lists; the run is that of a worker's process
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from ..journal_objects import JournalObjects
from .prompt import BadPrompt, Prompt, is_id, outcome

log = logging.getLogger(__name__)

_PROMPTS, _RESULTS, _FILES, _GATEWAYS = "v1/prompts", "v1/results", "v1/files", "v1/gateways"
LIFE_S = 10.0
"""How often a gateway says that it lives."""
_DEAD_AFTER_S = 60.0
KEPT_IN_VIEW = 1000
"""Results that the history shows. Older ones are found by their id."""


class Journal:
    """What a gateway must not forget. A second one may write to the same place: results stay single.

    Args:
        url: see ``JournalObjects``.

    Raises:
        ValueError: no store can have this URL.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.objects = JournalObjects(url)
        self.errors = self.objects.errors

    async def write(self, prompt_id: str, kept: Mapping[str, Any]) -> bool:
        """Keep a prompt; False if one of this id is there already."""
        return await self.objects.create(f"{_PROMPTS}/{prompt_id}", kept)

    async def remove(self, prompt_id: str) -> None:
        """Forget a prompt that needs no result any more."""
        await self.objects.delete([f"{_PROMPTS}/{prompt_id}"])

    async def finish(self, prompt_id: str, result: Mapping[str, Any]) -> dict[str, Any]:
        """Keep a result, unless there is one. Return the one that is kept."""
        name = f"{_RESULTS}/{prompt_id}"
        if not await self.objects.create(name, result):
            if (earlier := await self.result(prompt_id)) is not None:
                return earlier
            await self.objects.put(name, json.dumps(result).encode())  # what is there is damaged
        return dict(result)

    async def result(self, prompt_id: str) -> dict[str, Any] | None:
        """Return the result of a prompt, if there is one."""
        found = await self.objects.value(f"{_RESULTS}/{prompt_id}")
        return found if found is not None and "entry" in found else None

    async def forget_result(self, prompt_id: str) -> None:
        """Delete a result and its files."""
        files = await self.objects.listed(f"{_FILES}/{prompt_id}")
        await self.objects.delete([f"{_RESULTS}/{prompt_id}", *files])

    async def unfinished(self) -> list[dict[str, Any]]:
        """Return the prompts that have no result that can be read, as they were written."""
        results, paths = await self.objects.listed(_RESULTS), await self.objects.listed(_PROMPTS)
        both = [name for name in map(_id_in, paths) if f"{_RESULTS}/{name}" in results]
        done = {name for name in both if await self.result(name) is not None}
        await self.objects.delete(path for path in paths if _id_in(path) in done)  # their gateway died between the two
        return await self.objects.values(path for path in paths if _id_in(path) not in done)

    async def newest_results(self) -> list[dict[str, Any]]:
        """Return the last results, the oldest first."""
        found = await self.objects.listed(_RESULTS)
        return await self.objects.values(sorted(found, key=found.__getitem__)[-KEPT_IN_VIEW:])

    async def keep_file(self, path: str, content: bytes | AsyncIterator[bytes]) -> None:
        """Keep a file of a result under a name of ``made_files.kept_name``."""
        await self.objects.put(f"{_FILES}/{path}", content)

    async def file(self, path: str) -> bytes | None:
        """Return a file of a result, if it is there."""
        return await self.objects.content(f"{_FILES}/{path}")


def _id_in(path: str) -> str:
    return path.rpartition("/")[2]


class Ledger:
    """The unfinished prompts and the results of one gateway, which are also in the journal.

    Attributes:
        open: unfinished prompts by id.
        history: entries as ComfyUI's, by prompt id, the oldest first.
        counts: what happened how often.
        gateway: its name in the journal.
        watchers: called when a prompt comes, goes or changes hands.
        seconds: called with the seconds from a prompt's coming to its result.
    """

    def __init__(self, journal: Journal, seconds: Callable[[float], None]) -> None:
        self.journal, self.seconds = journal, seconds
        self.open: dict[str, Prompt] = {}
        self.history: dict[str, dict[str, Any]] = {}
        self.counts: Counter[str] = Counter()
        self.gateway = str(uuid.uuid4())
        self.watchers: list[Callable[[], None]] = []

    async def recover(self, grace: float) -> None:
        """Take over what an earlier gateway left. No worker is looked for in the first ``grace`` seconds."""
        for kept in await self.journal.unfinished():
            self.take_over(kept, time.monotonic() + grace)
        for result in await self.journal.newest_results():
            if is_id(result.get("id")) and "entry" in result:
                self.history[result["id"]] = result["entry"]

    def take_over(self, kept: Mapping[str, Any], not_before: float) -> None:
        """Take a prompt that another gateway wrote down. No worker is looked for before a time (``time.monotonic``)."""
        try:
            prompt = Prompt.from_journal(kept)
        except BadPrompt as error:
            log.error("an unfinished prompt in the journal is left alone: %s", error)
            return
        prompt.not_before = not_before
        self.open[prompt.id] = prompt
        self.counts["recovered"] += 1

    def changed(self) -> None:
        """Tell everybody who watches."""
        for watcher in self.watchers:
            watcher()

    def waiting(self) -> list[Prompt]:
        """Return the prompts that wait for a worker, in the order in which they go."""
        waiting = (prompt for prompt in self.open.values() if prompt.attempt is None and not prompt.given_up)
        return sorted(waiting, key=lambda prompt: prompt.number)

    async def take(self, prompt: Prompt) -> None:
        """Write a prompt down."""
        await self.journal.write(prompt.id, {**prompt.to_journal(), "gateway": self.gateway})
        self.open[prompt.id] = prompt

    async def finish(self, prompt: Prompt, entry: dict[str, Any], worker: str | None = None) -> bool:
        """Write a result; if there is one already, that one counts. Return False if the prompt was finished before.

        Args:
            worker: the name of the one that the result is of.
        """
        if self.open.get(prompt.id) is not prompt:
            prompt.take_back()
            return False
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
        self.counts[outcome(result["entry"])] += 1
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


class Succession:
    """Finds prompts of gateways that are gone: their sign of life in the journal does not change any more.

    As with leases no clocks are compared: it is this gateway's own by which another has been silent for too long.

    Args:
        ledger: of this gateway.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger, self._journal, self._objects = ledger, ledger.journal, ledger.journal.objects
        self._lives: dict[str, tuple[Any, float]] = {}  # by gateway: its last sign, and since when that is known
        self._looked = 0.0
        self._left_alone: set[str] = set()

    async def look(self) -> None:
        """Say that this gateway lives, and take over what others left."""
        await self._objects.put(f"{_GATEWAYS}/{self._ledger.gateway}", uuid.uuid4().bytes)
        written, now = await self._objects.listed(_GATEWAYS), time.monotonic()
        signs = {_id_in(path): at for path, at in written.items()}
        known = self._lives if now - self._looked < 3 * LIFE_S else {}  # or all were silent, for want of a journal
        self._looked = now
        self._lives = {
            name: known[name] if name in known and known[name][0] == signs.get(name) else (signs.get(name), now)
            for name in known.keys() | signs.keys()
        }
        mine = self._ledger.open.keys() | self._ledger.history.keys() | self._left_alone
        for name in map(_id_in, await self._objects.listed(_PROMPTS)):
            if name not in mine:
                await self._inherit(name, now)
        self._ledger.changed()

    async def _inherit(self, name: str, now: float) -> None:
        kept = await self._objects.value(f"{_PROMPTS}/{name}")
        if kept is None:  # damaged, or done by now
            self._left_alone.add(name)
        elif kept.get("gateway") != self._ledger.gateway:
            _, since = self._lives.setdefault(str(kept.get("gateway")), (None, now))
            if now - since <= _DEAD_AFTER_S:
                return
            if await self._journal.result(name) is None:
                self._ledger.take_over(kept, now)
            self._left_alone.add(name)
