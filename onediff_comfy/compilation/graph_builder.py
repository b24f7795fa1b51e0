"""Graphs by key: from memory, from the store, from the job under way, or compiled now."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from ..cache.keys import GraphKey
from ..cache.memory import GraphCache
from ..cache.serialization import GraphOrigin, from_artifact, to_artifact
from ..cache.verdicts import Verdicts, passing_compilation
from ..capture.export import Capture
from ..engines.base import CompiledGraph, Engine
from ..messages import Message, message
from ..metrics import Metrics
from ..runtime.cuda_graphs import RecordedGraph
from ..runtime.recording_pool import RecordingPool
from ..runtime.step_cache import ReusableGraph
from ..store.store import GraphStore, Superseded
from .job_queue import Jobs, Waited

log = logging.getLogger(__name__)

_COMPILE_RATES = "compile_rates"
_RATES_KEPT = 8
"""Compilations that a guess of the next one's duration goes by."""


@dataclass(frozen=True)
class Pending:
    """A graph that is on its way.

    Attributes:
        reason: why it does not serve yet, for people.
        progress: tells how far it is, cheaply; None once it is worth looking for it again.
    """

    reason: str
    progress: Callable[[], str | None] = lambda: None


class GraphBuilder:
    """Loads and compiles, one graph at a time.

    Args:
        cache: takes the graphs.
        verdicts: say which graphs were found wrong.
        metrics: told of everything that is made.
        store: where graphs are loaded from and kept; None for nowhere.
        recordings: the CUDA graphs of this process.
    """

    def __init__(
        self,
        cache: GraphCache,
        verdicts: Verdicts,
        metrics: Metrics,
        store: GraphStore | None,
        recordings: RecordingPool,
    ) -> None:
        self._cache, self._verdicts, self._metrics, self._store = cache, verdicts, metrics, store
        self._recordings = recordings
        self._jobs: Jobs[CompiledGraph | None] = Jobs()
        self._loading: dict[str, Future[CompiledGraph | None]] = {}
        self._ahead: dict[str, Callable[[], None]] = {}  # by key of what nobody has asked for yet: counts it

    def while_no_graph_is_made(
        self, while_waiting: Callable[[Waited], None]
    ) -> contextlib.AbstractContextManager[None]:
        """Hold compilations back for a capture: torch.export and a compiler on another thread disturb each other."""
        return self._jobs.between_jobs(while_waiting)

    def loaded(
        self, graph_key: str, engine: Engine, device: torch.device, while_waiting: Callable[[Waited], None]
    ) -> CompiledGraph | None:
        """Return the graph from the cache or the store; None if neither has it.

        Raises:
            BaseException: whatever ``while_waiting`` raises; the loading goes on and is kept.
        """
        graph = self._cache.get(graph_key)
        if graph is None and self._store is not None and not self._verdicts.is_retired_here(graph_key):
            graph = self._jobs.run(graph_key, lambda: self._load(graph_key, engine, device), while_waiting)
        self._asked_for(graph_key)
        return graph

    def load_ahead(self, graph_key: str, engine: Engine, device: torch.device) -> None:
        """Have a graph of the store in the cache before anybody asks for it. It counts as loaded once somebody does."""
        if self._cache.get(graph_key) is None and not self._verdicts.is_retired_here(graph_key):
            self._jobs.run(
                graph_key, lambda: self._load(graph_key, engine, device, ahead=True), while_waiting=lambda _waited: None
            )

    def _asked_for(self, graph_key: str) -> None:
        if (count := self._ahead.pop(graph_key, None)) is not None:
            count()

    def loaded_soon(self, graph_key: str, engine: Engine, device: torch.device) -> CompiledGraph | Pending | None:
        """Do as ``loaded`` without waiting, for what nobody waits for. It is pending while it is being loaded."""
        graph = self._cache.get(graph_key)
        if graph is not None or self._store is None or self._verdicts.is_retired_here(graph_key):
            self._asked_for(graph_key)
            return graph
        loading = self._loading.get(graph_key)
        if loading is None:
            loading = self._loading[graph_key] = self._jobs.begin(
                graph_key, lambda: self._load(graph_key, engine, device)
            )
        if not loading.done():
            return Pending(message("a compiled graph is being loaded"))
        del self._loading[graph_key]
        self._asked_for(graph_key)
        return loading.result()

    def compiled(
        self,
        key: GraphKey,
        capture: Capture,
        engine: Engine,
        device: torch.device,
        origin: GraphOrigin,
        while_waiting: Callable[[Waited], None],
    ) -> CompiledGraph:
        """Return the compiled graph for ``key``: from cache or store, from the job under way, or compiled now.

        Raises:
            EngineError: the engine cannot compile here.
            BaseException: whatever ``while_waiting`` raises; the compilation goes on and is kept.
        """
        graph = self._cache.get(key.digest)
        if graph is not None:
            self._asked_for(key.digest)
            return graph

        def load_or_compile() -> CompiledGraph:
            # Another process may have compiled this very graph while we waited.
            loaded = self._load(key.digest, engine, device)
            return loaded or self._compile(key, capture, engine, device, origin)

        def made() -> CompiledGraph | None:
            alone = self._store.compiling(key.digest) if self._store else None
            return self._jobs.run(key.digest, load_or_compile, while_waiting, alone)

        # The job that we joined may have been one that only looks into the store.
        graph = made() or made()
        self._asked_for(key.digest)
        return graph  # type: ignore[return-value]

    def _load(self, graph_key: str, engine: Engine, device: torch.device, ahead: bool = False) -> CompiledGraph | None:
        start = time.monotonic()
        artifact = self._store.find(graph_key) if self._store else None
        if artifact is None:
            return None
        manifest = artifact.manifest
        try:
            graph = from_artifact(artifact, engine, device)
        except Exception as error:
            # Whatever a compiler's loader raises: the graph is only a saving of time.
            log.warning(
                "OneDiff: the stored graph of %s cannot be loaded (%s: %s) and is compiled again",
                manifest.target,
                type(error).__name__,
                error,
            )
            log.debug("loading %s failed", graph_key, exc_info=True)
            return None
        seconds = time.monotonic() - start
        graph = self._put(graph_key, graph, engine, device, artifact.digest)
        count = functools.partial(self._metrics.made, "loaded", graph_key, engine.name, manifest.target, seconds)
        if ahead:
            self._ahead[graph_key] = count
        else:
            self._ahead.pop(graph_key, None)  # of a time before it left the cache
            count()
        log.info(
            "OneDiff: loaded %s in %.1f s (compiled %s, %.0f s)",
            manifest.target,
            seconds,
            manifest.created[:10],
            manifest.compile_seconds,
        )
        return graph

    def _compile(
        self, key: GraphKey, capture: Capture, engine: Engine, device: torch.device, origin: GraphOrigin
    ) -> CompiledGraph:
        log.info("OneDiff: compiling %s with %s", origin.target, engine.name)
        start = time.monotonic()
        try:
            graph = _compiled(capture, engine)
        except BaseException:
            self._metrics.count("failed")
            raise
        seconds = time.monotonic() - start
        self._note_compile_rate(engine, device, seconds, len(capture.graph.graph.nodes))
        self._metrics.made("compiled", key.digest, engine.name, origin.target, seconds)
        log.info("OneDiff: compiled %s with %s in %.1f s, for %s", origin.target, engine.name, seconds, graph.shapes)
        compilation = passing_compilation() if self._store is None else self._keep(graph, engine, key, origin, seconds)
        theirs = None if compilation else self._load(key.digest, engine, device)
        return theirs or self._put(key.digest, graph, engine, device, compilation or passing_compilation())

    def expected_seconds(self, engine: Engine, device: torch.device, operators: int) -> float | None:
        """Return how long compiling so many operators will take, by what it took here before; None the first time."""
        rates = self._store.notes.read(_COMPILE_RATES, f"{engine.name}-{device.type}") if self._store else None
        # Per operator, the largest: being done early disappoints nobody.
        return operators * max(rates) if rates else None

    def _note_compile_rate(self, engine: Engine, device: torch.device, seconds: float, operators: int) -> None:
        if self._store is not None:
            name = f"{engine.name}-{device.type}"
            rate = seconds / operators
            self._store.notes.update(_COMPILE_RATES, name, lambda noted: [*(noted or ()), rate][-_RATES_KEPT:])

    def _put(
        self, graph_key: str, graph: CompiledGraph, engine: Engine, device: torch.device, compilation: str
    ) -> CompiledGraph:
        """Into the cache, recorded where that helps."""
        if engine.recorded and device.type == "cuda" and not graph.binding.waits:
            if isinstance(graph, ReusableGraph):
                graph = ReusableGraph(self._recorded(graph.whole), self._recorded(graph.brief))
            else:
                graph = self._recorded(graph)
        graph.compilation = compilation
        self._cache.put(graph_key, graph)
        return graph

    def _recorded(self, graph: CompiledGraph) -> RecordedGraph:
        return RecordedGraph(graph, self._recordings, lambda: self._metrics.count("recorded"))

    def _keep(
        self, graph: CompiledGraph, engine: Engine, key: GraphKey, origin: GraphOrigin, seconds: float
    ) -> str | None:
        """Keep a graph, if that can be, and name this compilation; None if another machine's is to be used instead."""
        assert self._store is not None
        try:
            artifact = to_artifact(graph, engine, key, origin, seconds)
            if artifact is not None:
                path = self._store.save(artifact)
                log.info("OneDiff: kept %s (%.1f MB)", path, path.stat().st_size / 2**20)
                return artifact.digest
        except Superseded:
            return None
        except Exception as error:
            # A full disk, a read-only folder, a graph its compiler cannot serialise: it serves all
            # the same, but the next start will compile again, and the person should know.
            self._metrics.count("not_kept")
            log.warning("OneDiff: the compiled graph could not be kept for the next start: %s", error)
            log.debug("keeping %s failed", key.digest, exc_info=True)
        return passing_compilation()


def waiting_for_turn(seconds: float) -> Message:
    """Return what a person is shown whose own work is not begun; what is under way may be for the same graph."""
    return message("waiting for a compilation that is under way, {seconds:.0f} s", seconds=seconds)


def _compiled(capture: Capture, engine: Engine) -> CompiledGraph:
    if capture.brief is None:
        return engine.compile(capture)
    # The brief one first: compiling may narrow the sizes that both hold for, and the whole one's range is asked.
    brief = engine.compile(capture.brief)
    return ReusableGraph(engine.compile(capture), brief)
