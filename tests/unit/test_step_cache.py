"""runtime/step_cache.py: which steps are computed, and that runs, streams and processes keep apart."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recompiling import Recompiling
from steps import Transformer, transformer_call
from torch import nn

from onediff_comfy import engines
from onediff_comfy.cache.call_index import CallIndex
from onediff_comfy.cache.memory import GraphCache
from onediff_comfy.capture.fingerprint.code_ownership import HostCode
from onediff_comfy.capture.target.target import Target
from onediff_comfy.compilation.compile_graph import HostServices
from onediff_comfy.compilation.library import GraphLibrary
from onediff_comfy.engines.base import CompiledGraph
from onediff_comfy.metrics import Metrics
from onediff_comfy.runtime.step_cache import Features, ReusableGraph, StepCache, change
from onediff_comfy.serving.dispatcher import Dispatcher
from onediff_comfy.store.store import GraphStore
from onediff_comfy.store.trust import Trust

_HARDLY = 1e-5
"""By how much a first block's result changes that hardly does: what does not at all has not seen the step."""


class Scripted(ReusableGraph):
    """Answers with the number of the whole call that the answer rests on; its early result is the call's tensor."""

    def __init__(self) -> None:
        self.whole_calls = self.calls = 0

    def compute(self, weights: Any, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Features]:
        self.whole_calls += 1
        number = torch.tensor(float(self.whole_calls))
        return [number], Features(tensors[0], number)

    def reuse(
        self, weights: Any, tensors: Sequence[torch.Tensor], features: Features
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        return [features.deep], tensors[0]


def steps_of(threshold: float, early: Sequence[float], streams: Sequence[str] = ("positive",)) -> str:
    """Which steps were computed (C) and which reused (r), for a first block whose result is ``early``."""
    graph, cache, done = Scripted(), StepCache(threshold), ""
    for value in early:
        kinds = set()
        cache.begin_step()
        for stream in streams:
            before = graph.whole_calls
            cache.call(graph, stream, [], [torch.tensor([value])], cache.reuses(stream))
            kinds.add("C" if graph.whole_calls > before else "r")
        assert len(kinds) == 1  # all streams of a step are treated alike
        done += kinds.pop()
    assert cache.calls == len(early) * len(streams)
    assert cache.reused == done.count("r") * len(streams)
    return done


def growing(rate: float, steps: int = 10) -> list[float]:
    return [(1 + rate) ** step for step in range(steps)]


def test_as_many_steps_are_reused_as_the_expected_change_allows() -> None:
    # 2% a step: the change is first known in the fourth step; 2 steps are 4%, 3 would be 6%.
    assert steps_of(0.05, growing(0.02)) == "CCCrrCrrCr"
    assert steps_of(0.03, growing(0.02)) == "CCCrCrCrCr"
    assert steps_of(0.01, growing(0.02)) == "CCCCCCCCCC"


def test_what_hardly_changes_is_computed_three_times() -> None:
    assert steps_of(0.01, growing(_HARDLY)) == "CCCrrrrrrr"


def test_a_first_block_that_does_not_see_the_step_says_nothing() -> None:
    assert steps_of(0.01, [1.0] * 10) == "CCCCCCCCCC"


def test_a_sudden_change_is_answered_as_soon_as_it_is_known() -> None:
    values = [*growing(_HARDLY, 6), 2.0, 2.0, 2.0, 2.0]
    assert steps_of(0.1, values) == "CCCrrrrrCC"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_result_that_is_no_number_reuses_nothing_afterwards(bad: float) -> None:
    assert steps_of(1.0, [1.0, 1.0, 1.0, bad, bad, bad, bad])[-2:] == "CC"


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=30))
def test_at_zero_every_step_is_computed(early: list[float]) -> None:
    assert set(steps_of(0.0, early)) == {"C"}


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=30), st.floats(0.01, 1.0))
def test_streams_of_one_step_are_treated_alike(early: list[float], threshold: float) -> None:
    alone = steps_of(threshold, early)
    assert steps_of(threshold, early, ("positive", "negative", "another")) == alone
    assert alone[:3] == "C" * len(alone[:3])


def test_the_first_stream_of_a_step_decides_for_all() -> None:
    graph, cache, computed = Scripted(), StepCache(0.05), ""
    for step, value in enumerate(growing(0.02)):
        before = graph.whole_calls
        cache.begin_step()
        for stream, early in (("positive", value), ("negative", 100.0 * (-1) ** step)):
            cache.call(graph, stream, [], [torch.tensor([early])], cache.reuses(stream))
        computed += {0: "r", 2: "C"}[graph.whole_calls - before]
    assert computed == steps_of(0.05, growing(0.02))


def a_step_of(cache: StepCache, graph: Scripted, *streams: Hashable, early: float = 1.0) -> str:
    """Which of the calls of one step were computed (C) and which reused (r)."""
    cache.begin_step()
    return "".join(a_call_of(cache, graph, stream, early) for stream in streams)


def a_call_of(cache: StepCache, graph: Scripted, stream: Hashable, early: float = 1.0) -> str:
    before = graph.whole_calls
    graph.calls += 1
    early *= (1 + _HARDLY) ** graph.calls
    cache.call(graph, stream, [], [torch.tensor([early])], cache.reuses(stream))
    return "C" if graph.whole_calls > before else "r"


def test_nothing_is_kept_once_the_run_is_over() -> None:
    graph, cache = Scripted(), StepCache(0.5)
    for _ in range(4):
        a_step_of(cache, graph, "positive")
    assert cache.features("positive") is not None
    cache.forget()
    assert cache.features("positive") is None
    assert a_step_of(cache, graph, "positive") == "C"


def test_a_stream_that_joins_late_is_computed_though_the_others_are_not() -> None:
    graph, cache = Scripted(), StepCache(0.5)
    assert [a_step_of(cache, graph, "positive") for _ in range(4)] == ["C", "C", "C", "r"]
    assert a_step_of(cache, graph, "positive", "area") == "rC"
    assert a_step_of(cache, graph, "positive", "area") == "rr"


def test_an_exact_call_is_computed_and_serves_later_ones() -> None:
    graph, cache = Scripted(), StepCache(0.5)
    for _ in range(3):
        a_step_of(cache, graph, None)
    cache.begin_step()
    assert cache.reuses(None)
    (answer,) = cache.call(graph, None, [], [torch.ones(1)], reuse=False)
    assert answer == 4
    cache.begin_step()
    (answer,) = cache.call(graph, None, [], [torch.ones(1)], cache.reuses(None))
    assert answer == 4


def test_without_a_word_of_when_a_step_begins_nothing_is_reused() -> None:
    graph, cache = Scripted(), StepCache(1.0)
    assert {a_call_of(cache, graph, "positive") for _ in range(6)} == {"C"}
    assert cache.features("positive") is None
    assert cache.others == {"the sampler does not say when a step begins": 6}


def test_what_was_found_is_as_old_as_the_steps_since() -> None:
    """A window of a long video that is left for some steps, and comes back."""
    graph, cache = Scripted(), StepCache(0.025)  # at 1%, two steps
    done = [a_step_of(cache, graph, stream, early=1.01**step) for step, stream in enumerate("AAAABBBBBBBBA")]
    assert "".join(done) == "CCCrCCrrCrrCC"


def test_what_is_older_than_the_step_that_was_computed_last_is_gone() -> None:
    graph, cache = Scripted(), StepCache(0.015)  # every other step, at 1%
    steps = [("A", "B"), ("A", "B"), ("A", "B"), ("A",), ("A",), ("A", "B"), ("A", "B")]
    assert [a_step_of(cache, graph, *streams, early=1.01**step) for step, streams in enumerate(steps)] == [
        *("CC", "CC", "CC", "r", "C"),
        "rC",  # A's are of the step before, B's of three before
        "CC",
    ]


def test_a_step_that_another_cache_leaves_out_counts() -> None:
    """EasyCache answers some steps itself; the first block moves on meanwhile."""
    graph, cache = Scripted(), StepCache(0.025)  # at 1%, two steps
    called = [True, True, True, False, True, True, True, False, False, True]
    done = [a_step_of(cache, graph, *["A"] * there, early=1.01**step) for step, there in enumerate(called)]
    assert done == ["C", "C", "C", "", "r", "C", "r", "", "", "C"]


def test_a_prompt_with_several_calls_in_a_step_stops_it_for_all() -> None:
    """Tiles: what was found for one is not for another. With the other prompt alone reused, guidance would be off."""
    graph, cache = Scripted(), StepCache(1.0)
    for _ in range(5):
        assert a_step_of(cache, graph, "negative", *["positive"] * 3) == "CCCC"
    assert (cache.calls, cache.reused) == (20, 0)
    assert cache.others == {"the model is called several times for one prompt in a step": 18}


def test_several_calls_for_a_prompt_may_begin_late() -> None:
    graph, cache = Scripted(), StepCache(1.0)
    done = [a_step_of(cache, graph, *["positive"] * calls) for calls in (1, 1, 1, 1, 2, 1, 1)]
    assert done == ["C", "C", "C", "r", "rC", "C", "C"]
    assert cache.features("positive") is None


class OnDevice(torch.Tensor):
    """A tensor whose device is waited for when its number is asked for.

    Attributes:
        wait: called before the number is there.
    """

    wait: Callable[[], object] = staticmethod(lambda: None)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("__float__", "item", "tolist"):
            OnDevice.wait()
        return super().__torch_function__(func, types, args, kwargs or {})


class ScriptedOnDevice(Scripted):
    """Its early results are such tensors."""

    def compute(self, weights: Any, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Features]:
        return super().compute(weights, [tensor.as_subclass(OnDevice) for tensor in tensors])

    def reuse(
        self, weights: Any, tensors: Sequence[torch.Tensor], features: Features
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        return super().reuse(weights, [tensor.as_subclass(OnDevice) for tensor in tensors], features)


def test_the_device_is_not_waited_for_before_a_call_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the CPU does before a call, it does while the device is at work."""
    graph, cache = ScriptedOnDevice(), StepCache(0.5)
    for _ in range(5):
        a_step_of(cache, graph, "positive")
    asked: list[int] = []
    monkeypatch.setattr(OnDevice, "wait", lambda: asked.append(1))
    cache.begin_step()
    assert asked == []
    assert cache.reuses("positive")
    assert asked == [1]
    cache.reuses("negative")
    assert asked == [1], "once a step is enough"


def test_of_two_threads_in_a_step_neither_goes_by_the_step_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a run over two GPUs each has a thread; one waits for what was measured while the other asks."""
    graph, cache = ScriptedOnDevice(), StepCache(0.5)
    for _ in range(3):
        assert a_step_of(cache, graph, "positive", "negative") == "CC"
    waiting = threading.Event()
    monkeypatch.setattr(OnDevice, "wait", lambda: (waiting.set(), time.sleep(0.1)))
    cache.begin_step()
    answers = dict[str, bool]()
    first = threading.Thread(target=lambda: answers.update(positive=cache.reuses("positive")))
    first.start()
    assert waiting.wait(10)
    answers["negative"] = cache.reuses("negative")
    first.join()
    assert answers == {"positive": True, "negative": True}


def test_a_first_answer_that_is_thrown_away_leaves_nothing() -> None:
    graph, cache = Scripted(), StepCache(0.5)
    cache.begin_step()
    a_call_of(cache, graph, "positive", early=100.0)
    cache.start_over()
    assert cache.features("positive") is None
    assert [a_call_of(cache, graph, "positive"), *(a_step_of(cache, graph, "positive") for _ in range(5))] == [
        *"CCCrrr"
    ]
    assert (cache.calls, cache.reused, cache.others) == (6, 3, {})


def test_a_run_that_is_refused_from_the_start_is_computed_with_the_first_reason() -> None:
    graph, cache = Scripted(), StepCache(1.0)
    cache.refuse("keyframes")
    cache.refuse("another")
    assert [a_step_of(cache, graph, "positive") for _ in range(6)] == ["C"] * 6
    assert cache.features("positive") is None
    assert (cache.calls, cache.others) == (6, {"keyframes": 6})


def test_a_change_is_relative_and_taken_in_float32() -> None:
    before = torch.tensor([1e-4, -3e-4], dtype=torch.float16)
    assert float(change(before * 1.5, before)) == pytest.approx(0.5, rel=1e-2)
    large = torch.full((70000,), 1.0, dtype=torch.float16)  # whose sum float16 does not hold
    assert float(change(large * 2, large)) == pytest.approx(1.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_change_is_that_of_the_means(dtype: torch.dtype) -> None:
    before, now = torch.randn(3, 5, 7).to(dtype), torch.randn(3, 5, 7).to(dtype)
    expected = (now.double() - before.double()).abs().mean() / before.double().abs().mean()
    assert float(change(now, before)) == pytest.approx(float(expected), rel=1e-2)


# -- in a dispatcher ---------------------------------------------------------------------------


def library_in(folder: Path) -> GraphLibrary:
    return GraphLibrary(GraphCache(1 << 30), Metrics(), GraphStore(folder / "store", Trust(folder / "config")))


class Sampled:
    """A dispatcher over a model that runs of several steps are made with."""

    def __init__(
        self, library: GraphLibrary, engine: str = "eager", module: nn.Module | None = None, **host: Any
    ) -> None:
        self.library, self.module = library, module if module is not None else Transformer()
        services = HostServices("host 1", "options", {}, lambda: None, lambda _layers: None, **host)
        self.dispatcher = Dispatcher(engine, library, services)

    def run(
        self, threshold: float | StepCache | None, seed: int = 0, steps: int = 8, calls: int = 1
    ) -> tuple[float, int]:
        """The largest relative error of a call, and how many were reused.

        Args:
            calls: in a step.
        """
        x, timestep, context = transformer_call_of(seed)
        step_cache = StepCache(threshold) if isinstance(threshold, float) else threshold
        self.dispatcher.begin_run(step_cache)
        worst = 0.0
        for number in range(steps * calls):
            step, of_step = divmod(number, calls)
            if not of_step:
                self.dispatcher.begin_step()
            call = x * (1 + 0.001 * step), timestep, context
            with torch.no_grad():
                expected = self.module(*call)
                actual = self.dispatcher(self.module, self.module.forward, call, {})
            worst = max(worst, float((actual - expected).norm() / expected.norm()))
        self.dispatcher.end_run(self.module)
        return worst, step_cache.reused if step_cache is not None else 0

    @property
    def counts(self) -> dict[str, int]:
        return {name: n for name, n in self.library.metrics.snapshot().items() if isinstance(n, int) and n}


def transformer_call_of(seed: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(seed)
    return transformer_call()


@pytest.mark.parametrize("engine", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_runs_with_and_without_it_have_graphs_of_their_own_and_a_new_process_loads_both(
    tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(engines.ENGINES, "eager", Recompiling())  # whose graphs are kept
    sampled = Sampled(library_in(tmp_path), engine)
    exact, _ = sampled.run(None)
    assert exact < 1e-5
    off, reused = sampled.run(1e-9)
    assert (off < 1e-5, reused) == (True, 0)
    lossy, reused = sampled.run(0.1)
    assert reused == 5 and 1e-5 < lossy < 0.1
    assert sampled.run(None) == (exact, 0)
    assert sampled.counts == {"captured": 2, "compiled": 2, "proved": 2, "served": 32, "reused": 5}
    assert sampled.library.metrics.snapshot()["fallbacks"] == {}

    other = Sampled(library_in(tmp_path), engine)
    other.module.load_state_dict(sampled.module.state_dict())
    assert other.run(0.1)[1] == 5
    assert other.run(None)[0] < 1e-5
    assert other.counts == {"loaded": 2, "served": 16, "reused": 5}


def test_going_to_and_fro_looks_for_nothing_and_both_graphs_can_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled = Sampled(library_in(tmp_path), "eager")
    sampled.run(None)
    sampled.run(0.5)
    assert len(sampled.dispatcher.graph_keys()) == 2
    monkeypatch.setattr(CallIndex, "candidates", lambda *_: pytest.fail("looked for a graph"))
    assert sampled.run(None)[1] == 0
    assert sampled.run(0.5)[1] == 5
    named = [graph["what"] for graph in sampled.library.metrics.graphs()]
    assert named == ["Transformer all sizes", "Transformer all sizes, step cache"]


def test_nothing_of_a_run_is_left_for_the_next(tmp_path: Path) -> None:
    sampled = Sampled(library_in(tmp_path), "eager")
    assert sampled.run(0.5, seed=1)[1] == sampled.run(0.5, seed=2)[1] == 5


@pytest.mark.parametrize("changed", [False, True])
def test_a_model_is_looked_at_while_the_first_step_is_computed(
    tmp_path: Path, changed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And if it is another one than before, what was computed meanwhile is thrown away, features included.

    So it is of the host's code. What an extension's code reads is looked at before each call.
    """
    sampled = Sampled(library_in(tmp_path), "eager", code=HostCode(Transformer.__module__))
    sampled.module.factors = [1.0]
    for _ in range(2):
        assert sampled.run(0.5)[1] == 5
    monkeypatch.setattr(CompiledGraph, "returns_early", lambda _graph, _device: True)
    events: list[str] = []
    is_current, compute = Target.is_current, ReusableGraph.compute
    monkeypatch.setattr(Target, "is_current", lambda target: (events.append("looked"), is_current(target))[1])
    monkeypatch.setattr(ReusableGraph, "compute", lambda *args: (events.append("computed"), compute(*args))[1])
    if changed:
        sampled.module.factors[0] = 2.0  # in the same list
    worst, reused = sampled.run(0.5)
    assert events[:2] == ["computed", "looked"]
    assert worst < 0.1 and reused == 5
    assert events.count("computed") == (4 if changed else 3)  # one is thrown away
    assert sampled.library.metrics.snapshot()["fallbacks"] == {}


def test_calls_for_other_prompts_are_streams_of_their_own(tmp_path: Path) -> None:
    prompts = iter("abababababababab")
    sampled = Sampled(library_in(tmp_path), "eager", stream=lambda _options: next(prompts))
    assert sampled.run(0.5, calls=2)[1] == 10  # 5 of 8 steps, for both


def test_areas_of_other_sizes_are_streams_of_their_own(tmp_path: Path) -> None:
    sampled, step_cache = Sampled(library_in(tmp_path), "eager"), StepCache(0.5)
    sampled.dispatcher.begin_run(step_cache)
    areas = [transformer_call(), transformer_call(height=16, width=4)]
    for step in range(8):
        sampled.dispatcher.begin_step()
        for area in [(x * (1 + step * _HARDLY / 10), *others) for x, *others in areas]:
            with torch.no_grad():
                actual, expected = (
                    sampled.dispatcher(sampled.module, sampled.module.forward, area, {}),
                    sampled.module(*area),
                )
            torch.testing.assert_close(actual, expected)  # hardly anything changes, so what is reused is right
    assert step_cache.reused == 10


def test_a_model_that_cannot_be_cut_is_served_as_without_it(tmp_path: Path) -> None:
    sampled = Sampled(library_in(tmp_path), "eager", module=Transformer(1))
    step_cache = StepCache(1.0)
    assert sampled.run(step_cache)[0] < 1e-5
    assert (step_cache.calls, step_cache.reused) == (0, 0)
    assert step_cache.others == {"this model has no blocks that could be left out": 8}
    assert sampled.counts["served"] == 8


@pytest.fixture
def _wrong_when_brief(monkeypatch: pytest.MonkeyPatch) -> None:
    reuse = ReusableGraph.reuse

    def off(graph: ReusableGraph, *arguments: Any) -> Any:
        outputs, early = reuse(graph, *arguments)
        return [output * 1.01 for output in outputs], early

    monkeypatch.setattr(ReusableGraph, "reuse", off)


@pytest.mark.usefixtures("_wrong_when_brief")
def test_a_brief_graph_that_is_wrong_leaves_the_model_whole(tmp_path: Path) -> None:
    sampled = Sampled(library_in(tmp_path), "eager")
    worst, reused = sampled.run(0.5)
    assert (worst, reused) == (0.0, 0)
    assert sampled.counts["compiled"] == 2 and sampled.counts["served"] == 7  # the second, which is not cut, serves
    step_cache = StepCache(0.5)
    assert sampled.run(step_cache) == (0.0, 0)
    assert step_cache.others == {"a graph that reuses steps differed from eager": 8}


@pytest.mark.usefixtures("_wrong_when_brief")
def test_a_graph_is_proved_whole_and_brief_though_a_run_reuses_nothing(tmp_path: Path) -> None:
    """The next run may reuse, and nobody looks at the graph again."""
    sampled, refused = Sampled(library_in(tmp_path), "eager"), StepCache(0.5)
    refused.refuse("keyframes")
    sampled.run(refused)
    assert sampled.run(0.5) == (0.0, 0)


def test_a_brief_graph_that_fails_costs_no_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(ReusableGraph, "reuse", fail)
    sampled = Sampled(library_in(tmp_path), "eager")
    assert sampled.run(0.5) == (0.0, 0)
    assert sampled.counts["served"] == 7


def test_without_a_word_of_which_prompt_a_call_is_for_nothing_is_reused(tmp_path: Path) -> None:
    sampled, step_cache = Sampled(library_in(tmp_path), "eager", stream=lambda _options: None), StepCache(0.5)
    assert sampled.run(step_cache) == (0.0, 0)
    assert sampled.counts["served"] == 8
    assert step_cache.others == {"a call does not say which prompt it is for": 8}


def test_its_bytes_are_those_of_both(tmp_path: Path) -> None:
    class Sized(CompiledGraph):
        def __init__(self, like: CompiledGraph, size: int) -> None:
            super().__init__(like.binding, like.shapes)
            self.code_bytes = size

        def __call__(self, weights: Any, tensors: Any) -> Any:
            raise NotImplementedError

    sampled = Sampled(library_in(tmp_path), "eager")
    sampled.run(0.5)
    (key,) = sampled.dispatcher.graph_keys()
    graph = sampled.library.cache.get(key)
    assert isinstance(graph, ReusableGraph)
    both = ReusableGraph(Sized(graph.whole, 100), Sized(graph.brief, 10))
    assert both.nbytes - sum(value.nbytes for value in graph.binding.constants.values()) >= 110
