"""Which calls run eager only to be timed: few, and none where a person would feel it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from onediff_comfy import engines
from onediff_comfy.cache.memory import GraphCache
from onediff_comfy.compilation.compile_graph import HostServices
from onediff_comfy.compilation.library import GraphLibrary
from onediff_comfy.engines.eager import EagerEngine
from onediff_comfy.metrics import Metrics
from onediff_comfy.runtime.launch_bound import MovingWeights
from onediff_comfy.runtime.step_cache import StepCache
from onediff_comfy.serving.decision import Invocation
from onediff_comfy.serving.dispatcher import Dispatcher
from onediff_comfy.serving.executor import EAGER, CallTimes
from onediff_comfy.serving.verification import eager_times

HOST = HostServices("host", "transformer_options", {}, lambda: None, lambda _layers: None)


class Net(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * 2


class Compiler(EagerEngine):
    name = "inductor"


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> GraphLibrary:
    monkeypatch.setitem(engines.ENGINES, "inductor", Compiler())
    return GraphLibrary(GraphCache(1 << 30), Metrics())


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the clock says of each eager call; of a graph's calls always 0.1 s."""
    samples: list[float] = []
    last = CallTimes.last
    monkeypatch.setattr(CallTimes, "usual", lambda _self, key, _signature: 0.1)
    monkeypatch.setattr(
        CallTimes, "last", lambda self, *call: samples.pop(0) if call[0] == EAGER else last(self, *call)
    )
    return samples


Eager = Callable[[Invocation], Any]


def eager_calls(dispatcher: Dispatcher, calls: int, eager: Eager = Invocation.eager) -> list[int]:
    """The numbers of the calls, of one run, in which the module itself ran."""
    module, ran, made = Net(), list[int](), list[int]()

    def counted(invocation: Invocation) -> Any:
        ran.append(len(made))
        return eager(invocation)

    dispatcher.begin_run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Invocation, "eager", counted)
        for _ in range(calls):
            made.append(1)
            x = torch.randn(2, 4)
            torch.testing.assert_close(dispatcher(module, module.forward, (x,), {}), module(x))
    return ran


@pytest.mark.parametrize(("rooms", "timed"), [(0, [1]), (1, [1, 2])])  # the first is compared, and not only timed
def test_where_memory_is_short_nothing_is_timed_and_that_is_seldom_asked(
    library: GraphLibrary, said: list[float], monkeypatch: pytest.MonkeyPatch, rooms: int, timed: list[int]
) -> None:
    """Also where there was room for a sample before."""
    asked: list[torch.device] = []

    def short(device: torch.device) -> bool:
        asked.append(device)
        return len(asked) > rooms

    monkeypatch.setattr(eager_times, "memory_is_short", short)
    said += [1.0, 0.2, 0.21]
    assert eager_calls(Dispatcher("inductor", library, HOST), 130) == timed
    assert 130 // 20 - 1 <= len(asked) <= 130 // 20 + 1, "there may be room again"


@pytest.mark.parametrize(
    ("samples", "timed"),
    [
        ([1.0, 0.2, 0.21], [1, 2, 23]),  # the first one loads kernels
        ([1.0, 0.29, 0.2, 0.21], [1, 2, 23, 44]),
        ([1.0, 0.8, 0.7, 0.6, 0.5, 0.4], [1, 2, 23, 44, 65, 86]),  # never agreed
        ([1.0, 0.44, 0.45, 0.44, 0.45, 0.44], [1, 2, 23, 44, 65, 86]),  # odd
        ([1.0, 1.5], [1, 2]),  # long
        ([6.0], [1]),  # so long that loading kernels hardly counts
    ],
)
def test_few_calls_are_timed_and_far_apart(
    library: GraphLibrary, said: list[float], samples: list[float], timed: list[int]
) -> None:
    said += samples
    dispatcher = Dispatcher("inductor", library, HOST)
    assert eager_calls(dispatcher, 130) == timed
    assert said == []
    (graph_key,) = dispatcher.graph_keys()
    assert len(library.verdicts.eager_samples(graph_key, (2, 4))) == len(samples) - (samples[0] < 5)


@pytest.mark.parametrize(
    "why", ["the same kernels", "a run that reuses steps", "memory is short", "it is given much", "weights move"]
)
def test_none_is_timed_where_that_would_be_felt_or_say_nothing(
    library: GraphLibrary, said: list[float], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said += [1.0] * 9
    dispatcher = Dispatcher("eager" if why == "the same kernels" else "inductor", library, HOST)
    if why == "memory is short":
        monkeypatch.setattr(eager_times, "memory_is_short", lambda _device: True)
    if why == "it is given much":
        monkeypatch.setattr(eager_times, "MOST_GIVEN", 2 * 4 * 4 - 1)  # bytes
    if why == "weights move":  # of a block: what it gains is not what a step does
        of_a_block = functools.partial(Invocation, moving=MovingWeights())
        monkeypatch.setattr("onediff_comfy.serving.dispatcher.Invocation", of_a_block)
    if why == "a run that reuses steps":
        begin = dispatcher.begin_run
        monkeypatch.setattr(dispatcher, "begin_run", lambda: begin(StepCache(0.1)))
    assert eager_calls(dispatcher, 50) == [1], "to be compared"
    assert dispatcher.speeds() == []


def test_a_call_that_was_only_to_be_timed_may_run_out_of_memory(library: GraphLibrary, said: list[float]) -> None:
    said += [1.0] * 9
    calls: list[int] = []

    def eager(invocation: Invocation) -> Any:
        calls.append(1)
        if len(calls) > 1:
            raise torch.OutOfMemoryError
        return invocation.forward(*invocation.args, **invocation.kwargs)

    assert eager_calls(Dispatcher("inductor", library, HOST), 50, eager) == [1, 2]
