"""Captures are made one at a time, and while no graph runs.

torch.export swaps a module's parameters for fake ones while it traces, and switches cuDNN off in the whole process: a
compiled convolution that another thread runs meanwhile gives a layout that the code behind it does not take. ComfyUI
has a thread for each GPU of a run over several.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class _Alone:
    """Any number of threads may be at one thing at a time, or one thread at the other."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0
        self._capturing: int | None = None  # the thread that is

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Others may run inside, too; another thread that captures is waited for."""
        this = threading.get_ident()
        with self._changed:
            while self._capturing not in (None, this):
                self._changed.wait()
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """No other thread is inside, whether to capture or to run."""
        this = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: self._capturing == this or (self._capturing is None and not self._running))
            before, self._capturing = self._capturing, this
        try:
            yield
        finally:
            with self._changed:
                self._capturing = before
                self._changed.notify_all()


_ALONE = _Alone()  # what torch.export does is the process's
running, capturing = _ALONE.running, _ALONE.capturing
