"""The graph cache: compiled graphs by key, least recently used first out, under a budget of bytes."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable

from ..engines.base import CompiledGraph

log = logging.getLogger(__name__)


class GraphCache:
    """The one owner of compiled graphs.

    Whoever serves calls keeps keys and asks here each time, so that an evicted graph is gone for
    everybody at once and its memory comes back. Thread-safe.

    Graphs for one set of sizes go before general ones, which serve every size.

    Args:
        budget: bytes that all graphs together may hold (their ``nbytes``).
        on_evict: called with the key of each graph that left to make room.
    """

    def __init__(self, budget: int, on_evict: Callable[[str], None] = lambda _key: None) -> None:
        if budget < 0:
            raise ValueError(f"a graph cache cannot have a budget of {budget} bytes")
        self.budget = budget
        self._on_evict = on_evict
        self._graphs: OrderedDict[str, CompiledGraph] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: str) -> CompiledGraph | None:
        """The graph under ``key``, which becomes the most recently used; None if it is not here."""
        with self._lock:
            graph = self._graphs.get(key)
            if graph is not None:
                self._graphs.move_to_end(key)
            return graph

    def put(self, key: str, graph: CompiledGraph) -> None:
        """Keep ``graph`` as the most recently used, evicting others until the budget holds.

        The newest graph stays even if it exceeds the budget alone: something has to serve the
        call it was made for.
        """
        with self._lock:
            self._graphs[key] = graph
            self._graphs.move_to_end(key)
            evicted = self._evict()
        self._tell(evicted)

    def discard(self, key: str) -> None:
        """Forget the graph under ``key``, if it is here."""
        with self._lock:
            self._graphs.pop(key, None)

    def clear(self) -> int:
        """Forget every graph; return the bytes that they held. What is needed again is loaded again."""
        with self._lock:
            held, gone = self._nbytes(), list(self._graphs)
            self._graphs.clear()
        for key in gone:
            self._on_evict(key)
        return held

    def trim(self) -> None:
        """Make what is here hold within the budget again; the most recently used graph stays."""
        with self._lock:
            evicted = self._evict()
        self._tell(evicted)

    def _evict(self) -> list[str]:
        evicted = []
        *others, _newest = self._graphs or [""]
        for key in sorted(others, key=lambda name: self._graphs[name].shapes.general):
            if self._nbytes() <= self.budget:
                break
            del self._graphs[key]
            evicted.append(key)
        return evicted

    def _tell(self, evicted: list[str]) -> None:
        for old in evicted:
            log.info("OneDiff: evicted compiled graph %.12s to stay within %d MB", old, self.budget >> 20)
            self._on_evict(old)

    @property
    def nbytes(self) -> int:
        """Bytes that the graphs here hold now."""
        with self._lock:
            return self._nbytes()

    def _nbytes(self) -> int:
        return sum(graph.nbytes for graph in self._graphs.values())

    def sizes(self) -> dict[str, int]:
        """Bytes that each graph here holds now, by key; says nothing about use."""
        with self._lock:
            return {key: graph.nbytes for key, graph in self._graphs.items()}

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, key: str) -> bool:
        return key in self._graphs
