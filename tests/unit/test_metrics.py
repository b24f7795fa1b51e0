"""metrics.py: counters as plain data."""

from __future__ import annotations

import json
import threading

from onediff_comfy.metrics import Metrics


def test_a_snapshot_has_every_counter_from_the_start() -> None:
    snapshot = Metrics().snapshot()
    assert (snapshot.pop("fallbacks"), snapshot.pop("graphs")) == ({}, [])
    assert set(snapshot.values()) == {0}
    expected = {"captured", "compiled", "loaded", "served", "proved", "retired", "evicted", "failed"}
    assert expected <= set(snapshot)


def test_counts_add_up() -> None:
    metrics = Metrics()
    metrics.count("served")
    metrics.count("served", 2)
    assert metrics.snapshot()["served"] == 3


def test_a_made_graph_is_counted_and_listed() -> None:
    metrics = Metrics()
    metrics.made("compiled", "key", "inductor", "UNet float16[2x4]@cuda:0", 1.23456)
    snapshot = metrics.snapshot()
    (graph,) = snapshot["graphs"]
    assert snapshot["compiled"] == 1
    assert snapshot["loaded"] == 0
    assert graph.pop("at") > 1.7e9
    assert graph == {
        "key": "key",
        "how": "compiled",
        "engine": "inductor",
        "what": "UNet float16[2x4]@cuda:0",
        "seconds": 1.235,
    }


def test_the_first_of_a_reason_is_told_apart() -> None:
    metrics = Metrics()
    assert [metrics.fell_back("a"), metrics.fell_back("a"), metrics.fell_back("b")] == [True, False, True]
    assert metrics.snapshot()["fallbacks"] == {"a": 2, "b": 1}


def test_a_snapshot_is_json_and_a_copy() -> None:
    metrics = Metrics()
    metrics.made("loaded", "key", "eager", "what", 0.0)
    metrics.fell_back("reason")
    snapshot = metrics.snapshot()
    assert json.loads(json.dumps(snapshot)) == snapshot
    snapshot["graphs"][0]["key"] = snapshot["fallbacks"]["reason"] = "spoiled"
    assert metrics.snapshot()["graphs"][0]["key"] == "key"
    assert metrics.snapshot()["fallbacks"] == {"reason": 1}


def test_counting_from_many_threads_loses_nothing() -> None:
    metrics = Metrics()

    def work() -> None:
        for _ in range(2000):
            metrics.count("served")
            metrics.fell_back("reason")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (metrics.snapshot()["served"], metrics.snapshot()["fallbacks"]["reason"]) == (8000, 8000)


def test_what_one_object_counts_is_part_of_the_total() -> None:
    total = Metrics()
    first, second = Metrics(total), Metrics(total)
    runs = first.tally(anybody := Metrics()), second.tally(anybody)
    runs[0].update("ab")
    runs[1].update("a")
    first.fell_back("reason")
    second.fell_back("reason")
    second.count("specialised")
    first.evicted("a")
    first.made("compiled", "a", "eager", "what", 1.0)
    assert [metrics.snapshot()["served"] for metrics in (first, second, total)] == [2, 1, 3]
    assert [metrics.snapshot()["fallbacks"]["reason"] for metrics in (first, second, total)] == [1, 1, 2]
    assert (first.served_by(), second.served_by(), total.served_by()) == ({"a": 1, "b": 1}, {"a": 1}, {"a": 2, "b": 1})
    assert (total.snapshot()["specialised"], total.snapshot()["evicted"], total.evictions()) == (1, 1, {"a": 1})
    assert (second.snapshot()["compiled"], total.snapshot()["compiled"]) == (0, 1)


def test_a_reason_is_new_to_each_object_for_itself() -> None:
    total = Metrics()
    assert Metrics(total).fell_back("reason")
    assert Metrics(total).fell_back("reason")
    assert not total.fell_back("reason")


class Run:
    """Counts calls."""


def test_what_a_run_counted_is_kept_when_the_run_is_no_more() -> None:
    total = Metrics()
    metrics = Metrics(total)
    run = Run()
    metrics.tally(run).update("aab")
    del run
    later = Run()
    metrics.tally(later).update("a")
    assert metrics.served_by() == total.served_by() == {"a": 3, "b": 1}
    assert metrics.snapshot()["served"] == 4
