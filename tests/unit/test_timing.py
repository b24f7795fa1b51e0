"""serving/executor.py: seconds by graph, without waiting for a device."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from onediff_comfy.capture.call import Signature
from onediff_comfy.serving.executor import CallTimes

CALL = Signature("forward", (), (), ())
CPU = torch.device("cpu")


def times_of(*seconds: float) -> CallTimes:
    """Times whose calls take these seconds, one after another."""

    def readings() -> Iterator[float]:
        now = 0.0
        for passed in seconds:
            yield now
            now += passed
            yield now

    return CallTimes(readings().__next__)


def call(times: CallTimes, key: str, signature: Signature = CALL) -> None:
    with times.measured(key, signature, CPU):
        pass


def test_seconds_add_up_by_graph() -> None:
    times = times_of(2.0, 3.0, 4.0)
    for key in ("a", "a", "b"):
        call(times, key)
    assert times.seconds() == {"a": 5.0, "b": 4.0}


def test_seconds_are_those_that_passed() -> None:
    times = CallTimes()
    start = time.perf_counter()
    with times.measured("a", CALL, CPU):
        time.sleep(0.02)
    assert 0.02 <= times.seconds()["a"] <= time.perf_counter() - start


def test_a_call_that_stands_for_others_counts_as_many_times_in_what_all_took() -> None:
    times = times_of(2.0, 3.0)
    times.end(times.begin(CPU), "a", CALL, CPU, stands_for=8)
    call(times, "a")
    assert times.seconds() == {"a": 19.0} and times.fastest("a", CALL) == (2.0, 2)


def test_a_call_that_fails_is_not_counted() -> None:
    times = CallTimes()
    with pytest.raises(ValueError, match="no"), times.measured("a", CALL, CPU):
        raise ValueError("no")
    assert times.seconds() == {}


def test_what_is_handed_out_is_a_copy() -> None:
    times = times_of(2.0)
    call(times, "a")
    times.seconds()["a"] = 100
    assert times.seconds()["a"] == 2.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_is_timed_without_waiting_for_it() -> None:
    device, times = torch.device("cuda"), CallTimes()
    matrix = torch.randn(8192, 8192, device=device)
    torch.cuda.synchronize()
    start = time.perf_counter()
    with times.measured("a", CALL, device):
        for _ in range(10):
            matrix = matrix @ matrix
    launched = time.perf_counter() - start
    torch.cuda.synchronize()
    assert times.seconds()["a"] > launched


def test_the_fastest_of_each_kind_of_call_is_kept() -> None:
    times, other = times_of(0.03, 0.01, 0.02), Signature("other", (), (), ())
    for _ in range(3):
        call(times, "a")
    fastest, calls = times.fastest("a", CALL)
    assert calls == 3 and fastest == pytest.approx(0.01)
    assert times.fastest("a", other) == times.fastest("b", CALL) == (float("inf"), 0)


def test_the_usual_time_leaves_the_slowest_call_out() -> None:
    """The first call loads kernels; with nothing else to go by it counts."""
    times, other = times_of(9.0, 0.25, 0.5, 5.0), Signature("other", (), (), ())
    assert times.usual("graph", CALL) is None
    call(times, "graph")
    assert times.usual("graph", CALL) == 9.0
    for _ in range(2):
        call(times, "graph")
    call(times, "graph", other)
    assert times.usual("graph", CALL) == 0.375
    assert times.fastest("graph", CALL) == (0.25, 3)
