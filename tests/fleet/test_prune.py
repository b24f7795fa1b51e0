"""What is removed from the store is what was judged: not what a builder put in its place meanwhile."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
from machines import CALL, KEY, SHAPES, Machine, StoreFleet, graph

from onediff_comfy.store.remote import upkeep
from onediff_comfy.store.remote.lease import HELD
from onediff_comfy.store.remote.objects import Listed
from onediff_comfy.store.remote.tier import Tier


@pytest.fixture
def old(store_fleet: StoreFleet) -> Machine:
    """A builder whose key nobody else believes any more, and whose graph lies in the store."""
    machine = store_fleet.machine()
    key = machine.keys.make("its own", rotate=True)
    assert machine.tier().publish(graph(mark=b"old"))
    assert key.key_id != store_fleet.signer.key_id
    return machine


def pruned_after(monkeypatch: pytest.MonkeyPatch, tier: Tier, meanwhile: Callable[[], object]) -> list[str]:
    """Prune what is unbelieved; something happens between the judgement and the removal."""
    judge = upkeep._refused

    def judged(*arguments: Any) -> Any:
        found = judge(*arguments)
        assert list(found) == [KEY]
        meanwhile()
        return found

    monkeypatch.setattr(upkeep, "_refused", judged)
    return upkeep.prune(tier, None, None, True)


@pytest.mark.usefixtures("old")
def test_a_good_graph_that_came_in_the_place_of_a_refused_one_stays_with_its_notes(
    store_fleet: StoreFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = store_fleet.machine().tier()
    tier = store_fleet.machine(builder=False).tier()
    assert pruned_after(monkeypatch, tier, lambda: builder.publish(graph(mark=b"new"))) == []
    assert builder.statement(KEY) is not None and builder.calls(CALL) == [(KEY, SHAPES)]


def test_a_graph_that_came_in_the_place_of_an_old_one_stays(
    folder_fleet: StoreFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = folder_fleet.machine().tier()
    assert tier.publish(graph(mark=b"old"))
    long_ago, listed = time.time() - 100 * 86400, tier.objects.listed
    os.utime(folder_fleet.folder / "shared store" / "v1" / "graphs" / KEY, (long_ago, long_ago))

    def then_replaced(prefix: str, *most: int) -> list[Listed]:
        found = listed(prefix, *most)
        if prefix == "v1/graphs/":
            tier.objects.delete(f"v1/graphs/{KEY}")
            assert tier.publish(graph(mark=b"new"))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(tier.objects, "listed", then_replaced)
        assert upkeep.prune(tier, 90, None, False) == []
    assert tier.statement(KEY) is not None and tier.calls(CALL) == [(KEY, SHAPES)]


@pytest.mark.usefixtures("old")
def test_the_notes_of_a_graph_that_is_published_again_meanwhile_stay(
    store_fleet: StoreFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = store_fleet.machine().tier()
    tier = store_fleet.machine(builder=False).tier()
    listed = tier.objects.listed

    def after_another(prefix: str, *most: int) -> list[Listed]:
        if prefix == "v1/calls/":
            assert builder.publish(graph(mark=b"new"))
        return listed(prefix, *most)

    monkeypatch.setattr(tier.objects, "listed", after_another)
    assert upkeep.prune(tier, None, None, True) == [KEY]
    assert builder.statement(KEY) is not None and builder.calls(CALL) == [(KEY, SHAPES)]


@pytest.mark.parametrize("believed", [True, False])
def test_a_lease_that_somebody_may_hold_stays_and_one_that_was_given_back_goes(
    store_fleet: StoreFleet, old: Machine, monkeypatch: pytest.MonkeyPatch, believed: bool
) -> None:
    """Of a holder whom this machine does not believe it cannot tell more than that the lease is new."""
    tier, holder = store_fleet.machine(builder=False).tier(), store_fleet.machine()
    if not believed:
        holder.keys.make("another", rotate=True)
    builder = holder.tier()
    held = builder.leases.take(KEY, None, builder.own_key)
    assert held is not None
    assert upkeep.prune(tier, None, None, True) == [KEY]
    seen = builder.leases.look(KEY)
    assert seen is not None and seen.state == HELD
    held.release(published=False)
    assert old.tier().publish(graph(mark=b"old"))
    assert upkeep.prune(tier, None, None, True) == [KEY]
    assert (builder.leases.look(KEY) is None) is believed
    if not believed:
        monkeypatch.setattr(upkeep, "_DAY_S", -60)  # it was not written for a day
        assert old.tier().publish(graph(mark=b"old"))
        assert upkeep.prune(tier, None, None, True) == [KEY]
        assert builder.leases.look(KEY) is None


def test_what_is_there_decides_at_the_moment_of_its_removal(store_fleet: StoreFleet) -> None:
    objects = store_fleet.machine().tier().objects
    version = objects.create("v1/x", b"1")
    assert version is not None
    assert not objects.delete_if("v1/none", lambda there: True)
    assert not objects.delete_if("v1/x", lambda there: there.version != version) and objects.exists("v1/x")
    assert objects.delete_if("v1/x", lambda there: there.version == version) and not objects.exists("v1/x")
