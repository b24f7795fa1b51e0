"""Compilation away from the caller's thread, so that a person can stop waiting for it.

One job runs at a time, and each key has one job at most, however many callers want it. A caller that
stops waiting loses nothing: the job goes on, and its result is there for the next one.

Neither Inductor nor OneFlow compiles two graphs at once safely. Nor is a graph loaded beside a compilation:
for the CPU that has moved Inductor's cache folder, an environment variable, to a passing one, which the loader
would write to; and PyTorch notes what belongs to a compilation in one place for all threads. OneFlow builds a
job to load one. What a job waits for outside of this process, it waits for before its turn.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Generic, TypeVar

T = TypeVar("T")
_POLL_S = 0.1


class Waited(float):
    """Seconds that a caller has waited for its work.

    Attributes:
        for_turn: they were spent waiting for a job that is under way to end; its own work is not begun.
    """

    for_turn: bool

    def __new__(cls, seconds: float, for_turn: bool = False) -> Waited:
        waited = super().__new__(cls, seconds)
        waited.for_turn = for_turn
        return waited


class Jobs(Generic[T]):
    """Runs functions by key, one at a time, on daemon threads (quitting must not wait for a compiler)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self._running: dict[str, Future[T]] = {}

    def run(
        self,
        key: str,
        function: Callable[[], T],
        while_waiting: Callable[[Waited], None],
        around: contextlib.AbstractContextManager[None] | None = None,
    ) -> T:
        """The result of ``function``, or of the job already running under ``key``.

        Args:
            key: what the work is for.
            function: the work.
            while_waiting: called about ten times a second with the seconds waited so far, first for
                the job's turn, then for the job. What it raises comes out of this call; the job goes on.
            around: see ``begin``.
        """
        future = self.begin(key, function, around)
        start = begun = time.monotonic()
        while not wait([future], timeout=_POLL_S).done:
            now = time.monotonic()
            if future.running() or future.done():  # it may have ended since this was waited for
                while_waiting(Waited(now - begun))
            else:
                begun = now
                while_waiting(Waited(now - start, for_turn=True))
        return future.result()

    @contextlib.contextmanager
    def between_jobs(self, while_waiting: Callable[[Waited], None]) -> Iterator[None]:
        """For work on the caller's own thread that no job may run beside: waits its turn, as jobs do.

        Args:
            while_waiting: as for ``run``; what it raises comes out, and the work is not begun.
        """
        start = time.monotonic()
        while not self._turn.acquire(timeout=_POLL_S):
            while_waiting(Waited(time.monotonic() - start, for_turn=True))
        try:
            yield
        finally:
            self._turn.release()

    def begin(
        self, key: str, function: Callable[[], T], around: contextlib.AbstractContextManager[None] | None = None
    ) -> Future[T]:
        """Start ``function`` if no job runs under ``key``; what its result will be, without waiting.

        The future is ``running()`` once it is the job's turn.

        Args:
            key: what the work is for.
            function: the work.
            around: entered on the job's thread before its turn, and left after it. What waits there for another
                process holds up no other job of this one.
        """
        with self._lock:
            if key in self._running:
                return self._running[key]
            future: Future[T] = Future()
            self._running[key] = future

        def work() -> None:
            try:
                with around or contextlib.nullcontext(), self._turn:
                    future.set_running_or_notify_cancel()
                    result = function()
            except BaseException as error:
                self._forget(key)
                future.set_exception(error)
            else:
                self._forget(key)
                future.set_result(result)

        threading.Thread(target=work, name=f"onediff-compile-{key[:12]}", daemon=True).start()
        return future

    def _forget(self, key: str) -> None:
        with self._lock:
            del self._running[key]
