"""Exactly one machine of a fleet compiles a graph and exactly one artifact is published, whatever happens to it."""

from __future__ import annotations

import signal
import socket
import time
from collections import Counter
from typing import Any

import pytest
from machines import KEY, TIMES, Machine, StoreFleet, until
from stores import on_one_store


def run_together(machines: list[Machine], **options: Any) -> list[dict[str, Any]]:
    """Start all at once; the last words of each."""
    for machine in machines:
        machine.start(**options)
    return [machine.end() for machine in machines]


def summed(ends: list[dict[str, Any]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for end in ends:
        total.update(end["counters"])
    return total


def published(store_fleet: StoreFleet) -> list[str]:
    return [listed.path.rpartition("/")[2] for listed in store_fleet.machine().tier().objects.listed("v1/graphs/")]


def assert_once(store_fleet: StoreFleet) -> None:
    """Four cold machines want one graph: one compiles, one artifact is published, all have that one."""
    ends = run_together([store_fleet.machine() for _ in range(4)])
    counted = summed(ends)
    assert (counted["compiles"], counted["alone"]) == (1, 0), counted
    assert (counted["published"], counted["late"], counted["fetched"]) == (1, 0, 3), counted
    assert len({end["digest"] for end in ends}) == 1
    assert published(store_fleet) == [KEY]


def test_of_four_cold_machines_one_compiles_and_one_artifact_is_published(store_fleet: StoreFleet) -> None:
    assert_once(store_fleet)
    # And a later one fetches it at once.
    (later,) = run_together([store_fleet.machine()])
    assert later["counters"]["fetched"] == 1 and later["counters"]["compiles"] == later["counters"]["waits"] == 0


def test_on_a_store_that_is_not_atomic_the_test_above_fails(racy_fleet: StoreFleet) -> None:
    with pytest.raises(AssertionError, match=r"'compiles': [234]"):
        assert_once(racy_fleet)


def test_a_leader_that_is_killed_is_taken_over(store_fleet: StoreFleet) -> None:
    leader, waiter = store_fleet.machine(), store_fleet.machine()
    leader.start(held=True)
    until(lambda: leader.has_said("compiles"), "the leader compiles")
    waiter.start()
    time.sleep(0.5)
    leader.signal(signal.SIGKILL)
    end = waiter.end()
    assert end["counters"] | {"takeovers": 1, "compiles": 1, "published": 1} == end["counters"]
    assert end["counters"]["waits"] == 1
    assert end["seconds"] > TIMES.ttl_s / 2
    assert published(store_fleet) == [KEY]


@on_one_store
def test_of_many_waiters_one_takes_over(store_fleet: StoreFleet) -> None:
    leader = store_fleet.machine()
    leader.start(held=True)
    until(lambda: leader.has_said("compiles"), "the leader compiles")
    waiters = [store_fleet.machine() for _ in range(3)]
    for waiter in waiters:
        waiter.start()
    leader.signal(signal.SIGKILL)
    ends = [waiter.end() for waiter in waiters]
    counted = summed(ends)
    assert (counted["takeovers"], counted["compiles"], counted["fetched"]) == (1, 1, 2), counted
    assert len({end["digest"] for end in ends}) == 1


def test_a_leader_that_was_frozen_does_not_publish_late(store_fleet: StoreFleet) -> None:
    leader, waiter = store_fleet.machine(), store_fleet.machine()
    leader.start(held=True)
    until(lambda: leader.has_said("compiles"), "the leader compiles")
    leader.signal(signal.SIGSTOP)
    waiter.start()
    theirs = waiter.end()
    leader.let_go()
    leader.signal(signal.SIGCONT)
    ours = leader.end()
    assert theirs["counters"]["takeovers"] == theirs["counters"]["published"] == 1
    assert ours["counters"]["late"] == 1 and ours["counters"]["published"] == 0
    assert leader.has_said("was second")
    assert ours["digest"] == theirs["digest"], "the leader serves by what is published"
    assert published(store_fleet) == [KEY]


@on_one_store
def test_a_leader_that_renews_its_lease_is_waited_for(store_fleet: StoreFleet) -> None:
    leader, waiter = store_fleet.machine(), store_fleet.machine()
    leader.start(held=True)
    until(lambda: leader.has_said("compiles"), "the leader compiles")
    waiter.start()
    until(lambda: waiter.has_said("waits"), "the other one waits")
    time.sleep(1.5 * TIMES.ttl_s)
    leader.let_go()
    end = waiter.end()
    assert (end["counters"]["waits"], end["counters"]["takeovers"], end["counters"]["fetched"]) == (1, 0, 1)
    assert end["counters"]["wait_seconds"] > TIMES.ttl_s


@on_one_store
def test_a_store_that_is_down_makes_every_machine_compile_for_itself(store_fleet: StoreFleet) -> None:
    with socket.socket() as taken:  # bound and not listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        down = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{taken.getsockname()[1]}"}
        store_fleet.environment = {**store_fleet.environment, "AWS_REGION": "us-east-1", **down}
        machines = [store_fleet.machine(url="s3://fleet/down") for _ in range(2)]
        ends = run_together(machines, pause_s=3600.0)
    for end in ends:
        assert end["counters"]["alone"] == 1 and end["counters"]["unreachable"] >= 1, end
        assert end["counters"]["unpublished"] == 1 and end["counters"]["published"] == 0
        assert end["asked"] == ["get", "head"], "a dead store is waited for once: what one look at an object asks"
    assert len({end["digest"] for end in ends}) == 2


@on_one_store
def test_a_worker_without_a_key_compiles_for_itself_alone(store_fleet: StoreFleet) -> None:
    (end,) = run_together([store_fleet.machine(builder=False)])
    assert end["counters"]["alone"] == 1 and end["counters"]["published"] == 0
    assert published(store_fleet) == []


@on_one_store
def test_a_worker_waits_for_a_builder_that_is_at_it(store_fleet: StoreFleet) -> None:
    builder, worker = store_fleet.machine(), store_fleet.machine(builder=False)
    builder.start(held=True)
    until(lambda: builder.has_said("compiles"), "the builder compiles")
    worker.start()
    until(lambda: worker.has_said("waits"), "the worker waits")
    builder.let_go()
    assert worker.end()["digest"] == builder.end()["digest"]
    assert worker.said()[-1]["counters"]["waits"] == worker.said()[-1]["counters"]["fetched"] == 1
