"""What exists once per ComfyUI process: the graph library, its disk, and the counters the API serves."""

from __future__ import annotations

import functools

from ..graphs.cache import GraphCache
from ..graphs.library import GraphLibrary
from ..metrics import Metrics
from ..settings import GRAPH_BUDGET_BYTES
from ..store.store import GraphStore, default_store


@functools.cache
def metrics() -> Metrics:
    """The counters of this process."""
    return Metrics()


@functools.cache
def library() -> GraphLibrary:
    """The compiled graphs of this process, shared by all nodes."""
    counters = metrics()
    cache = GraphCache(GRAPH_BUDGET_BYTES, on_evict=lambda _key: counters.count("evicted"))
    return GraphLibrary(cache, counters, store())


@functools.cache
def store() -> GraphStore:
    """The compiled graphs on this machine's disk."""
    return default_store()
