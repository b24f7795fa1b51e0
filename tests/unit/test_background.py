"""Graphs made in the background: which sizes get one of their own, and that calls meanwhile are not slowed down."""

from __future__ import annotations

import dataclasses
import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from restarted import Keeping
from torch import nn

from onediff_comfy import engines
from onediff_comfy.cache.memory import GraphCache
from onediff_comfy.capture.export import Capture
from onediff_comfy.capture.parameters import OnCopies
from onediff_comfy.compilation.background import Background, Job, Outcome
from onediff_comfy.compilation.compile_graph import HostServices
from onediff_comfy.compilation.library import GraphLibrary
from onediff_comfy.engines.base import CompiledGraph
from onediff_comfy.engines.eager import EagerEngine
from onediff_comfy.engines.inductor.code_folder import in_new_code_folder
from onediff_comfy.engines.inductor.engine import InductorEngine
from onediff_comfy.metrics import Metrics
from onediff_comfy.runtime.step_cache import StepCache
from onediff_comfy.serving.decision import Invocation, Output
from onediff_comfy.serving.dispatcher import Dispatcher
from onediff_comfy.serving.options import Options
from onediff_comfy.serving.resolution import pending
from onediff_comfy.settings import SPECIALISE_AFTER_RUNS
from onediff_comfy.store.store import GraphStore
from onediff_comfy.store.trust import Trust

HOST = HostServices("host", "transformer_options", {}, lambda: None, lambda _layers: None)


class Net(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * 2


class OtherProcess(Background):
    """Keeps what it is asked to do; a test says how it ended, or does it."""

    def __init__(self) -> None:
        super().__init__("none", list)
        self.begun: list[str] = []
        self.under_way: list[str] = []
        self.outcomes: dict[str, Outcome] = {}

    def busy(self) -> bool:
        return bool(self.under_way)

    def seconds(self, key: str) -> float | None:
        return 0.0 if key in self.under_way else None

    def outcome(self, key: str) -> Outcome | None:
        return self.outcomes.pop(key, None)

    def start(self, key: str, job: Job) -> bool:
        assert not job.general
        self.begun.append(key)
        self.under_way.append(key)
        return True

    def end(self, outcome: Outcome) -> None:
        (key,) = self.under_way
        self.under_way.clear()
        self.outcomes[key] = outcome


class OfAnyKind(OtherProcess):
    """Also asked for graphs for all sizes."""

    def start(self, key: str, job: Job) -> bool:
        self.begun.append(key)
        self.under_way.append(key)
        return True


class Eager(EagerEngine):
    """The eager engine, as on a device where graphs for one set of sizes are faster."""

    def specialises(self, device: torch.device) -> bool:
        return True

    def to_parts(self, graph: CompiledGraph) -> None:
        """One whose graphs could be kept, which is what another process makes them for."""


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> GraphLibrary:
    monkeypatch.setitem(engines.ENGINES, "eager", Eager())
    store = GraphStore(tmp_path / "cache", Trust(tmp_path / "config"))
    return GraphLibrary(GraphCache(1 << 30), Metrics(), store, OtherProcess())


def begun(library: GraphLibrary) -> list[str]:
    assert isinstance(library.background, OtherProcess)
    return library.background.begun


@pytest.fixture
def image(library: GraphLibrary) -> Callable[..., None]:
    """One sampling run of three calls with ``batch`` rows, equal to eager."""
    module = Net()

    def run(dispatcher: Dispatcher, batch: int = 2) -> None:
        dispatcher.begin_run()
        for _ in range(3):
            x = torch.randn(batch, 4)
            torch.testing.assert_close(dispatcher(module, module.forward, (x,), {}), module(x))
        dispatcher.end_run(module)

    return run


def test_sizes_that_come_often_get_a_graph(library: GraphLibrary, image: Callable[..., None]) -> None:
    dispatcher = Dispatcher("eager", library, HOST)
    for number in range(1, SPECIALISE_AFTER_RUNS + 2):
        image(dispatcher)
        image(dispatcher, batch=2 + number)  # comes once
        assert len(begun(library)) == (number >= SPECIALISE_AFTER_RUNS)


def test_sizes_that_are_wanted_get_one_at_once(library: GraphLibrary, image: Callable[..., None]) -> None:
    dispatcher = Dispatcher(
        "eager",
        library,
        HOST,
        options=Options(specialize=lambda signature: signature.tensors[0].shape[0] == 5),
    )
    image(dispatcher)
    assert not begun(library)
    image(dispatcher, batch=5)
    assert len(begun(library)) == 1
    assert library.metrics.snapshot()["compiled"] == 1, "somebody waited for it"


def test_what_failed_is_not_tried_again(library: GraphLibrary, image: Callable[..., None]) -> None:
    dispatcher = Dispatcher(
        "eager",
        library,
        HOST,
        options=Options(specialize=lambda _signature: True),
    )
    image(dispatcher)
    assert isinstance(library.background, OtherProcess)
    library.background.end(Outcome("the disk is full"))
    for _ in range(3):
        image(dispatcher)
    assert len(begun(library)) == 1


def test_runs_that_reuse_steps_get_one_of_their_own(library: GraphLibrary) -> None:
    dispatcher, module, x = (
        Dispatcher(
            "eager",
            library,
            HOST,
            options=Options(specialize=lambda _signature: True),
        ),
        Net(),
        torch.ones(2),
    )

    def run(step_cache: StepCache | None) -> int:
        dispatcher.begin_run(step_cache)
        dispatcher(module, module.forward, (x,), {})
        return len(begun(library))

    assert run(None) == 1
    assert isinstance(library.background, OtherProcess)
    library.background.end(Outcome("the disk is full"))
    assert [run(None), run(StepCache(0.1)), run(None)] == [1, 2, 2]


def test_the_graph_takes_over_when_it_is_there(library: GraphLibrary, image: Callable[..., None]) -> None:
    dispatcher = Dispatcher(
        "eager",
        library,
        HOST,
        options=Options(specialize=lambda _signature: True),
    )
    image(dispatcher)
    (general,) = dispatcher.graph_keys()
    assert isinstance(library.background, OtherProcess)
    # What the other process would do, done here: the graph is in the library under its call key.
    other = Dispatcher(
        "eager",
        library,
        HOST,
        options=Options(specialize=lambda _signature: True),
    )
    image(other.preparing(exact=True))
    (exact,) = other.graph_keys()
    library.background.end(Outcome(None))
    image(dispatcher)
    assert dispatcher.graph_keys() == [exact] != [general]
    assert library.metrics.snapshot()["specialised"] == 1


@pytest.mark.parametrize("verdict", ["wrong", "slower"])
def test_one_that_is_no_good_is_left_alone(verdict: str, library: GraphLibrary, image: Callable[..., None]) -> None:
    dispatcher = Dispatcher(
        "eager",
        library,
        HOST,
        options=Options(specialize=lambda _signature: True),
    )
    other = Dispatcher(
        "eager",
        library,
        HOST,
        options=Options(specialize=lambda _signature: True),
    )
    image(dispatcher)
    image(other.preparing(exact=True))
    (exact,) = other.graph_keys()
    graph = library.cache.get(exact)
    assert graph is not None
    library.verdicts.retire(exact, "wrong") if verdict == "wrong" else library.verdicts.put_aside(exact)
    library.cache.put(exact, graph)  # whoever asked for it before the verdict
    assert isinstance(library.background, OtherProcess)
    library.background.end(Outcome(None))
    for _ in range(3):
        image(dispatcher)
    assert exact not in dispatcher.graph_keys()
    assert library.metrics.snapshot()["specialised"] == 0
    assert len(begun(library)) == 1


def test_an_engine_that_gains_nothing_is_not_asked(
    library: GraphLibrary, image: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(engines.ENGINES, "eager", EagerEngine())
    dispatcher: Any = Dispatcher("eager", library, HOST)
    for _ in range(SPECIALISE_AFTER_RUNS + 1):
        image(dispatcher)
    assert not begun(library)


LEFT_ALONE = "a graph is made in the background once the first image is there"


def test_a_short_first_image_is_eagers_alone_and_then_a_graph_is_begun_though_nobody_makes_another(
    library: GraphLibrary, image: Callable[..., None]
) -> None:
    library.background = OfAnyKind()
    looked: list[int] = []
    host = dataclasses.replace(HOST, refuse=lambda _layers: looked.append(len(begun(library))))
    dispatcher = Dispatcher(
        "eager",
        library,
        host,
        options=Options(compile="background", compile_delay_s=3600),
    )
    image(dispatcher)
    assert looked == [0], "it is looked for once, and not before the end"
    assert len(begun(library)) == 1
    assert library.metrics.snapshot()["fallbacks"] == {LEFT_ALONE: 3}
    image(dispatcher)
    assert library.metrics.snapshot()["fallbacks"][LEFT_ALONE] == 3
    assert len(begun(library)) == 1


def test_a_long_first_image_is_left_alone_at_its_beginning_only(library: GraphLibrary) -> None:
    library.background = OfAnyKind()
    dispatcher = Dispatcher(
        "eager",
        library,
        HOST,
        options=Options(compile="background", compile_delay_s=0.2),
    )
    module, x = Net(), torch.randn(2, 4)
    dispatcher.begin_run()
    for before, after in ((0, 0), (0, 1)):
        assert len(begun(library)) == before
        torch.testing.assert_close(dispatcher(module, module.forward, (x,), {}), module(x))
        assert len(begun(library)) == after
        time.sleep(0.3)


def test_reading_the_first_weights_from_a_file_is_no_part_of_those_moments(
    library: GraphLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes longer than them, and an image that is short once it is read would have its graph made in the middle.

    Meanwhile, and once, a compiler is imported.
    """
    library.background, prepared = OfAnyKind(), list[str]()
    monkeypatch.setattr(EagerEngine, "prepare", lambda engine: prepared.append(engine.name))
    dispatcher = Dispatcher("eager", library, HOST, options=Options(compile="background", compile_delay_s=0.2))
    module, x = Net(), torch.randn(2, 4)
    dispatcher.begin_run()
    for is_first, makes in ((True, 0), (True, 0), (False, 0), (True, 1)):  # the last is another model's
        outcome = dispatcher.attempt(Invocation(module, module.forward, (x,), {}, is_first=is_first))
        assert not isinstance(outcome, Output)
        assert len(begun(library)) == makes
        time.sleep(0.3)
        assert prepared == ["eager"]


def test_nothing_is_imported_for_an_engine_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = list[str]()
    monkeypatch.setattr(InductorEngine, "prepare", lambda engine: prepared.append(engine.name))
    for reason, expected in (("no Triton", []), (None, ["inductor", "inductor"])):
        monkeypatch.setattr(InductorEngine, "unavailable", lambda _engine, _device, why=reason: why)
        for name in ("inductor", "auto"):
            engines.prepare(name)
        for thread in threading.enumerate():
            if thread.name == "onediff-prepare":
                thread.join()
        assert prepared == expected


def test_no_tensor_of_an_image_is_kept_for_what_is_put_off(library: GraphLibrary) -> None:
    library.background = OfAnyKind()
    dispatcher = Dispatcher(
        "eager",
        library,
        HOST,
        options=Options(compile="background", compile_delay_s=3600),
    )
    module, x = Net(), torch.randn(2, 4)
    dispatcher.begin_run()
    dispatcher(module, module.forward, (x,), {})
    kept = weakref.ref(x)
    del x
    gc.collect()
    assert kept() is None
    assert not begun(library)
    dispatcher.end_run(module)
    assert len(begun(library)) == 1


@pytest.mark.parametrize("case", ["graphs are in memory", "there is no other process", "somebody waits"])
def test_what_need_not_be_put_off_is_not(library: GraphLibrary, case: str) -> None:
    module, x = Net(), torch.randn(2, 4)
    if case == "graphs are in memory":  # the node runs anew after every change, and its model's graph is there
        Dispatcher("eager", library, HOST)(module, module.forward, (x,), {})
    elif case == "there is no other process":
        library.background = None
    dispatcher = Dispatcher(
        "eager",
        library,
        HOST,
        options=Options(compile="background", compile_delay_s=3600),
    )
    before = library.metrics.snapshot()["served"]
    serve = dispatcher.preparing() if case == "somebody waits" else dispatcher
    torch.testing.assert_close(serve(module, module.forward, (x,), {}), module(x))
    assert library.metrics.snapshot()["served"] == before + 1


def test_while_a_graph_is_on_its_way_calls_do_no_more_than_ask_how_far_it_is(
    library: GraphLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager is bound by one CPU thread on fast GPUs: every millisecond that we take there is a slower image."""
    now = [1000.0]
    monkeypatch.setattr(pending, "time", SimpleNamespace(monotonic=lambda: now[0]))
    library.background = OfAnyKind()
    shown, looked = list[str](), list[int]()
    host = dataclasses.replace(HOST, refuse=lambda _layers: looked.append(1))
    dispatcher = Dispatcher(
        "eager",
        library,
        host,
        shown.append,
        options=Options(compile="background"),
    )
    module, x = Net(), torch.randn(2, 4)
    dispatcher(module, module.forward, (x,), {})
    assert looked, "it is not noticed here when a call is looked at"
    looked.clear()
    for _ in range(5):
        torch.testing.assert_close(dispatcher(module, module.forward, (x,), {}), module(x))
    assert not looked
    assert len(library.background.begun) == 1
    assert [text for text in shown if text.startswith("compiling in the background")] == shown[:1]
    assert library.metrics.snapshot()["fallbacks"] == {"a graph is being compiled in the background": 6}
    now[0] += 1.1
    dispatcher(module, module.forward, (x,), {})
    assert [text for text in shown if text.startswith("compiling in the background")] == [shown[0], shown[-1]]


def test_eager_runs_as_if_nothing_had_been_refused(library: GraphLibrary) -> None:
    """Inside an except block every attribute that a module finds in its ``__getattr__`` costs a fifth more."""
    handled: list[BaseException | None] = []

    class Odd(Net):
        def forward(self, x: torch.Tensor, odd: object = None) -> torch.Tensor:
            handled.append(sys.exception() if sys.version_info >= (3, 11) else sys.exc_info()[1])
            return torch.tanh(x)

    module = Odd()
    dispatcher = Dispatcher("eager", library, HOST)
    dispatcher(module, module.forward, (torch.randn(2, 4), object()), {})
    assert handled == [None]
    assert list(library.metrics.snapshot()["fallbacks"]) == ["argument odd holds a object, which no graph can take"]


class SlowWhenExact(Eager):
    """A compiler that is worse at a graph for one set of sizes."""

    def compile(self, capture: Capture) -> CompiledGraph:
        graph = super().compile(capture)
        return graph if capture.shapes.general else _Slow(graph)


class SlowWhenGeneral(Eager):
    """A compiler that is better at it, as most are."""

    def compile(self, capture: Capture) -> CompiledGraph:
        graph = super().compile(capture)
        return _Slow(graph) if capture.shapes.general else graph


class _Slow(CompiledGraph):
    def __init__(self, inner: CompiledGraph) -> None:
        super().__init__(inner.binding, inner.shapes)
        self.inner = inner

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes

    def __call__(self, weights: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        time.sleep(0.02)
        return self.inner(weights, tensors)


@pytest.mark.parametrize(("engine", "stays"), [(SlowWhenGeneral, True), (SlowWhenExact, False)])
def test_a_graph_that_turns_out_slower_gives_way_again(
    engine: type[Eager], stays: bool, library: GraphLibrary, image: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(engines.ENGINES, "eager", engine())
    dispatcher = Dispatcher(
        "eager",
        library,
        HOST,
        options=Options(specialize=lambda _signature: True),
    )
    image(dispatcher)
    (general,) = dispatcher.graph_keys()
    other = Dispatcher(
        "eager",
        library,
        HOST,
        options=Options(specialize=lambda _signature: True),
    )
    image(other.preparing(exact=True))
    (exact,) = other.graph_keys()
    assert isinstance(library.background, OtherProcess)
    library.background.end(Outcome(None))
    image(dispatcher)
    assert dispatcher.graph_keys() == [exact]
    graph = library.cache.get(exact)
    assert graph is not None
    for _ in range(6):
        image(dispatcher)
    assert dispatcher.graph_keys() == [exact if stays else general]
    assert library.verdicts.useful(exact) is stays
    library.cache.put(exact, graph)  # whoever asked for it before
    again = Dispatcher("eager", library, HOST)  # asks the store, as a later process does
    image(again)
    assert again.graph_keys() == [exact if stays else general]


def test_where_it_cannot_be_done_in_the_background_nobody_waits(library: GraphLibrary) -> None:
    """To compile it here after all would be what was not chosen."""

    class Failing(OtherProcess):
        def start(self, key: str, job: Job) -> bool:
            self.begun.append(key)
            self.outcomes[key] = Outcome("another process sees other code")
            return True

    library.background = Failing()
    module, x, shown = Net(), torch.randn(2, 4), list[str]()
    dispatcher = Dispatcher(
        "eager",
        library,
        HOST,
        shown.append,
        options=Options(compile="background"),
    )
    for _ in range(4):
        torch.testing.assert_close(dispatcher(module, module.forward, (x,), {}), module(x))
    snapshot = library.metrics.snapshot()
    assert (snapshot["captured"], snapshot["compiled"], snapshot["served"]) == (0, 0, 0)
    reason = "it cannot be compiled in the background (another process sees other code); choose compile: wait"
    assert snapshot["fallbacks"][reason] >= 1
    assert shown[-1] == f"not accelerated: {reason}"


def test_what_is_called_with_copies_of_its_tensors_is_compiled_in_another_process_too(library: GraphLibrary) -> None:
    """As text encoders are, whose layers write to their input."""
    jobs: list[Job] = []

    class Kept(OfAnyKind):
        def start(self, key: str, job: Job) -> bool:
            jobs.append(job)
            return super().start(key, job)

    library.background = Kept()
    module, x = Net(), torch.randn(2, 4)
    dispatcher = Dispatcher("eager", library, HOST, options=Options(compile="background"))
    for forward in (OnCopies(module.forward), module.forward):
        torch.testing.assert_close(dispatcher(module, forward, (x,), {}), module(x))
    assert [(job.forward, job.on_copies) for job in jobs] == [("forward", True)]


def test_an_engine_whose_graphs_are_not_kept_starts_no_other_process(
    library: GraphLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing would come of it, time and again."""
    monkeypatch.setitem(engines.ENGINES, "eager", EagerEngine())
    dispatcher, module, x = (
        Dispatcher(
            "eager",
            library,
            HOST,
            options=Options(compile="background"),
        ),
        Net(),
        torch.randn(2, 4),
    )
    for _ in range(3):
        torch.testing.assert_close(dispatcher(module, module.forward, (x,), {}), module(x))
    assert not begun(library)
    assert "graphs of the eager engine are not kept in files" in next(iter(library.metrics.snapshot()["fallbacks"]))


class RefusedThere(OfAnyKind):
    """Another process that sees other code, and says so."""

    def start(self, key: str, job: Job) -> bool:
        super().start(key, job)
        self.end(Outcome("another process sees other code"))
        return True


@pytest.mark.parametrize("case", ["nobody keeps its graphs", "another process refuses"])
def test_by_default_what_no_other_process_can_make_is_made_here(
    library: GraphLibrary, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    library.background = RefusedThere()
    if case == "nobody keeps its graphs":
        monkeypatch.setitem(engines.ENGINES, "eager", EagerEngine())
    dispatcher = Dispatcher("eager", library, HOST, options=Options(compile="auto"))
    module, x = Net(), torch.randn(2, 4)
    for _ in range(3):
        torch.testing.assert_close(dispatcher(module, module.forward, (x,), {}), module(x))
    begun_there = [] if case == "nobody keeps its graphs" else [1]
    assert len(begun(library)) == len(begun_there)
    snapshot = library.metrics.snapshot()
    assert (snapshot["compiled"], snapshot["served"] + len(begun_there)) == (1, 3)


def test_by_default_nothing_is_made_here_at_the_end_of_a_first_image(
    library: GraphLibrary, monkeypatch: pytest.MonkeyPatch, image: Callable[..., None]
) -> None:
    """Its picture would come that much later. The next image waits for it."""
    monkeypatch.setitem(engines.ENGINES, "eager", EagerEngine())
    library.background = OfAnyKind()
    dispatcher = Dispatcher("eager", library, HOST, options=Options(compile="auto", compile_delay_s=3600))
    image(dispatcher)
    assert library.metrics.snapshot()["compiled"] == 0
    image(dispatcher)
    snapshot = library.metrics.snapshot()
    assert (snapshot["compiled"], snapshot["served"], len(begun(library))) == (1, 3, 0)


def test_by_default_another_process_makes_what_it_can(library: GraphLibrary) -> None:
    library.background = OfAnyKind()
    dispatcher = Dispatcher("eager", library, HOST, options=Options(compile="auto"))
    module, x = Net(), torch.randn(2, 4)
    for _ in range(3):
        torch.testing.assert_close(dispatcher(module, module.forward, (x,), {}), module(x))
    assert (len(begun(library)), library.metrics.snapshot()["compiled"]) == (1, 0)


def test_by_default_nothing_is_made_here_that_ended_another_process(library: GraphLibrary) -> None:
    """For want of memory, most often; the server would be next."""
    library.background = OfAnyKind()
    dispatcher = Dispatcher("eager", library, HOST, options=Options(compile="auto"))
    module, x = Net(), torch.randn(2, 4)
    dispatcher(module, module.forward, (x,), {})
    library.background.end(Outcome(KILLED, died=True))
    for _ in range(3):
        torch.testing.assert_close(dispatcher(module, module.forward, (x,), {}), module(x))
    assert library.metrics.snapshot()["compiled"] == 0


@pytest.mark.parametrize("mode", ["background", "auto"])
def test_a_graph_that_was_cleared_before_anybody_looked_for_it_is_made_again_once(
    mode: str, library: GraphLibrary
) -> None:
    """That says nothing of graphs for all sizes. Where it is gone each time, the node says so."""
    library.background, module, shown = OfAnyKind(), Net(), list[str]()
    dispatcher = Dispatcher("eager", library, HOST, shown.append, options=Options(compile=mode))

    def image() -> None:
        dispatcher.begin_run()
        dispatcher(module, module.forward, (torch.randn(3, 4),), {})
        dispatcher.end_run(module)

    image()
    for begun in (2, 2):
        library.background.end(Outcome(None, graph="k" * 64))
        image()
        assert len(library.background.begun) == begun
        assert len(set(library.background.begun)) == 1, "another graph, for these sizes alone, is made"
        if not library.background.under_way:
            break
    assert "its graph is not in the cache folder" in shown[-1]


class Slow(Keeping):
    """Loads its graphs in a third of a second."""

    def from_parts(self, *parts: Any) -> CompiledGraph:
        time.sleep(0.3)
        return super().from_parts(*parts)


@pytest.mark.parametrize("choice", ["auto", "background"])
def test_a_call_waits_for_a_graph_that_is_there_to_be_loaded(
    choice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager beside it would take longer than both, one after the other."""
    monkeypatch.setitem(engines.ENGINES, "eager", Slow())
    store, module, x = GraphStore(tmp_path / "cache", Trust(tmp_path / "config")), Net(), torch.randn(2, 4)
    Dispatcher("eager", GraphLibrary(GraphCache(1 << 30), Metrics(), store), HOST)(module, module.forward, (x,), {})
    library = GraphLibrary(GraphCache(1 << 30), Metrics(), store, OfAnyKind())
    dispatcher = Dispatcher("eager", library, HOST, options=Options(compile=choice))
    torch.testing.assert_close(dispatcher(module, module.forward, (x,), {}), module(x))
    found = library.metrics.snapshot()
    assert (found["served"], found["loaded"], found["compiled"], found["fallbacks"]) == (1, 1, 0, {})
    assert not begun(library)


KILLED = "the compiling process was killed, as happens when memory is short (oh dear)"


@pytest.mark.parametrize(("deaths", "outcome"), [(1, Outcome(None)), (2, Outcome(KILLED, died=True))])
def test_a_process_that_dies_is_started_once_more(
    deaths: int, outcome: Outcome, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tries = tmp_path / "tries"
    tries.touch()
    (tmp_path / "dying_worker.py").write_text(
        "import json, os, pathlib, signal, sys\n"
        f"tries = pathlib.Path({str(tries)!r})\n"
        "tries.write_text(tries.read_text() + 'x')\n"
        f"if len(tries.read_text()) <= {deaths}:\n"
        "    print('oh dear', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "pathlib.Path(sys.argv[2]).write_text(json.dumps({'failure': None}))\n"
    )
    background = Background("dying_worker", lambda: [str(tmp_path)])
    assert ended(background) == outcome
    assert len(tries.read_text()) == 2
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
        f"OneDiff: {KILLED}; it is started once more",
        f"OneDiff: {KILLED}",
    ][:deaths]


def ended(background: Background) -> Outcome | None:
    """Have a worker run, and return how that ended."""
    assert background.start("key", Job(b"", "forward", False, "", {}, {}, "cpu", True, {}))
    for thread in threading.enumerate():
        if thread.name == "onediff-background":
            thread.join(60)
    assert not background.start("key", Job(b"", "forward", False, "", {}, {}, "cpu", True, {})), "it is not done twice"
    return background.outcome("key")


def test_a_process_that_is_killed_while_it_writes_its_result_has_died(tmp_path: Path) -> None:
    (tmp_path / "cut_off_worker.py").write_text(
        "import os, pathlib, signal, sys\n"
        "pathlib.Path(sys.argv[2]).write_text('{\"failure\": nu')\n"
        "print('oh dear', flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert ended(Background("cut_off_worker", lambda: [str(tmp_path)])) == Outcome(KILLED, died=True)


def test_a_process_is_started_without_what_a_job_of_this_one_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would keep its code in a folder that goes with that job, and that anybody can make anew."""
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "chosen"))
    (tmp_path / "telling_worker.py").write_text(
        "import json, os, pathlib, sys\n"
        "told = [os.environ.get(name) for name in ('TORCHINDUCTOR_CACHE_DIR', 'TRITON_CACHE_DIR')]\n"
        "pathlib.Path(sys.argv[2]).write_text(json.dumps({'failure': repr(told)}))\n"
    )
    with in_new_code_folder():
        outcome = ended(Background("telling_worker", lambda: [str(tmp_path)]))
    assert outcome == Outcome(repr([str(tmp_path / "chosen"), None]))


def test_a_process_that_died_twice_says_nothing_of_graphs_for_all_sizes(library: GraphLibrary) -> None:
    """Its reason is on the node, no graph for one set of sizes is begun instead, and the next node tries again."""
    library.background = OfAnyKind()
    module, shown = Net(), list[str]()

    def image(dispatcher: Dispatcher) -> None:
        dispatcher.begin_run()
        x = torch.randn(2, 4)
        torch.testing.assert_close(dispatcher(module, module.forward, (x,), {}), module(x))
        dispatcher.end_run(module)

    dispatcher = Dispatcher(
        "eager",
        library,
        HOST,
        shown.append,
        options=Options(compile="background"),
    )
    image(dispatcher)
    library.background.end(Outcome(KILLED, died=True))
    for _ in range(3):
        image(dispatcher)
    assert len(library.background.begun) == 1
    assert shown[-1] == (f"not accelerated: it cannot be compiled in the background ({KILLED}); choose compile: wait")
    image(
        Dispatcher(
            "eager",
            library,
            HOST,
            options=Options(compile="background"),
        )
    )
    first, second = library.background.begun
    assert first == second, "the same job, for all sizes"


def test_the_wait_for_the_first_image_is_over_once_however_many_nodes_come_and_go(library: GraphLibrary) -> None:
    """A node that is bypassed and back is another dispatcher; nobody would ever compile for one that waits anew."""
    library.background = OfAnyKind()
    module, x = Net(), torch.randn(2, 4)
    for _ in range(3):
        dispatcher = Dispatcher(
            "eager",
            library,
            HOST,
            options=Options(compile="background", compile_delay_s=0.5),
        )
        dispatcher.begin_run()
        dispatcher(module, module.forward, (x,), {})  # and the person stops the run
        time.sleep(0.3)
    assert len(library.background.begun) == 1
