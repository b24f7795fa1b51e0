"""The graph library: everything that a process knows of compiled graphs, shared by all accelerated objects."""

from __future__ import annotations

from typing import Protocol
from weakref import WeakSet

from ..cache.call_index import CallIndex
from ..cache.memory import GraphCache
from ..cache.verdicts import Verdicts
from ..metrics import Metrics
from ..runtime.device_memory import HostMemory
from ..runtime.recording_pool import RecordingPool
from ..store.store import GraphStore
from .background import Background
from .failures import Failures
from .graph_builder import GraphBuilder


class Forgetful(Protocol):
    """Something that keeps things between runs."""

    def forget(self) -> None:
        """Keep none of them."""


class GraphLibrary:
    """Shared by every accelerated model of a process, so that no graph is compiled twice.

    Args:
        cache: owns the compiled graphs.
        metrics: told of everything that happens.
        store: keeps graphs beyond this process; without one, nothing outlives it.
        background: compiles in another process that shares the store; left alone where that cannot be.
        host: see ``RecordingPool``.

    Attributes:
        index: which graphs serve which calls.
        verdicts: which graphs were proved, and which found wrong or slow.
        builder: loads and compiles graphs.
        failures: what could not be made in this process.
        recordings: the CUDA graphs of this process.
        functions: whoever keeps functions that nodes have put into models, and so what these hold.
    """

    def __init__(
        self,
        cache: GraphCache,
        metrics: Metrics,
        store: GraphStore | None = None,
        background: Background | None = None,
        host: HostMemory | None = None,
    ) -> None:
        self.cache = cache
        self.metrics = metrics
        # Of what another process compiles nothing would be believed here, where each has a key of its own.
        self.background = background if store is None or store.shared else None
        self.recordings = RecordingPool(lambda: max(0, cache.budget - cache.nbytes), host)
        self.index = CallIndex(store)
        self.verdicts = Verdicts(cache, metrics, store)
        self.builder = GraphBuilder(cache, self.verdicts, metrics, store, self.recordings)
        self.failures = Failures()
        self.functions = WeakSet[Forgetful]()

    def release(self) -> int:
        """Let go of what is kept for weights that leave the device. Return how many bytes recordings held of it."""
        for keeper in list(self.functions):
            keeper.forget()
        return self.recordings.release()
