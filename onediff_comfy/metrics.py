"""Counters that answer "what did it do, and why was it slow?". Nothing slow happens without one."""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from typing import Any

_COUNTED = (
    "captured",
    "compiled",
    "loaded",
    "recorded",
    "specialised",
    "served",
    "reused",
    "proved",
    "retired",
    "evicted",
    "failed",
    "not_kept",
)


class Metrics:
    """Counts of graph work and served calls. Thread-safe.

    ``compiled`` and ``loaded`` count graphs, ``recorded`` CUDA graph recordings, ``specialised`` sizes
    that got a graph of their own because they came often; ``served`` counts
    calls answered by a compiled graph, ``reused`` those of them that took deep layers from an earlier
    step; ``fallbacks`` counts calls answered by eager, by reason.

    Args:
        total: further counters that count along: one accelerated object's are part of the process's.
    """

    def __init__(self, total: Metrics | None = None) -> None:
        self._total = total
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._fallbacks: Counter[str] = Counter()
        self._graphs: list[dict[str, Any]] = []
        self._served_by: Counter[str] = Counter()
        self._tallies: list[tuple[weakref.ref[object], Counter[str]]] = []
        self._evicted: Counter[str] = Counter()

    def count(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._counts[name] += amount
        if self._total is not None:
            self._total.count(name, amount)

    def tally(self, owner: object) -> Counter[str]:
        """Return counts, by graph key, of the calls that graphs answer for ``owner``, which alone adds to them.

        They are part of what is counted here, read when somebody asks: a call that a graph answers counts itself once.
        """
        counts: Counter[str] = Counter()
        self.take_in(weakref.ref(owner), counts)
        return counts

    def take_in(self, owner: weakref.ref[object], counts: Counter[str]) -> None:
        """Count along what ``owner`` counts, for as long as it lives and after."""
        with self._lock:
            self._add_up_ended()
            self._tallies.append((owner, counts))
        if self._total is not None:
            self._total.take_in(owner, counts)

    def _add_up_ended(self) -> None:
        """Keep the sum of the counts whose owners are no more."""
        tallies, self._tallies = self._tallies, []
        for tally in tallies:  # each is asked once: an owner may die in between
            if tally[0]() is None:
                self._served_by.update(tally[1])
            else:
                self._tallies.append(tally)

    def evicted(self, key: str) -> None:
        """Count one graph that left memory to make room."""
        with self._lock:
            self._counts["evicted"] += 1
            self._evicted[key] += 1
        if self._total is not None:
            self._total.evicted(key)

    def fell_back(self, reason: str) -> bool:
        """Count one eager call. Return True the first time that this reason occurs."""
        with self._lock:
            self._fallbacks[reason] += 1
            first = self._fallbacks[reason] == 1
        if self._total is not None:
            self._total.fell_back(reason)
        return first

    def made(self, how: str, key: str, engine: str, what: str, seconds: float) -> None:
        """Record a graph that was compiled or loaded (``how``), of which target and sizes (``what``)."""
        with self._lock:
            self._counts[how] += 1
            self._graphs.append(
                {
                    "key": key,
                    "how": how,
                    "engine": engine,
                    "what": what,
                    "seconds": round(seconds, 3),
                    "at": round(time.time(), 3),
                }
            )
        if self._total is not None:
            self._total.made(how, key, engine, what, seconds)

    def graphs_made(self) -> int:
        """Return how many graphs were compiled or loaded so far."""
        with self._lock:
            return len(self._graphs)

    def graphs(self, since: int = 0) -> list[dict[str, Any]]:
        """Return the graphs that were compiled or loaded, in order, without the first ``since``."""
        with self._lock:
            return [dict(graph) for graph in self._graphs[since:]]

    def served_by(self) -> dict[str, int]:
        """Return how many calls each graph answered, by graph key."""
        with self._lock:
            return dict(self._all_served())

    def _all_served(self) -> Counter[str]:
        return sum((counts.copy() for _, counts in self._tallies), self._served_by.copy())

    def evictions(self) -> dict[str, int]:
        """Return how often each graph left memory to make room, by graph key."""
        with self._lock:
            return dict(self._evicted)

    def snapshot(self) -> dict[str, Any]:
        """Return everything so far, as plain data for JSON."""
        with self._lock:
            return {
                **{name: self._counts[name] for name in _COUNTED},
                "served": self._counts["served"] + self._all_served().total(),
                "fallbacks": dict(self._fallbacks),
                "graphs": [dict(graph) for graph in self._graphs],
            }
