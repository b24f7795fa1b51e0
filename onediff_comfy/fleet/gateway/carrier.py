"""Carries prompts: hands them to workers, and to others when one dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

import aiohttp

from .clients import Clients, Told
from .journal import LIFE_S, Ledger, Succession
from .link import LOST_AFTER_S, READY_S, Link, WorkerLost
from .prompt import MOST_IN_FLIGHT, Attempt, Prompt, choose

log = logging.getLogger(__name__)

MOST_ATTEMPTS = 4
"""Workers that one prompt may take down with it."""
GRACE_S = READY_S
"""How long prompts of an earlier gateway wait for the workers that may still have them."""
_LOOK_EVERY_S = 2.0


class Background:
    """Work beside the rest, which ends with the gateway."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, work: Coroutine[Any, Any, Any]) -> None:
        """Start a piece of work. What goes wrong in it is logged."""
        task = asyncio.create_task(self._logged(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _logged(self, work: Coroutine[Any, Any, Any]) -> None:
        try:
            await work
        except Exception:
            log.exception("the gateway goes on")

    def every(self, seconds: float, work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        """Do a piece of work again and again."""

        async def again() -> None:
            while True:
                await asyncio.sleep(seconds)
                await self._logged(work())

        self.begin(again())

    def stop(self) -> None:
        """End all of it."""
        for task in self._tasks:
            task.cancel()


class Carrier:
    """The workers, and which prompt is handed to which.

    Attributes:
        links: workers by name.
        background: runs what nobody waits for.
        told: takes what workers tell of prompts, and ends prompts.
    """

    def __init__(self, ledger: Ledger, clients: Clients) -> None:
        self.links: dict[str, Link] = {}
        self.background = Background()
        # As many connections as there are clients: aiohttp's usual hundred would be a limit on those who listen.
        connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
        self.session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        self._ledger, self._clients = ledger, clients
        self._looked_at: set[Link] = set()
        self._asked_what_it_has: set[Link] = set()
        self.told = Told(ledger, clients, self.lose)

    async def start(self) -> None:
        """Take over what an earlier gateway left, and begin."""
        await self._ledger.recover(GRACE_S)
        self._ledger.watchers.append(self.hand_out)
        self.background.every(_LOOK_EVERY_S, self._look_after)
        self.background.every(LIFE_S, Succession(self._ledger).look)

    async def stop(self) -> None:
        """Let go of everything; prompts stay in the journal."""
        self.background.stop()
        for link in self.links.values():
            link.listening.close()
        await self.session.close()

    def register(self, facts: Mapping[str, Any]) -> None:
        """Take a worker's word that it is there. It comes every ``HEARTBEAT_S``; the last one says that it is gone."""
        link = self.links.get(facts["name"])
        if facts["state"] == "gone":
            if link is not None and link.run == facts["run"]:  # not one that has come in its place
                self.lose(link)
            return
        if link is not None and link.run == facts["run"]:
            link.facts, link.seen = dict(facts), time.monotonic()
        else:
            if link is not None:
                self.lose(link)
            link = self.links[facts["name"]] = Link(self.session, facts, self.told.hear)
            if self._ledger.counts["recovered"]:
                self._asked_what_it_has.add(link)
                self.background.begin(self._adopt(link))
        self.hand_out()

    # -- prompts -------------------------------------------------------------------------------

    async def submit(self, prompt: Prompt) -> tuple[int, Any]:
        """Take a prompt. Return the status and JSON to answer with."""
        taken = {"prompt_id": prompt.id, "number": prompt.number, "node_errors": {}}
        link = None if self._ledger.waiting() else choose(prompt.checkpoint, self.links.values())
        if link is None:
            errors = await _errors_of(prompt, self.links.values())
            if errors is not None:
                return 400, errors
            await self._ledger.take(prompt)
            self._ledger.changed()
            return 200, taken
        attempt = link.assign(prompt)  # before anything is awaited: the place is taken
        try:
            await self._ledger.take(prompt)
        except BaseException:
            prompt.take_back()
            raise
        status, answer = await self._hand_in(attempt, link)
        if status != 200:
            await self._ledger.forget(prompt)
            return status, answer or {"error": f"the worker answered {status}", "node_errors": {}}
        errors = answer.get("node_errors") if isinstance(answer, dict) else None
        return status, {**taken, "node_errors": errors or {}}

    def hand_out(self) -> None:
        """Hand what waits to the workers that are free; what a worker may have of an earlier gateway, to nobody yet."""
        now = time.monotonic()
        if all(link.load >= MOST_IN_FLIGHT for link in self.links.values()):
            return
        for prompt in self._ledger.waiting():
            if prompt.not_before > now or (prompt.not_before and self._asked_what_it_has):
                continue
            link = choose(prompt.checkpoint, self.links.values())
            if link is not None:
                self.background.begin(self._deliver(link.assign(prompt), link))

    async def _deliver(self, attempt: Attempt, link: Link) -> None:
        status, answer = await self._hand_in(attempt, link)
        if status != 200:
            await self.told.fail(attempt.prompt, *_reasons(status, answer))

    async def _hand_in(self, attempt: Attempt, link: Link) -> tuple[int, Any]:
        """Give a prompt to a worker. Return its answer; if that says nothing of the prompt, that the prompt is taken.

        So it is where there was none, and where the attempt is over by now: the prompt waits, or another has it.
        """
        try:
            status, answer = await link.hand_in(attempt)
        except WorkerLost:
            if not await link.answers():  # else it was this request that broke, and others' prompts stay
                self.lose(link)
            return 200, None
        if attempt.over:
            if attempt.prompt.id in self._ledger.open:
                self._ledger.changed()  # it may wait since before it was among those that wait
            else:
                await _have_dropped(attempt.prompt.id, link)
            return 200, None
        if status == 200:
            self._ledger.changed()
        return status, answer

    async def interrupt(self, prompt_id: str | None) -> bool:
        """Stop one running prompt, or as ComfyUI does without an id, whatever runs. Return True if one ran."""
        all_ = [(link, prompt) for link in self.links.values() for prompt in link.prompts.values() if prompt.started]
        asked = [
            link.ask("POST", "/interrupt", {"prompt_id": prompt.id})
            for link, prompt in all_
            if prompt_id in (None, prompt.id)
        ]
        await asyncio.gather(*asked, return_exceptions=True)  # one that does not answer keeps no other from stopping
        return bool(asked)

    async def delete(self, prompt_id: str) -> bool:
        """Take a prompt off the queue that does not run yet. Return True if there was one."""
        prompt = self._ledger.open.get(prompt_id)
        if prompt is None or prompt.started:
            return False
        attempt, link = prompt.attempt, prompt.worker
        if attempt is not None and attempt.taken and isinstance(link, Link):
            with contextlib.suppress(WorkerLost):
                await link.ask("POST", "/queue", {"delete": [prompt_id]})
                if prompt_id in await link.queued() or await link.history(prompt_id) is not None:
                    return False  # it began meanwhile
            if attempt.over:
                return await self.delete(prompt_id)
        await self._ledger.forget(prompt)  # one that is on its way to a worker is dropped there when it arrives
        return True

    # -- workers that die ----------------------------------------------------------------------

    def lose(self, link: Link) -> None:
        """Take back what a dead worker had."""
        if self.links.get(link.name) is link:
            del self.links[link.name]
            link.lost = True
            self._ledger.counts["workers_lost"] += 1
            log.warning("worker %s is gone with %d prompts", link.name, link.load)
        link.listening.close()
        for prompt in list(link.prompts.values()):
            self._take_back(prompt)
        self._ledger.changed()

    def _take_back(self, prompt: Prompt) -> None:
        """Have a prompt wait for another worker, unless it has had enough of them."""
        prompt.take_back()
        if prompt.attempts >= MOST_ATTEMPTS:
            prompt.given_up = True
            text = f"{prompt.attempts} workers died of this prompt or lost it; it is not tried again"
            self.background.begin(self.told.fail(prompt, text))
        else:
            self._ledger.counts["retried"] += 1

    async def _adopt(self, link: Link) -> None:
        """Find out which prompts of an earlier gateway a worker has. One that takes its time holds up no other."""
        try:
            await asyncio.wait_for(_adopt_from(link, self._ledger), GRACE_S)
        except (WorkerLost, TimeoutError, asyncio.TimeoutError):
            log.warning("worker %s does not say which prompts it has of an earlier gateway", link.name)
        finally:
            self._asked_what_it_has.discard(link)
        self.hand_out()

    async def _look_after(self) -> None:
        """Find what no message told: workers that are silent, prompts whose end was missed."""
        for link in list(self.links.values()):
            if time.monotonic() - link.seen > LOST_AFTER_S:
                self.lose(link)
            elif link not in self._looked_at:  # one that takes its time holds up no other
                self._looked_at.add(link)
                self.background.begin(self._look_at(link))
        self.hand_out()

    async def _look_at(self, link: Link) -> None:
        try:
            link.listening.keep(self._clients)
            attempts = [prompt.attempt for prompt in link.prompts.values()]
            had = [attempt for attempt in attempts if attempt is not None and attempt.taken]
            queued = await link.queued() if had else {}
            for attempt in had:
                name = attempt.prompt.id
                attempt.started = attempt.started or queued.get(name, False)
                gone = not attempt.over and name not in queued and not await self.told.complete(attempt, link)
                if gone and not attempt.over:
                    self._take_back(attempt.prompt)  # somebody emptied the worker's own queue
                    self._ledger.changed()
            _, report = await link.ask("GET", "/onediff/report", seconds=_LOOK_EVERY_S)
            link.report = report if isinstance(report, dict) else {}
        except WorkerLost:  # busy, or gone: then its heartbeats cease, or a connection breaks
            pass
        finally:
            self._looked_at.discard(link)


async def _have_dropped(prompt_id: str, link: Link) -> None:
    """Have a worker drop a prompt that nobody wants any more, queued or running."""
    with contextlib.suppress(WorkerLost):
        await link.ask("POST", "/queue", {"delete": [prompt_id]})
        await link.ask("POST", "/interrupt", {"prompt_id": prompt_id})


async def _adopt_from(link: Link, ledger: Ledger) -> None:
    """Count those waiting prompts as a worker's that it has.

    Raises:
        WorkerLost: it does not answer, or was lost meanwhile.
    """
    queued = await link.queued()
    for prompt in ledger.waiting():
        if prompt.id in queued or await link.history(prompt.id) is not None:
            if link.lost:
                raise WorkerLost(f"{link.name} is gone")
            if prompt.attempt is None:
                attempt = link.assign(prompt)
                attempt.taken, attempt.started = True, queued.get(prompt.id, False)
                ledger.counts["adopted"] += 1
                if prompt.client is not None:
                    await link.listening.to(prompt.client)


def _reasons(status: int, answer: Any) -> tuple[str, Mapping[str, Any]]:
    """Return why a worker refuses a prompt, and what is wrong with which node."""
    found = answer if isinstance(answer, dict) else {}
    error, errors = found.get("error"), found.get("node_errors")
    said = error.get("message") if isinstance(error, dict) else error
    return str(said or f"the worker answered {status}"), errors if isinstance(errors, dict) else {}


async def _errors_of(prompt: Prompt, links: Iterable[Link]) -> Any:
    """Have a worker check a prompt that has to wait: who hands it in is told at once what is wrong with it."""
    for link in [link for link in links if link.ready]:
        with contextlib.suppress(WorkerLost):
            status, answer = await link.ask("POST", "/onediff/validate", prompt.to_worker())
            return answer if status == 400 else None
    return None
