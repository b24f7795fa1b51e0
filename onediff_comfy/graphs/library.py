"""What this process knows: compiled graphs, the calls they serve, and the work in progress."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ..capture.trace import Capture
from ..engines.base import CompiledGraph, Engine
from ..metrics import Metrics
from .cache import GraphCache
from .jobs import Jobs

log = logging.getLogger(__name__)


class GraphLibrary:
    """Shared by every accelerated model of a process, so that no graph is compiled twice.

    Args:
        cache: owns the compiled graphs.
        metrics: told of everything that happens.
    """

    def __init__(self, cache: GraphCache, metrics: Metrics) -> None:
        self.cache = cache
        self.metrics = metrics
        self._jobs: Jobs[CompiledGraph] = Jobs()
        self._graph_of_call: dict[str, str] = {}
        self._options_read: dict[str, frozenset[str]] = {}
        self._retired: dict[str, str] = {}

    def options_read(self, fingerprint: str) -> frozenset[str]:
        """The options that the target with this fingerprint is known to read."""
        return self._options_read.get(fingerprint, frozenset())

    def learn_option(self, fingerprint: str, name: str) -> None:
        """Remember that the target with this fingerprint reads the option ``name``."""
        self._options_read[fingerprint] = self.options_read(fingerprint) | {name}

    def graph_key_of(self, call_key: str) -> str | None:
        """The key of the graph that serves this call, if a call like it was captured before."""
        return self._graph_of_call.get(call_key)

    def serve_with(self, call_key: str, graph_key: str) -> None:
        """Remember that calls named ``call_key`` are served by the graph ``graph_key``."""
        self._graph_of_call[call_key] = graph_key

    def retired(self, graph_key: str) -> str | None:
        """Why this graph may not serve in this process, if it was found wrong."""
        return self._retired.get(graph_key)

    def retire(self, graph_key: str, reason: str) -> None:
        """Take a graph that was found wrong out of service; it is not compiled again in this process."""
        self._retired[graph_key] = reason
        self.cache.discard(graph_key)
        self.metrics.count("retired")

    def compiled(
        self,
        graph_key: str,
        capture: Capture,
        engine: Engine,
        what: str,
        while_waiting: Callable[[float], None],
    ) -> CompiledGraph:
        """The compiled graph for ``graph_key``: from the cache, from the job under way, or compiled now.

        Raises:
            EngineError: the engine cannot compile here.
            BaseException: whatever ``while_waiting`` raises; the compilation goes on and is kept.
        """
        graph = self.cache.get(graph_key)
        if graph is not None:
            return graph

        def compile_and_keep() -> CompiledGraph:
            log.info("OneDiff: compiling %s with %s", what, engine.name)
            start = time.monotonic()
            try:
                made = engine.compile(capture)
            except BaseException:
                self.metrics.count("failed")
                raise
            seconds = time.monotonic() - start
            self.cache.put(graph_key, made)
            self.metrics.made("compiled", graph_key, engine.name, what, seconds)
            log.info("OneDiff: compiled %s with %s in %.1f s", what, engine.name, seconds)
            return made

        return self._jobs.run(graph_key, compile_and_keep, while_waiting)
