"""Calls while no graph is there: in background mode they must cost next to nothing, for eager is bound by the CPU."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

from ...compilation.graph_builder import Pending
from ...compilation.library import GraphLibrary
from ...messages import message
from ..decision import Invocation

_SHOW_AGAIN_S = 1.0


class Awaited:
    """The graph that is on its way for this object. Until it is there, no call looks for it.

    Args:
        show: shows a short status text to the person, on the node.
    """

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._pending: Pending | None = None
        self._shown = 0.0

    def expect(self, pending: Pending) -> None:
        """Note what is on its way."""
        self._pending = pending

    def tell(self, text: str) -> None:
        """Show that nothing is awaited any more."""
        self._show(text)

    def current(self) -> Pending | None:
        """Return what is on its way, and show how far it is; None once it is worth looking for it."""
        if self._pending is None:
            return None
        progress = self._pending.progress()
        if progress is None:
            self._pending = None
        elif time.monotonic() - self._shown > _SHOW_AGAIN_S:
            self._shown = time.monotonic()
            self._show(progress)
        return self._pending


class CompileDelay:
    """Leaves the first moments of a process in background mode to eager: looking takes 0.2 s, and a compiler disturbs.

    The moments are the process's, not the node's, and pass once: reading the first model's weights from a file is not
    counted. What was not begun in them is begun when the run ends.

    While that file is read a compiler is imported, without which no graph can be loaded, either. It takes seconds of
    Python, for which calls would wait later. Code that reads files and pins memory leaves Python to others meanwhile.

    Args:
        library: whose background process would compile.
        seconds: how long.
        prepare: begins to import what makes and loads graphs, and returns at once.
    """

    def __init__(self, library: GraphLibrary, seconds: float, prepare: Callable[[], None]) -> None:
        self._library, self._seconds = library, seconds
        self._prepare = functools.cache(prepare)  # a model has many blocks that are called for the first time
        self._put_off: Invocation | None = None

    def holds_back(self, invocation: Invocation) -> Pending | None:
        """Return what is put off, in the first moments; None where nobody is to be spared, or a graph may be there."""
        background = self._library.background
        if not self._seconds or background is None or len(self._library.cache):
            return None
        if not background.left_alone(self._seconds, reading=invocation.is_first):
            self._put_off = None
            return None
        if invocation.is_first:
            self._prepare()
        if self._put_off is None and invocation.moving is None:  # what moves is elsewhere when the run ends
            self._put_off = invocation.without_data()
        return Pending(message("a graph is made in the background once the first image is there"))

    def end_first_image(self) -> Invocation | None:
        """Return the invocation that was put off in a run that is over. No other run counts as the first."""
        put_off, self._put_off = self._put_off, None
        if put_off is not None and self._library.background is not None:
            self._library.background.end_first_image()
        return put_off
