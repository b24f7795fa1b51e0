"""What this process knows: compiled graphs, the calls they serve, and the work in progress."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from ..capture.call import NotCovered
from ..capture.shapes import ShapeRange
from ..capture.trace import Capture
from ..engines.base import CompiledGraph, Engine
from ..messages import Message, message
from ..metrics import Metrics
from ..store.artifact import Artifact
from ..store.store import PROVED, GraphStore
from .background import Background
from .cache import GraphCache
from .failures import Failures
from .jobs import Jobs, Waited
from .key import GraphKey
from .persist import Origin, from_artifact, to_artifact
from .recorded import RecordedGraph, RecordingPool
from .step_cache import ReusableGraph

log = logging.getLogger(__name__)

_OPTIONS = "options"
_SLOWER = "slower"
_EAGER_SECONDS = "eager_seconds"
_COMPILE_RATES = "compile_rates"
_MOST_PROVED = 1000
"""Of one graph, how many sets of sizes are remembered as proved; one more costs an eager step."""
_MOST_TIMED = 3000
"""Of one graph, how many times of eager calls are remembered."""
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


@dataclass(frozen=True)
class Candidate:
    """A graph that may serve calls of one kind, and the sizes it serves."""

    graph_key: str
    shapes: ShapeRange


def _candidate(graph_key: str, shapes: Mapping[str, Any]) -> Candidate | None:
    try:
        return Candidate(graph_key, ShapeRange.from_json(shapes))
    except (ValueError, KeyError, TypeError, NotCovered) as error:
        log.debug("a note on graph %.12s cannot be read and is ignored: %r", graph_key, error)
        return None


def _is_sample(noted: Any) -> bool:
    return isinstance(noted, list) and len(noted) == 2 and isinstance(noted[1], float) and noted[1] > 0


class GraphLibrary:
    """Shared by every accelerated model of a process, so that no graph is compiled twice.

    Args:
        cache: owns the compiled graphs.
        metrics: told of everything that happens.
        store: keeps graphs beyond this process; without one, nothing outlives it.
        background: compiles in another process that shares the store; left alone where that cannot be.
    """

    def __init__(
        self,
        cache: GraphCache,
        metrics: Metrics,
        store: GraphStore | None = None,
        background: Background | None = None,
    ) -> None:
        self.cache = cache
        self.metrics = metrics
        # Of what another process compiles nothing would be believed here, where each has a key of its own.
        self.background = background if store is None or store.shared else None
        self._store = store
        self._jobs: Jobs[CompiledGraph | None] = Jobs()
        self.recordings = RecordingPool(lambda: max(0, cache.budget - cache.nbytes))
        self.failures = Failures()
        self._candidates: dict[str, tuple[Candidate, ...]] = {}
        self._options_read: dict[str, frozenset[str]] = {}
        self._proved: dict[str, list[list[int]]] = {}
        self._timed: dict[str, list[list[Any]]] = {}
        self._loading: dict[str, Future[CompiledGraph | None]] = {}
        self._retired: dict[str, str] = {}
        self._aside: set[str] = set()

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

    def candidates(self, call_key: str) -> tuple[Candidate, ...]:
        """The graphs that are known to serve calls like this one, whoever compiled them and when."""
        found = self._candidates.get(call_key)
        if not found:
            noted = self._store.calls(call_key) if self._store else []
            found = tuple(candidate for key, shapes in noted if (candidate := _candidate(key, shapes)) is not None)
            self._candidates[call_key] = found
        return found

    def serve_with(self, call_key: str, graph_key: str, shapes: ShapeRange) -> None:
        """Remember that calls named ``call_key``, of sizes in ``shapes``, are served by the graph ``graph_key``."""
        candidate = Candidate(graph_key, shapes)
        if candidate not in self.candidates(call_key):
            self._candidates[call_key] = (*self.candidates(call_key), candidate)
            if self._store:
                self._store.note_call(call_key, graph_key, shapes.to_json())

    def forget_candidates(self, call_key: str) -> None:
        """Ask the store again next time: another process may have compiled one."""
        self._candidates.pop(call_key, None)

    def adopt(self, artifact: Artifact) -> None:
        """Take in a graph from a file: the next call that it serves finds it.

        Raises:
            ArtifactError, Untrusted, OSError: see ``GraphStore.adopt``.
        """
        assert self._store is not None
        self._store.adopt(artifact)
        # What was asked before the file came may have been answered otherwise.
        for call_key in artifact.manifest.calls:
            self.forget_candidates(call_key)
        for fingerprint in artifact.manifest.options_read:
            self._options_read.pop(fingerprint, None)

    # -- graphs --------------------------------------------------------------------------------

    def retired(self, graph_key: str) -> str | None:
        """Why this graph may not serve, if it was found wrong, now or by an earlier process."""
        if graph_key not in self._retired and self._store and self._store.recall(PROVED, graph_key) is False:
            self._retired[graph_key] = message(
                "its compiled graph differed from eager when it was first used on this machine"
            )
        return self._retired.get(graph_key)

    def useful(self, graph_key: str) -> bool:
        """Whether this graph may serve, and is not known to be slower than another that does."""
        if graph_key not in self._aside and self._store and self._store.recall(_SLOWER, graph_key) is True:
            self._aside.add(graph_key)
        return graph_key not in self._aside and self.retired(graph_key) is None

    def put_aside(self, graph_key: str) -> None:
        """Remember, on this machine, that another graph serves the same calls faster."""
        self._aside.add(graph_key)
        self.cache.discard(graph_key)
        if self._store:
            self._store.note(_SLOWER, graph_key, True)

    def retire(self, graph_key: str, reason: str) -> None:
        """Take a graph that was found wrong out of service, here and on disk.

        It is not made again on this machine: compiling the same graph with the same compiler would
        cost each restart a minute, for another wrong graph. Other versions have other keys.
        """
        self._retired[graph_key] = reason
        self._proved.pop(graph_key, None)
        self.cache.discard(graph_key)
        if self._store:
            self._store.remove(graph_key)
            self._store.note(PROVED, graph_key, False)
        self.metrics.count("retired")

    def is_proved(self, graph_key: str, sizes: Sequence[int]) -> bool:
        """Whether the graph's output for these values of its symbols was compared with eager's on this machine."""
        return list(sizes) in self._proofs(graph_key)

    def proved(self, graph_key: str, sizes: Sequence[int]) -> None:
        """A graph's output for these values of its symbols agreed with eager's: it need not be compared again."""
        proofs = self._proofs(graph_key)
        proofs.append(list(sizes))
        del proofs[:-_MOST_PROVED]
        self.metrics.count("proved")
        if self._store:
            self._store.note(PROVED, graph_key, proofs)

    def eager_took(self, graph_key: str, sizes: Sequence[int], seconds: float) -> None:
        """Remember how long a call that this graph serves took eager: a sample more."""
        samples = [*self._eager_times(graph_key), [list(sizes), round(seconds, 6)]]
        self._timed[graph_key] = samples[-_MOST_TIMED:]
        if self._store:
            # One entry for each sample, in the form that notes had when there was only one: either reads the other's.
            self._store.note(_EAGER_SECONDS, graph_key, self._timed[graph_key])

    def eager_samples(self, graph_key: str, sizes: Sequence[int]) -> list[float]:
        """Seconds of eager calls that this graph serves now, in this process and earlier ones."""
        return [seconds for known, seconds in self._eager_times(graph_key) if known == list(sizes)]

    def _eager_times(self, graph_key: str) -> list[list[Any]]:
        if graph_key not in self._timed:
            noted = self._store.recall(_EAGER_SECONDS, graph_key) if self._store else None
            self._timed[graph_key] = [sample for sample in noted or () if _is_sample(sample)]
        return self._timed[graph_key]

    def _proofs(self, graph_key: str) -> list[list[int]]:
        if graph_key not in self._proved:
            noted = self._store.recall(PROVED, graph_key) if self._store else None
            # Our own note, sealed: a graph that came from elsewhere has none and is compared here first.
            self._proved[graph_key] = noted if isinstance(noted, list) else []
        return self._proved[graph_key]

    def while_no_graph_is_made(
        self, while_waiting: Callable[[Waited], None]
    ) -> contextlib.AbstractContextManager[None]:
        """For captures: torch.export and a compiler at work on another thread disturb each other."""
        return self._jobs.between_jobs(while_waiting)

    def loaded(
        self, graph_key: str, engine: Engine, device: torch.device, while_waiting: Callable[[Waited], None]
    ) -> CompiledGraph | None:
        """The graph from the cache or the store; None if neither has it.

        Raises:
            BaseException: whatever ``while_waiting`` raises; the loading goes on and is kept.
        """
        graph = self.cache.get(graph_key)
        if graph is None and self._store is not None and graph_key not in self._retired:
            return self._jobs.run(graph_key, lambda: self._load(graph_key, engine, device), while_waiting)
        return graph

    def loaded_soon(self, graph_key: str, engine: Engine, device: torch.device) -> CompiledGraph | Pending | None:
        """As ``loaded``, without waiting: what is on its way, where it is being loaded."""
        graph = self.cache.get(graph_key)
        if graph is not None or self._store is None or graph_key in self._retired:
            return graph
        loading = self._loading.get(graph_key)
        if loading is None:
            loading = self._loading[graph_key] = self._jobs.begin(
                graph_key, lambda: self._load(graph_key, engine, device)
            )
        if not loading.done():
            begun = time.monotonic()
            return Pending(message("a compiled graph is being loaded"), lambda: _progress(loading, begun))
        del self._loading[graph_key]
        return loading.result()

    def compiled(
        self,
        key: GraphKey,
        capture: Capture,
        engine: Engine,
        device: torch.device,
        origin: Origin,
        while_waiting: Callable[[Waited], None],
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
                loaded = self._load(key.digest, engine, device)
                return loaded or self._compile(key, capture, engine, device, origin)

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
        seconds = time.monotonic() - start
        self._proved.pop(graph_key, None)  # another process may have compiled this one since
        graph = self._put(graph_key, graph, engine, device)
        self.metrics.made("loaded", graph_key, engine.name, manifest.target, seconds)
        log.info(
            "OneDiff: loaded %s in %.1f s (compiled %s, %.0f s)",
            manifest.target,
            seconds,
            manifest.created[:10],
            manifest.compile_seconds,
        )
        return graph

    def _compile(
        self, key: GraphKey, capture: Capture, engine: Engine, device: torch.device, origin: Origin
    ) -> CompiledGraph:
        log.info("OneDiff: compiling %s with %s", origin.target, engine.name)
        start = time.monotonic()
        try:
            graph = _compiled(capture, engine)
        except BaseException:
            self.metrics.count("failed")
            raise
        seconds = time.monotonic() - start
        self._proved[key.digest] = []  # what was proved was another compilation of it
        self._note_compile_rate(engine, device, seconds, len(capture.graph.graph.nodes))
        self.metrics.made("compiled", key.digest, engine.name, origin.target, seconds)
        log.info("OneDiff: compiled %s with %s in %.1f s, for %s", origin.target, engine.name, seconds, graph.shapes)
        if self._store is not None:
            self._keep(graph, engine, key, origin, seconds)
        return self._put(key.digest, graph, engine, device)

    def expected_seconds(self, engine: Engine, device: torch.device, operators: int) -> float | None:
        """How long compiling so many operators will take, by what it took on this machine; None the first time."""
        rates = self._store.recall(_COMPILE_RATES, f"{engine.name}-{device.type}") if self._store else None
        # Per operator, the largest: being done early disappoints nobody.
        return operators * max(rates) if rates else None

    def _note_compile_rate(self, engine: Engine, device: torch.device, seconds: float, operators: int) -> None:
        if self._store is not None:
            name = f"{engine.name}-{device.type}"
            rates = self._store.recall(_COMPILE_RATES, name) or []
            self._store.note(_COMPILE_RATES, name, [*rates, seconds / operators][-_RATES_KEPT:])

    def _put(self, graph_key: str, graph: CompiledGraph, engine: Engine, device: torch.device) -> CompiledGraph:
        """Into the cache, recorded where that helps."""
        if engine.recorded and device.type == "cuda" and not graph.binding.waits:
            if isinstance(graph, ReusableGraph):
                graph = ReusableGraph(self._recorded(graph.whole), self._recorded(graph.brief))
            else:
                graph = self._recorded(graph)
        self.cache.put(graph_key, graph)
        return graph

    def _recorded(self, graph: CompiledGraph) -> RecordedGraph:
        return RecordedGraph(graph, self.recordings, lambda: self.metrics.count("recorded"))

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


def waiting_for_turn(seconds: float) -> Message:
    """What a person is shown whose own work is not begun; what is under way may be for the same graph."""
    return message("waiting for a compilation that is under way, {seconds:.0f} s", seconds=seconds)


def _progress(loading: Future[CompiledGraph | None], begun: float) -> Message | None:
    if loading.done():
        return None
    return message("loading the compiled graph") if loading.running() else waiting_for_turn(time.monotonic() - begun)


def _compiled(capture: Capture, engine: Engine) -> CompiledGraph:
    if capture.brief is None:
        return engine.compile(capture)
    # The brief one first: compiling may narrow the sizes that both hold for, and the whole one's range is asked.
    brief = engine.compile(capture.brief)
    return ReusableGraph(engine.compile(capture), brief)
