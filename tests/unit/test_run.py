"""The line that a run leaves on its node."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onediff_comfy.cache.keys import GraphKey, compiler
from onediff_comfy.cache.memory import GraphCache
from onediff_comfy.cache.serialization import GraphOrigin
from onediff_comfy.capture.call import Signature
from onediff_comfy.capture.export import Capture
from onediff_comfy.compilation import graph_builder
from onediff_comfy.compilation.job_queue import Waited
from onediff_comfy.compilation.library import GraphLibrary
from onediff_comfy.engines.base import CompiledGraph
from onediff_comfy.engines.eager import EagerEngine
from onediff_comfy.metrics import Metrics
from onediff_comfy.serving.decision import Served
from onediff_comfy.serving.executor import CallTimes
from onediff_comfy.serving.run import RunReport
from onediff_comfy.serving.verification.eager_times import EagerTimes
from onediff_comfy.store.store import GraphStore
from onediff_comfy.store.trust import Trust

SIGNATURE = Signature("Net.forward", (), (), ())
KEY, SIZES = "a" * 64, (2, 128)
CPU = torch.device("cpu")
ORIGIN = GraphOrigin("Linear", (), "c" * 64, {})


@pytest.fixture
def library(tmp_path: Path) -> GraphLibrary:
    store = GraphStore(tmp_path / "graphs", Trust(tmp_path / "config"))
    return GraphLibrary(GraphCache(1 << 30), Metrics(), store)


def _run(library: GraphLibrary, graph_seconds: float = 0.1, calls: int = 20, gains: bool = True) -> RunReport:
    times = CallTimes(iter((0.0, graph_seconds)).__next__)
    with times.measured(KEY, SIGNATURE, CPU):
        pass
    run = RunReport(Metrics(), library.metrics, EagerTimes(library, times, gains).gain)
    for _ in range(calls):
        run.graph_answered(Served(KEY, SIZES, 0), SIGNATURE)
    return run


def test_all_calls_from_a_graph_that_was_there(library: GraphLibrary) -> None:
    for seconds in (0.17, 0.18):
        library.verdicts.eager_took(KEY, SIZES, seconds)
    assert _run(library).status("1024×1024 b1") == "compiled graph · 1024×1024 b1 · 1.7x · 0 recompiles"


@pytest.mark.parametrize("eager_seconds", [0.1, 0.05, None])
def test_no_gain_is_claimed_that_was_not_measured(library: GraphLibrary, eager_seconds: Any) -> None:
    for _ in range(5 if eager_seconds is not None else 0):
        library.verdicts.eager_took(KEY, SIZES, eager_seconds)
    assert _run(library).status("512×512 b1") == "compiled graph · 512×512 b1 · 0 recompiles"


def test_a_gain_at_other_sizes_is_another_gain(library: GraphLibrary) -> None:
    for _ in range(2):
        library.verdicts.eager_took(KEY, (1, 64), 5.0)
    assert _run(library).gain() is None


@pytest.mark.parametrize(("seconds", "said"), [(62.4, "62 s"), (1.64, "1.6 s")])
@pytest.mark.parametrize("how", ["compiled", "loaded"])
def test_what_the_person_waited_for_is_told(library: GraphLibrary, how: str, seconds: float, said: str) -> None:
    library.metrics.made("compiled", KEY, "eager", "Net", 1000)  # before this run
    run = _run(library)
    library.metrics.made(how, KEY, "eager", "Net", seconds)
    assert run.status("64×64 b2") == f"compiled graph · 64×64 b2 · {how} in {said}"


def test_calls_that_ran_eager_are_told_with_every_reason(library: GraphLibrary) -> None:
    run = _run(library, calls=3)
    for reason in ("a patch", "another", "another"):
        run.eager_answered(reason)
    lines = run.status("64×64 b1").splitlines()
    assert lines == [
        "3 of 6 calls accelerated · 64×64 b1 · 0 recompiles",
        "not accelerated: another",
        "not accelerated: a patch",
    ]


def test_a_run_of_eager_calls_gives_the_reason_and_no_more(library: GraphLibrary) -> None:
    run = RunReport(Metrics(), library.metrics, EagerTimes(library, CallTimes(), gains=True).gain)
    run.eager_answered("a patch")
    assert (run.calls, run.served, run.status("64×64 b1")) == (1, 0, "not accelerated: a patch")


def test_what_eager_took_is_known_to_the_next_process(library: GraphLibrary, tmp_path: Path) -> None:
    library.verdicts.eager_took(KEY, SIZES, 0.25)
    library.verdicts.eager_took(KEY, SIZES, 0.26)
    store = GraphStore(tmp_path / "graphs", Trust(tmp_path / "config"))
    later = GraphLibrary(GraphCache(1 << 30), Metrics(), store)
    assert later.verdicts.eager_samples(KEY, SIZES) == [0.25, 0.26]
    assert later.verdicts.eager_samples(KEY, (1, 1)) == []


def test_a_note_from_before_there_were_several_samples_is_one_of_them(library: GraphLibrary, tmp_path: Path) -> None:
    store = GraphStore(tmp_path / "graphs", Trust(tmp_path / "config"))
    store.notes.write("eager_seconds", KEY, [[list(SIZES), 0.29], [[1, 64], 0.5], [SIZES], 3, [[1, 64], "x"]])
    assert library.verdicts.eager_samples(KEY, SIZES) == [0.29]
    assert _run(library).gain() is None, "as long as no other one agrees"
    for seconds in (0.17, 0.18):
        library.verdicts.eager_took(KEY, SIZES, seconds)
    assert _run(library).gain() == pytest.approx(1.7), "the least of them"


@pytest.mark.parametrize(
    ("samples", "gain"),
    [
        ([0.2], None),  # one says what the machine did just then
        ([0.29, 0.2], None),
        ([0.29, 0.2, 0.21], 2.0),
        ([0.44, 0.45], None),  # agreed, and still odd: the graph is not likely to be so much faster
        ([0.05, 0.051], None),  # nor slower
        ([0.44, 0.45, 0.44, 0.43, 0.4], 4.0),
        ([1.2], 12.0),  # of long calls one says enough
    ],
)
def test_what_eager_took_counts_once_it_can_be_believed(
    library: GraphLibrary, samples: list[float], gain: float | None
) -> None:
    for seconds in samples:
        library.verdicts.eager_took(KEY, SIZES, seconds)
    assert _run(library).gain() == (gain if gain is None else pytest.approx(gain))


def test_an_engine_that_runs_the_same_kernels_is_never_said_to_be_faster(library: GraphLibrary) -> None:
    for _ in range(5):  # an earlier version noted them
        library.verdicts.eager_took(KEY, SIZES, 0.29)
    assert _run(library, gains=False).status("64×64 b1") == "compiled graph · 64×64 b1 · 0 recompiles"


class _Slow(EagerEngine):
    """Takes ``seconds`` to compile, by a clock of its own that else stands still."""

    seconds = now = 0.0

    def compile(self, capture: Capture) -> CompiledGraph:
        self.now += self.seconds
        return super().compile(capture)


def test_how_long_compiling_takes_is_guessed_from_what_it_took(
    library: GraphLibrary, capture_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the slowest so far, operator by operator: being done early disappoints nobody."""
    captured, engine = capture_of(torch.nn.Linear(4, 4), torch.randn(2, 4)).capture, _Slow()
    operators = len(captured.graph.graph.nodes)
    assert library.builder.expected_seconds(engine, CPU, operators) is None
    monkeypatch.setattr(graph_builder, "time", SimpleNamespace(monotonic=lambda: engine.now))
    for number, engine.seconds in enumerate((0.05, 0.3, 0.05)):
        key = GraphKey(str(number), compiler(engine, CPU))
        library.builder.compiled(key, captured, engine, CPU, ORIGIN, lambda _waited: None)
    expected = library.builder.expected_seconds(engine, CPU, operators)
    assert expected == pytest.approx(0.3)
    assert library.builder.expected_seconds(engine, CPU, 2 * operators) == pytest.approx(2 * expected)
    assert library.builder.expected_seconds(engine, torch.device("cuda"), operators) is None


class _HeldElsewhere(GraphStore):
    """Another process compiles every graph that is wanted, and does not end before it is told to."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "graphs", Trust(folder / "config"))
        self.waits, self.released = threading.Event(), threading.Event()

    @contextlib.contextmanager
    def compiling(self, key: str) -> Iterator[None]:
        self.waits.set()
        assert self.released.wait(30)
        with super().compiling(key):
            yield


def test_what_waits_for_another_process_holds_up_nothing_else(tmp_path: Path, capture_of: Any) -> None:
    store = _HeldElsewhere(tmp_path)
    builder = GraphLibrary(GraphCache(1 << 30), Metrics(), store).builder
    captured, engine = capture_of(torch.nn.Linear(4, 4), torch.randn(2, 4)).capture, EagerEngine()
    key, seen = GraphKey("5" * 64, compiler(engine, CPU)), list[bool]()

    def stopped(waited: Waited) -> None:
        seen.append(waited.for_turn)
        if store.waits.is_set():
            raise KeyboardInterrupt

    def late(waited: Waited) -> None:
        assert waited < 10

    with pytest.raises(KeyboardInterrupt):
        builder.compiled(key, captured, engine, CPU, ORIGIN, stopped)
    assert all(seen), "nothing is being compiled here"
    assert builder.loaded("6" * 64, engine, CPU, late) is None
    with builder.while_no_graph_is_made(late):
        pass
    store.released.set()
    assert builder.compiled(key, captured, engine, CPU, ORIGIN, lambda _waited: None).shapes == captured.shapes
