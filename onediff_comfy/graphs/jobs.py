"""Compilation away from the caller's thread, so that a person can stop waiting for it.

One job runs at a time (neither Inductor nor OneFlow compiles two graphs at once safely), and each
key has one job at most, however many callers want it. A caller that stops waiting loses nothing:
the job goes on, and its result is there for the next one.
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


class Jobs(Generic[T]):
    """Runs functions by key, one at a time, on daemon threads (quitting must not wait for a compiler)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self._running: dict[str, Future[T]] = {}

    def run(self, key: str, function: Callable[[], T], while_waiting: Callable[[float], None]) -> T:
        """The result of ``function``, or of the job already running under ``key``.

        Args:
            key: what the work is for.
            function: the work.
            while_waiting: called about ten times a second with the seconds waited so far. What it
                raises comes out of this call; the job goes on.
        """
        future = self.begin(key, function)
        start = time.monotonic()
        while not wait([future], timeout=_POLL_S).done:
            while_waiting(time.monotonic() - start)
        return future.result()

    @contextlib.contextmanager
    def between_jobs(self, while_waiting: Callable[[float], None]) -> Iterator[None]:
        """For work on the caller's own thread that no job may run beside: waits its turn, as jobs do.

        Args:
            while_waiting: as for ``run``; what it raises comes out, and the work is not begun.
        """
        start = time.monotonic()
        while not self._turn.acquire(timeout=_POLL_S):
            while_waiting(time.monotonic() - start)
        try:
            yield
        finally:
            self._turn.release()

    def begin(self, key: str, function: Callable[[], T]) -> Future[T]:
        """Start ``function`` if no job runs under ``key``; what its result will be, without waiting."""
        with self._lock:
            if key in self._running:
                return self._running[key]
            future: Future[T] = Future()
            self._running[key] = future

        def work() -> None:
            try:
                with self._turn:
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
