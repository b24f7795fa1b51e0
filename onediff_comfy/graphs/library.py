"""What this process knows: compiled graphs, the calls they serve, and the work in progress."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable

import torch

from ..capture.trace import Capture
from ..engines.base import CompiledGraph, Engine
from ..metrics import Metrics
from ..store.artifact import Artifact
from ..store.store import GraphStore
from .cache import GraphCache
from .jobs import Jobs
from .key import GraphKey
from .persist import Origin, from_artifact, to_artifact

log = logging.getLogger(__name__)

_CALLS = "calls"
_OPTIONS = "options"
_PROVED = "proved"


class GraphLibrary:
    """Shared by every accelerated model of a process, so that no graph is compiled twice.

    Args:
        cache: owns the compiled graphs.
        metrics: told of everything that happens.
        store: keeps graphs beyond this process; without one, nothing outlives it.
    """

    def __init__(self, cache: GraphCache, metrics: Metrics, store: GraphStore | None = None) -> None:
        self.cache = cache
        self.metrics = metrics
        self._store = store
        self._jobs: Jobs[CompiledGraph | None] = Jobs()
        self._graph_of_call: dict[str, str] = {}
        self._options_read: dict[str, frozenset[str]] = {}
        self._retired: dict[str, str] = {}

    # -- what is known of calls ----------------------------------------------------------------

    def options_read(self, fingerprint: str) -> frozenset[str]:
        """The options that the target with this fingerprint is known to read."""
        if fingerprint not in self._options_read:
            noted = self._store.recall(_OPTIONS, fingerprint) if self._store else None
            self._options_read[fingerprint] = frozenset(noted or ())
        return self._options_read[fingerprint]

    def learn_option(self, fingerprint: str, name: str) -> None:
        """Remember that the target with this fingerprint reads the option ``name``."""
        read = self._options_read[fingerprint] = self.options_read(fingerprint) | {name}
        if self._store:
            self._store.note(_OPTIONS, fingerprint, sorted(read))

    def graph_key_of(self, call_key: str) -> str | None:
        """The key of the graph that serves this call, if a call like it was captured before."""
        if call_key not in self._graph_of_call:
            noted = self._store.recall(_CALLS, call_key) if self._store else None
            if not isinstance(noted, str):
                return None
            self._graph_of_call[call_key] = noted
        return self._graph_of_call[call_key]

    def serve_with(self, call_key: str, graph_key: str) -> None:
        """Remember that calls named ``call_key`` are served by the graph ``graph_key``."""
        if self.graph_key_of(call_key) != graph_key:
            self._graph_of_call[call_key] = graph_key
            if self._store:
                self._store.note(_CALLS, call_key, graph_key)

    def adopt(self, artifact: Artifact) -> None:
        """Take in a graph from a file: the next call that it serves finds it.

        Raises:
            ArtifactError, Untrusted, OSError: see ``GraphStore.adopt``.
        """
        assert self._store is not None
        self._store.adopt(artifact)
        # What was asked before the file came may have been answered otherwise.
        for call_key in artifact.manifest.calls:
            self._graph_of_call.pop(call_key, None)
        for fingerprint in artifact.manifest.options_read:
            self._options_read.pop(fingerprint, None)

    # -- graphs --------------------------------------------------------------------------------

    def retired(self, graph_key: str) -> str | None:
        """Why this graph may not serve, if it was found wrong, now or by an earlier process."""
        if graph_key not in self._retired and self._store and self._store.recall(_PROVED, graph_key) is False:
            self._retired[graph_key] = "its compiled graph differed from eager when it was first used on this machine"
        return self._retired.get(graph_key)

    def retire(self, graph_key: str, reason: str) -> None:
        """Take a graph that was found wrong out of service, here and on disk.

        It is not made again on this machine: compiling the same graph with the same compiler would
        cost each restart a minute, for another wrong graph. Other versions have other keys.
        """
        self._retired[graph_key] = reason
        self.cache.discard(graph_key)
        if self._store:
            self._store.remove(graph_key)
            self._store.note(_PROVED, graph_key, False)
        self.metrics.count("retired")

    def proved(self, graph_key: str, graph: CompiledGraph) -> None:
        """A graph's output was compared with eager's on this machine and agreed: it need not be again."""
        graph.proved = True
        self.metrics.count("proved")
        if self._store:
            self._store.note(_PROVED, graph_key, True)

    def while_no_graph_is_made(self, while_waiting: Callable[[float], None]) -> contextlib.AbstractContextManager[None]:
        """For captures: torch.export and a compiler at work on another thread disturb each other."""
        return self._jobs.between_jobs(while_waiting)

    def loaded(
        self, graph_key: str, engine: Engine, device: torch.device, while_waiting: Callable[[float], None]
    ) -> CompiledGraph | None:
        """The graph from the cache or the store; None if neither has it.

        Raises:
            BaseException: whatever ``while_waiting`` raises; the loading goes on and is kept.
        """
        graph = self.cache.get(graph_key)
        if graph is None and self._store is not None and graph_key not in self._retired:
            return self._jobs.run(graph_key, lambda: self._load(graph_key, engine, device), while_waiting)
        return graph

    def compiled(
        self,
        key: GraphKey,
        capture: Capture,
        engine: Engine,
        device: torch.device,
        origin: Origin,
        while_waiting: Callable[[float], None],
    ) -> CompiledGraph:
        """The compiled graph for ``key``: from cache or store, from the job under way, or compiled now.

        Raises:
            EngineError: the engine cannot compile here.
            BaseException: whatever ``while_waiting`` raises; the compilation goes on and is kept.
        """
        graph = self.cache.get(key.digest)
        if graph is not None:
            return graph

        def load_or_compile() -> CompiledGraph:
            # Another process may be compiling this very graph, or have done so while we waited.
            with self._store.compiling(key.digest) if self._store else contextlib.nullcontext():
                return self._load(key.digest, engine, device) or self._compile(key, capture, engine, origin)

        made = self._jobs.run(key.digest, load_or_compile, while_waiting)
        # The job that we joined may have been one that only looks into the store.
        return made or self._jobs.run(key.digest, load_or_compile, while_waiting)  # type: ignore[return-value]

    def _load(self, graph_key: str, engine: Engine, device: torch.device) -> CompiledGraph | None:
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
        # Our own note, sealed: a graph that came from elsewhere has none and is compared here first.
        graph.proved = self._store.recall(_PROVED, graph_key) is True if self._store else False
        seconds = time.monotonic() - start
        self.cache.put(graph_key, graph)
        self.metrics.made("loaded", graph_key, engine.name, manifest.target, seconds)
        log.info(
            "OneDiff: loaded %s in %.1f s (compiled %s, %.0f s)",
            manifest.target,
            seconds,
            manifest.created[:10],
            manifest.compile_seconds,
        )
        return graph

    def _compile(self, key: GraphKey, capture: Capture, engine: Engine, origin: Origin) -> CompiledGraph:
        log.info("OneDiff: compiling %s with %s", origin.target, engine.name)
        start = time.monotonic()
        try:
            graph = engine.compile(capture)
        except BaseException:
            self.metrics.count("failed")
            raise
        seconds = time.monotonic() - start
        self.cache.put(key.digest, graph)
        self.metrics.made("compiled", key.digest, engine.name, origin.target, seconds)
        log.info("OneDiff: compiled %s with %s in %.1f s", origin.target, engine.name, seconds)
        if self._store is not None:
            self._keep(graph, engine, key, origin, seconds)
        return graph

    def _keep(self, graph: CompiledGraph, engine: Engine, key: GraphKey, origin: Origin, seconds: float) -> None:
        assert self._store is not None
        try:
            artifact = to_artifact(graph, engine, key, origin, seconds)
            if artifact is not None:
                path = self._store.save(artifact)
                log.info("OneDiff: kept %s (%.1f MB)", path, path.stat().st_size / 2**20)
        except Exception as error:
            # A full disk, a read-only folder, a graph its compiler cannot serialise: it serves all
            # the same, but the next start will compile again, and the person should know.
            self.metrics.count("not_kept")
            log.warning("OneDiff: the compiled graph could not be kept for the next start: %s", error)
            log.debug("keeping %s failed", key.digest, exc_info=True)
