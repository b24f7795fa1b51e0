"""One run of an accelerated object, a sampling for instance: what answered its calls, as a line for the node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..capture.call import Signature
from .library import GraphLibrary
from .timing import RunTimes

_LEAST_GAIN = 1.05
"""Less than this is noise, and no reason to boast."""


class Run:
    """Counts of what answered calls.

    Args:
        library: where the graphs are.
        times: how long they take.
    """

    def __init__(self, library: GraphLibrary, times: RunTimes) -> None:
        self._library, self._times = library, times
        self._made_before = len(library.metrics.snapshot()["graphs"])
        self._served: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self._signatures: dict[tuple[str, tuple[int, ...]], Signature] = {}
        self._eager: Counter[str] = Counter()

    @property
    def served(self) -> int:
        """Calls that compiled graphs answered."""
        return sum(self._served.values())

    @property
    def calls(self) -> int:
        return self.served + sum(self._eager.values())

    def graph_answered(self, graph_key: str, sizes: Sequence[int], signature: Signature) -> None:
        kind = (graph_key, tuple(sizes))
        self._served[kind] += 1
        self._signatures[kind] = signature

    def eager_answered(self, reason: str) -> None:
        self._eager[reason] += 1

    def status(self, what: str) -> str:
        """For people: ``compiled graph · 1024×1024 b1 · 1.7x · 0 recompiles``, and why calls were not accelerated.

        Args:
            what: what the run made.
        """
        if not self._served:
            return _reasons(self._eager)
        parts = ["compiled graph" if not self._eager else f"{self.served} of {self.calls} calls accelerated", what]
        gain = self.gain()
        if gain is not None and gain >= _LEAST_GAIN:
            parts.append(f"{gain:.1f}x")
        line = " · ".join(part for part in (*parts, self._made()) if part)
        return "\n".join(filter(None, (line, _reasons(self._eager))))

    def gain(self) -> float | None:
        """How many times faster than eager the graph is that answered most calls; None where eager was not timed."""
        (kind, _), *_ = self._served.most_common(1)
        eager = self._library.eager_seconds(*kind)
        graph, _ = self._times.fastest(kind[0], self._signatures[kind])
        return None if eager is None else eager / graph

    def _made(self) -> str:
        """What was compiled or loaded meanwhile."""
        made = self._library.metrics.snapshot()["graphs"][self._made_before :]
        for how in ("compiled", "loaded"):
            seconds = sum(graph["seconds"] for graph in made if graph["how"] == how)
            if seconds:
                return f"{how} in {seconds:.1f} s" if seconds < 10 else f"{how} in {seconds:.0f} s"
        return "0 recompiles"


def _reasons(eager: Counter[str]) -> str:
    """Why calls were not accelerated, most of them first."""
    return "\n".join(f"not accelerated: {reason}" for reason, _ in eager.most_common())
