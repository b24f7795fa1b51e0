"""What is known of a graph on this machine: proved or found wrong, slower than another, and how long eager takes.

A graph key says what a graph computes and what compiled it; machines and processes may have compiled it several times,
and one of these may be wrong. So a proof is of a *compilation*, named by its artifact's digest, whichever of them lies
in the store by the time that the proof is written down or read.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from ..messages import message
from ..metrics import Metrics
from ..store.notes import PROVED, RETIRED
from ..store.store import GraphStore
from .memory import GraphCache

_SLOWER = "slower"
_EAGER_SECONDS = "eager_seconds"
_PASSING = "passing-"
_MOST_PROVED = 1000
"""Of one compilation, how many sets of sizes are remembered as proved; one more costs an eager step."""
_MOST_TIMED = 3000
"""Of one graph, how many times of eager calls are remembered."""


def passing_compilation() -> str:
    """Name a compilation that is kept nowhere: what is proved of it is forgotten with this process."""
    return f"{_PASSING}{uuid.uuid4().hex}"


def _samples(noted: Any) -> list[list[Any]]:
    return [
        sample
        for sample in (noted if isinstance(noted, list) else ())
        if isinstance(sample, list) and len(sample) == 2 and isinstance(sample[1], float) and sample[1] > 0
    ]


def _proofs_in(noted: Any) -> list[list[int]]:
    return noted if isinstance(noted, list) else []


def _with_proof(proofs: list[list[int]], sizes: list[int]) -> list[list[int]]:
    """Add a proof that another process may have noted already: proofs are counted (``Verifier``)."""
    return [*(proof for proof in proofs if proof != sizes), sizes][-_MOST_PROVED:]


class Verdicts:
    """Remembers what was found out about graphs.

    Args:
        cache: graphs that may not serve any more leave it.
        metrics: told of proofs and of graphs found wrong.
        store: keeps verdicts beyond this process; without one, nothing outlives it.
    """

    def __init__(self, cache: GraphCache, metrics: Metrics, store: GraphStore | None) -> None:
        self._cache, self._metrics, self._store = cache, metrics, store
        self._proved: dict[str, list[list[int]]] = {}
        self._timed: dict[str, list[list[Any]]] = {}
        self._retired: dict[str, str] = {}
        self._aside: set[str] = set()

    def retired(self, graph_key: str) -> str | None:
        """Return why this graph may not serve, if it was found wrong, now or by an earlier process."""
        if graph_key not in self._retired and self._store and self._store.notes.read(RETIRED, graph_key) is True:
            self._retired[graph_key] = message(
                "its compiled graph differed from eager when it was first used on this machine"
            )
        return self._retired.get(graph_key)

    def useful(self, graph_key: str) -> bool:
        """Return True if this graph may serve, and is not known to be slower than another that does."""
        if graph_key not in self._aside and self._store and self._store.notes.read(_SLOWER, graph_key) is True:
            self._aside.add(graph_key)
        return graph_key not in self._aside and self.retired(graph_key) is None

    def put_aside(self, graph_key: str) -> None:
        """Remember, on this machine, that another graph serves the same calls faster."""
        self._aside.add(graph_key)
        self._cache.discard(graph_key)
        if self._store:
            self._store.notes.write(_SLOWER, graph_key, True)

    def retire(self, graph_key: str, reason: str) -> None:
        """Take a graph that was found wrong out of service, here and on disk.

        It is not made again on this machine: compiling the same graph with the same compiler would
        cost each restart a minute, for another wrong graph. Other versions have other keys.
        """
        self._retired[graph_key] = reason
        self._cache.discard(graph_key)
        if self._store:
            self._store.notes.write(RETIRED, graph_key, True)  # first: who finds no graph must find why
            self._store.remove(graph_key)
        self._metrics.count("retired")

    def is_proved(self, compilation: str, sizes: Sequence[int]) -> bool:
        """Return True if its output for these values of its symbols agreed with eager's on this machine."""
        return list(sizes) in self.proofs(compilation)

    def proved(self, compilation: str, sizes: Sequence[int]) -> None:
        """Note that its output for these values of its symbols agreed with eager's: it is not compared again."""
        proofs = self.proofs(compilation)
        proofs.append(list(sizes))
        del proofs[:-_MOST_PROVED]
        self._metrics.count("proved")
        if self._store and not compilation.startswith(_PASSING):
            self._store.notes.update(PROVED, compilation, lambda noted: _with_proof(_proofs_in(noted), list(sizes)))

    def eager_took(self, graph_key: str, sizes: Sequence[int], seconds: float) -> None:
        """Remember how long a call that this graph serves took eager: a sample more."""
        sample = [list(sizes), round(seconds, 6)]
        self._timed[graph_key] = [*self._eager_times(graph_key), sample][-_MOST_TIMED:]
        if self._store:
            # One entry for each sample, in the form that notes had when there was only one: either reads the other's.
            self._store.notes.update(_EAGER_SECONDS, graph_key, lambda noted: [*_samples(noted), sample][-_MOST_TIMED:])

    def eager_samples(self, graph_key: str, sizes: Sequence[int]) -> list[float]:
        """Return the seconds of eager calls that this graph serves now, in this process and earlier ones."""
        return [seconds for known, seconds in self._eager_times(graph_key) if known == list(sizes)]

    def _eager_times(self, graph_key: str) -> list[list[Any]]:
        if graph_key not in self._timed:
            noted = self._store.notes.read(_EAGER_SECONDS, graph_key) if self._store else None
            self._timed[graph_key] = _samples(noted)
        return self._timed[graph_key]

    def proofs(self, compilation: str) -> list[list[int]]:
        """Return for which values of its symbols, and what else, a compilation's output agreed with eager's."""
        proofs = self._proved.get(compilation)
        if proofs is None:
            noted = self._store.notes.read(PROVED, compilation) if self._store else None
            # Our own note, sealed: a graph that came from elsewhere has none and is compared here first.
            proofs = self._proved[compilation] = _proofs_in(noted)
        return proofs

    def is_retired_here(self, graph_key: str) -> bool:
        """Return True if this process found the graph wrong; asks no store."""
        return graph_key in self._retired
