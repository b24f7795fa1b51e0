"""One run of an accelerated object, a sampling for instance: what answered its calls, as a line for the node."""

from __future__ import annotations

from collections import Counter

from ..capture.call import Signature
from ..messages import Message, joined, message
from .eager_times import EagerTimes
from .library import GraphLibrary
from .routes import Served

_LEAST_GAIN = 1.05
"""Less than this is noise, and no reason to boast."""


class Run:
    """Counts of what answered calls.

    Args:
        library: where the graphs are.
        eager: how much faster they are.
    """

    def __init__(self, library: GraphLibrary, eager: EagerTimes) -> None:
        self._library, self._eager_times = library, eager
        self._made_before = library.metrics.graphs_made()
        self._served: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self._signatures: dict[tuple[str, tuple[int, ...]], Signature] = {}
        self._eager: Counter[str] = Counter()
        self._notes: dict[str, None] = {}  # in their order, each once

    @property
    def served(self) -> int:
        """Calls that compiled graphs answered."""
        return sum(self._served.values())

    @property
    def calls(self) -> int:
        return self.served + sum(self._eager.values())

    def graph_answered(self, route: Served, signature: Signature) -> None:
        kind = (route.graph_key, route.sizes)
        self._served[kind] += 1
        self._signatures[kind] = signature
        if route.note:
            self._notes[route.note] = None

    def eager_answered(self, reason: str) -> None:
        self._eager[reason] += 1

    def status(self, what: str) -> Message:
        """For people: ``compiled graph · 1024×1024 b1 · 1.7x · 0 recompiles``, and why calls were not accelerated.

        Args:
            what: what the run made.
        """
        if not self._served:
            return _reasons(self._eager)
        first = message("compiled graph")
        if self._eager:
            first = message("{served} of {calls} calls accelerated", served=self.served, calls=self.calls)
        gain = self.gain()
        times = f"{gain:.1f}x" if gain is not None and gain >= _LEAST_GAIN else ""
        line = joined(" · ", filter(None, (first, what, times, self._made())))
        return joined("\n", filter(None, (line, *self._notes, _reasons(self._eager) if self._eager else "")))

    def gain(self) -> float | None:
        """How many times faster than eager the graph is that answered most calls; None where that is not known."""
        (kind, _), *_ = self._served.most_common(1)
        return self._eager_times.gain(kind, self._signatures[kind])

    def _made(self) -> Message:
        """What was compiled or loaded meanwhile."""
        made = self._library.metrics.graphs(since=self._made_before)
        seconds = {
            how: sum(graph["seconds"] for graph in made if graph["how"] == how) for how in ("compiled", "loaded")
        }
        if seconds["compiled"]:
            return message("compiled in {seconds} s", seconds=_rounded(seconds["compiled"]))
        if seconds["loaded"]:
            return message("loaded in {seconds} s", seconds=_rounded(seconds["loaded"]))
        return message("0 recompiles")


def _rounded(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds < 10 else f"{seconds:.0f}"


def _reasons(eager: Counter[str]) -> Message:
    """Why calls were not accelerated, most of them first."""
    return joined("\n", (message("not accelerated: {reason}", reason=reason) for reason, _ in eager.most_common()))
