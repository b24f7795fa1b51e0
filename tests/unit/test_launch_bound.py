"""runtime/launch_bound.py: which calls a GPU waits in for a CPU that launches their kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onediff_comfy.runtime import launch_bound
from onediff_comfy.runtime.launch_bound import Backlog, Idling, Launching, MovingWeights, Worth


class Gpu:
    """In place of torch's events and of the clock: each call takes what a test says, on the CPU and on the GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.run, self.passed = 0.0, 0.0, True
        self.events, self.timed = 0, list[bool]()

        def event(enable_timing: bool = False) -> Gpu:
            self.timed.append(enable_timing)
            self.events += 1
            return self

        monkeypatch.setattr(torch.cuda, "Event", event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: None)
        monkeypatch.setattr(launch_bound.time, "perf_counter", lambda: self.now)

    def record(self, _stream: object) -> None: ...

    def query(self) -> bool:
        return self.passed

    def elapsed_time(self, _behind: object) -> float:
        return 1000 * self.run

    def call(self, launching: Launching, kind: Any, launch: float, run: float) -> None:
        self.run = run
        with launching.measured(kind, torch.device("cuda")):
            self.now += launch
        launching.bound(kind)  # reads what has passed, as the next call does


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


@pytest.mark.parametrize(
    ("launch", "run", "bound"),
    [(0.010, 0.0105, True), (0.010, 0.004, True), (0.005, 0.0115, True), (0.005, 0.032, False)],
)
def test_after_four_calls_it_is_known(gpu: Gpu, launch: float, run: float, bound: bool) -> None:
    times = Launching()
    for _ in range(3):
        gpu.call(times, "512", launch, run)
        assert not times.bound("512")
    gpu.call(times, "512", launch, run)
    assert times.bound("512") is bound
    assert not times.bound("another size")


def test_a_first_call_that_loads_kernels_and_a_thread_that_had_to_wait_say_nothing(gpu: Gpu) -> None:
    times = Launching()
    for launch in (5.0, 0.01, 2.0, 0.01):
        gpu.call(times, "2048", launch, 0.15)
    assert not times.bound("2048")


def test_nothing_is_measured_once_it_is_known(gpu: Gpu) -> None:
    times = Launching()
    for _ in range(10):
        gpu.call(times, "512", 0.01, 0.005)
    assert gpu.events == 2 * 3


def test_nobody_waits_for_the_gpu(gpu: Gpu) -> None:
    times, gpu.passed = Launching(), False
    for _ in range(4):
        gpu.call(times, "512", 0.01, 0.005)
    assert not times.bound("512")
    gpu.passed = True
    assert times.bound("512")


def test_a_call_that_fails_is_not_counted(gpu: Gpu) -> None:
    times = Launching()
    gpu.call(times, "512", 0.01, 0.005)
    with pytest.raises(RuntimeError), times.measured("512", torch.device("cuda")):
        raise RuntimeError("out of memory")
    gpu.call(times, "512", 0.01, 0.005)
    gpu.call(times, "512", 0.01, 0.005)
    assert not times.bound("512")


@given(st.lists(st.tuples(st.floats(1e-4, 1.0), st.floats(1e-4, 1.0)), min_size=4, max_size=4))
def test_the_fastest_of_each_count(calls: list[tuple[float, float]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        gpu, times = Gpu(patch), Launching()
        for launch, run in calls:
            gpu.call(times, None, launch, run)
        launch, run = min(launch for launch, _ in calls[1:]), min(run for _, run in calls[1:])
        if abs(3 * launch - run) > 1e-6:
            assert times.bound(None) is (3 * launch > run)


def idling(gpu: Gpu, notes: Idling, waited: str) -> bool:
    """Note calls of which launching takes half of the time. Return whether the device waits for most of them.

    Args:
        waited: ``w`` for each call while the device is not behind, ``b`` while it is, and ``f`` for one while it is not
            and launching is next to nothing.
    """
    for each in waited:
        gpu.now += 1 if each == "f" else 0.001
        with notes.noted("512", MovingWeights(device_is_behind=each == "b")):
            gpu.now += 0.001
    return notes.waits("512")


def test_the_device_waits_where_it_was_not_behind_in_most_of_the_last_calls(gpu: Gpu) -> None:
    notes = Idling()
    assert not idling(gpu, notes, "w" * 79), "the first are not counted, and too few are left"
    assert idling(gpu, notes, "w")
    assert not notes.waits("another size")
    assert not idling(gpu, notes, "b" * 25) and not idling(gpu, notes, "w" * 71)
    assert idling(gpu, notes, "w"), "72 of 96"
    assert gpu.events == 0, "nobody need ask the device"


def test_a_device_that_is_behind_waits_for_nobody(gpu: Gpu) -> None:
    assert not idling(gpu, Idling(), "wwb" * 50)
    assert not idling(gpu, Idling(), "b" * 150)


class Device:
    """In the place of a stream of a device, which is so many calls behind."""

    def __init__(self) -> None:
        self.launched = self.behind = 0

    def record_event(self) -> Behind:
        self.launched += 1
        return Behind(self, self.launched)


class Behind:
    """In the place of an event."""

    def __init__(self, device: Device, number: int) -> None:
        self.device, self.number = device, number

    def query(self) -> bool:
        return self.number <= self.device.launched - self.device.behind


def backlog_of(behind: str) -> Backlog:
    """Return what is noted of calls, by how many the device is behind when each is made."""
    backlog, device = Backlog(), Device()
    for each in behind:
        device.behind = int(each)
        backlog.called(device)  # type: ignore[arg-type]
    return backlog


def test_a_cpu_is_never_behind_itself() -> None:
    backlog = Backlog()
    for _ in range(100):
        backlog.called(None)
    assert not backlog.is_long


@pytest.mark.parametrize(
    ("behind", "long"),
    [
        ("2" * 47, False),  # few
        ("2" * 48, True),
        ("1" * 200, False),  # whose weights are on their way while the next is launched
        ("9" * 200, True),
        ("0" * 13 + "2" * 37, False),
        ("0" * 12 + "2" * 41, True),
        ("220" * 64, False),
        ("2" * 192 + "0" * 128, True),  # what holds a CPU up for two steps is no reason
        ("2" * 192 + "0" * 192, False),
        ("0" * 192 + "2" * 48, False),
        ("0" * 192 + "2" * 49, True),
    ],
)
def test_the_backlog_is_long_if_the_device_was_behind_in_most_calls_of_one_of_the_last_steps(
    behind: str, long: bool
) -> None:
    assert backlog_of(behind).is_long is long


@pytest.mark.parametrize(("ahead", "recorded"), [(57, False), (48, False), (19, True), (0, True)])
def test_what_all_blocks_of_a_step_show_is_shown_of_each_kind(gpu: Gpu, ahead: int, recorded: bool) -> None:
    """A step of Flux: blocks of one kind take the CPU longer than those of the other, and come first.

    The CPU is ahead of the device in some of a step's calls.
    """
    worth, backlog, device = Worth(), Backlog(), Device()
    for call in range(6 * 57):
        device.behind = 2 if call % 57 >= 57 - ahead else 0
        backlog.called(device)  # type: ignore[arg-type]
        moving = MovingWeights(device_is_behind=backlog.is_long)
        with worth.noted(moving, "double" if call % 57 < 19 else "single", torch.device("cuda")):
            gpu.now += 0.001
    assert {worth.recording(moving, kind, 0) for kind in ("double", "single")} == {recorded}


def test_what_the_device_waits_for_may_be_a_file_that_the_host_reads(gpu: Gpu) -> None:
    """A model may have more blocks than calls that are not counted."""
    notes = Idling()
    assert not idling(gpu, notes, "f" * 100)
    assert idling(gpu, notes, "w" * 96)


@pytest.mark.parametrize(("shown", "waits"), [("w" * 16, True), ("b" * 16, False)])
def test_what_an_image_has_shown_spares_the_next_a_part_of_showing_it_anew(gpu: Gpu, shown: str, waits: bool) -> None:
    notes = Idling()
    assert idling(gpu, notes, "w" * 150)
    notes.start_over()
    assert not notes.waits("512")
    assert not idling(gpu, notes, shown[:-1])
    assert idling(gpu, notes, shown[-1:]) is waits


def test_of_many_names_the_last_were_met() -> None:
    """A host that never puts weights to where they were has as many as it makes calls."""
    worth = Worth()
    assert [worth.is_met(name) for name in (1, 2, 1, 2)] == [False, False, True, True]
    assert not any(map(worth.is_met, range(10, 1000)))
    assert worth.is_met(999) and not worth.is_met(1)


def test_what_holds_a_cpu_up_for_a_step_is_no_reason(gpu: Gpu) -> None:
    notes = Idling()
    idling(gpu, notes, "b" * 200)
    assert not idling(gpu, notes, "w" * 40) and not idling(gpu, notes, "b" * 40)
