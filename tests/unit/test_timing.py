"""graphs/timing.py: seconds by graph, without waiting for a device."""

from __future__ import annotations

import time

import pytest
import torch

from onediff_comfy.capture.call import Signature
from onediff_comfy.graphs.timing import RunTimes

CALL = Signature("forward", (), (), ())
CPU = torch.device("cpu")


def test_seconds_add_up_by_graph() -> None:
    times = RunTimes()
    for key in ("a", "a", "b"):
        with times.measured(key, CALL, CPU):
            time.sleep(0.02)
    seconds = times.seconds()
    assert 0.04 <= seconds["a"] < 1
    assert 0.02 <= seconds["b"] < seconds["a"]


def test_a_call_that_fails_is_not_counted() -> None:
    times = RunTimes()
    with pytest.raises(ValueError, match="no"), times.measured("a", CALL, CPU):
        raise ValueError("no")
    assert times.seconds() == {}


def test_what_is_handed_out_is_a_copy() -> None:
    times = RunTimes()
    with times.measured("a", CALL, CPU):
        pass
    times.seconds()["a"] = 100
    assert times.seconds()["a"] < 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_is_timed_without_waiting_for_it() -> None:
    device, times = torch.device("cuda"), RunTimes()
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
    times, other = RunTimes(), Signature("other", (), (), ())
    for seconds in (0.03, 0.0, 0.03):
        with times.measured("a", CALL, CPU):
            time.sleep(seconds)
    fastest, calls = times.fastest("a", CALL)
    assert calls == 3 and fastest < 0.02
    assert times.fastest("a", other) == times.fastest("b", CALL) == (float("inf"), 0)


def test_the_usual_time_leaves_the_slowest_call_out() -> None:
    """The first call loads kernels; with nothing else to go by it counts."""
    times, other = RunTimes(), Signature("other", (), (), ())
    assert times.usual("graph", CALL) is None
    times._add("graph", CALL, 9.0)
    assert times.usual("graph", CALL) == 9.0
    for seconds in (0.2, 0.4):
        times._add("graph", CALL, seconds)
    times._add("graph", other, 5.0)
    assert times.usual("graph", CALL) == pytest.approx(0.3)
    assert times.fastest("graph", CALL) == (0.2, 3)
