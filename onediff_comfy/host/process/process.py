"""What exists once per ComfyUI process: the graph library, its disk, and the counters the API serves."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

import comfy.model_management

from ...cache.memory import GraphCache
from ...compilation.background import Background
from ...compilation.library import GraphLibrary
from ...metrics import Metrics
from ...once import once
from ...serving.dispatcher import Dispatcher
from ...settings import GRAPH_BUDGET_SHARE
from ...store.store import GraphStore, default_store
from .memory_pressure import host_memory


@once
def metrics() -> Metrics:
    """Return the counters of this process."""
    return Metrics()


@once
def library() -> GraphLibrary:
    """Return the compiled graphs of this process, shared by all nodes."""
    counters = metrics()
    cache = GraphCache(_default_budget(), on_evict=counters.evicted)
    return GraphLibrary(cache, counters, store(), Background(_WORKER, _path_of_worker), host_memory())


# By the name that the package has in a process of its own; here it is part of a custom-node package.
_WORKER = "onediff_comfy.host.process.compile_worker"


def _path_of_worker() -> list[str]:
    return [str(Path(__file__).resolve().parents[3]), *(entry for entry in sys.path if entry)]


@dataclass(frozen=True)
class NodeOrigin:
    """Where an accelerated object comes from.

    Attributes:
        kind: the host's name for such objects: MODEL, VAE, CLIP, CONTROL_NET.
        node_id: of the node that made it, or None.
        pixels: what a side of its latents is to be multiplied by to be an image's; 0 of what is called with none.
    """

    kind: str
    node_id: str | None
    pixels: int = 0


@once
def accelerated() -> WeakKeyDictionary[Dispatcher, NodeOrigin]:
    """Return the dispatchers of all objects that are accelerated now, for the report. Whoever makes one adds it."""
    return WeakKeyDictionary()


def set_budget(megabytes: int) -> None:
    """Set how many megabytes all graphs together may hold from now on; 0 for a share of the device's memory."""
    cache = library().cache
    cache.budget = megabytes << 20 if megabytes else _default_budget()
    cache.trim()
    library().recordings.budget_changed()


def _default_budget() -> int:
    return int(comfy.model_management.get_total_memory(comfy.model_management.get_torch_device()) * GRAPH_BUDGET_SHARE)


@once
def store() -> GraphStore:
    """Return the compiled graphs on this machine's disk."""
    return default_store()
