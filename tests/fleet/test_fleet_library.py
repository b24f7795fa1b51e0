"""The graph library on a store that machines share: calls of a new machine need no capture, people can stop waiting."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
import torch
from machines import Machine, StoreFleet, until
from restarted import HOST, Keeping, Net
from stores import on_one_store
from torch import nn

from onediff_comfy import engines
from onediff_comfy.cache.memory import GraphCache
from onediff_comfy.capture.export import Capture
from onediff_comfy.compilation.library import GraphLibrary
from onediff_comfy.engines.base import CompiledGraph
from onediff_comfy.metrics import Metrics
from onediff_comfy.serving.dispatcher import Dispatcher
from onediff_comfy.store.remote.lease import LeaseTimes
from onediff_comfy.store.store import GraphStore
from onediff_comfy.store.trust import Trust

X = torch.randn(2, 6, 4)


@pytest.fixture(autouse=True)
def _kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of the eager engine can be kept."""
    monkeypatch.setitem(engines.ENGINES, "eager", Keeping())


def served(store: GraphStore, module: nn.Module, host: Any = HOST, **arguments: Any) -> dict[str, Any]:
    """Call a module through a new library on a store; what was counted."""
    library = GraphLibrary(GraphCache(1 << 30), Metrics(), store)
    module = module.eval().requires_grad_(False)
    made = Dispatcher("eager", library, host)(module, module.forward, (X,), arguments)
    torch.testing.assert_close(made, module(X, **arguments), rtol=1e-5, atol=1e-5)
    counted = library.metrics.snapshot()
    return {name: counted[name] for name in ("captured", "compiled", "loaded", "served")}


FIRST = {"captured": 1, "compiled": 1, "loaded": 0, "served": 1}
LATER = {"captured": 0, "compiled": 0, "loaded": 1, "served": 1}


def test_a_new_machine_captures_and_compiles_nothing(store_fleet: StoreFleet) -> None:
    assert served(store_fleet.machine().store(), Net()) == FIRST
    for builder in (True, False):
        assert served(store_fleet.machine(builder).store(), Net()) == LATER


class ReadsAnOption(nn.Module):
    """Its graph depends on an option, which a capture has to find out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, transformer_options: dict[str, Any]) -> torch.Tensor:
        return self.linear(x) * transformer_options["scale"]


def test_a_new_machine_knows_which_options_are_read(store_fleet: StoreFleet) -> None:
    options = {"transformer_options": {"scale": 2.0}}
    assert served(store_fleet.machine().store(), ReadsAnOption(), **options)["compiled"] == 1
    assert served(store_fleet.machine().store(), ReadsAnOption(), **options) == LATER


class Overtaken(Keeping):
    """While it compiles, another machine publishes the same graph."""

    def __init__(self, store_fleet: StoreFleet, kept: GraphStore) -> None:
        self._fleet, self._kept = store_fleet, kept

    def compile(self, capture: Capture) -> CompiledGraph:
        (entry,) = self._kept.entries()
        assert entry.artifact is not None
        self._fleet.machine().tier().publish(entry.artifact)
        return super().compile(capture)


@on_one_store
def test_who_is_overtaken_serves_by_what_was_published(
    store_fleet: StoreFleet, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    kept = GraphStore(tmp_path / "kept", Trust(tmp_path / "its config"))
    assert served(kept, Net()) == FIRST
    monkeypatch.setitem(engines.ENGINES, "eager", Overtaken(store_fleet, kept))
    store = store_fleet.machine().store()
    assert served(store, Net()) == {**FIRST, "loaded": 1}
    (ours,), (theirs,) = store.entries(), kept.entries()
    assert ours.artifact is not None and theirs.artifact is not None
    assert ours.artifact.digest == theirs.artifact.digest
    assert store.tier.counters.snapshot()["late"] == 1


class Stopped(Exception):
    """The person wants the run to end."""


@on_one_store
def test_a_person_can_stop_waiting_for_another_machine(store_fleet: StoreFleet, tmp_path: Any) -> None:
    kept = GraphStore(tmp_path / "kept", Trust(tmp_path / "its config"))
    served(kept, Net())
    (entry,) = kept.entries()
    assert entry.artifact is not None
    key = entry.artifact.manifest.key
    lease = store_fleet.machine().tier().turn(key)
    assert lease is not None
    begun = time.monotonic()
    machine: Machine = store_fleet.machine()
    store = machine.store(machine.tier(LeaseTimes(ttl_s=120.0, poll_s=0.2)))  # however busy the lease's holder is

    def check_interrupted() -> None:
        if store.tier.counters.snapshot()["waits"] or time.monotonic() - begun > 60:
            raise Stopped

    with pytest.raises(Stopped):
        served(store, Net(), dataclasses.replace(HOST, check_interrupted=check_interrupted, interruption=Stopped))
    assert time.monotonic() - begun < 60
    assert store.tier.counters.snapshot()["waits"] == 1
    # What nobody waits for any more goes on, and is there for the next one.
    assert store_fleet.machine().tier().publish(entry.artifact)
    lease.release(published=True)
    until(lambda: store.has(key), "the graph is fetched")
