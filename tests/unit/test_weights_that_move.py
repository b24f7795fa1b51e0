"""dispatcher.py: a block's weights are wherever the host has brought them to, where another block's were before."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from onediff_comfy.cache.memory import GraphCache
from onediff_comfy.capture.call import split
from onediff_comfy.compilation.compile_graph import HostServices
from onediff_comfy.compilation.library import GraphLibrary
from onediff_comfy.engines.base import Outputs
from onediff_comfy.metrics import Metrics
from onediff_comfy.runtime.cuda_graphs import RecordedGraph
from onediff_comfy.runtime.launch_bound import MovingWeights, RecordWhen, When
from onediff_comfy.runtime.recording_pool import RecordingPool
from onediff_comfy.serving.decision import Invocation, Output
from onediff_comfy.serving.dispatcher import Dispatcher

CALL = split({"x": torch.ones(1)}, function="Block.forward").signature
HOST = HostServices("host", "transformer_options", {}, lambda: None, lambda _layers: None)


class Block(nn.Module):
    """Its output tells what its weight is made of."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight[0] * 0 + self.weight.element_size()


def test_a_weight_of_another_dtype_at_the_address_of_the_one_before_is_seen() -> None:
    """The host's buffer for what is brought is at one address, for all blocks of a model."""
    buffer = torch.ones(4)
    dispatcher = Dispatcher("eager", GraphLibrary(GraphCache(1 << 30), Metrics()), HOST)
    image, x = Block(buffer), torch.ones(1)

    def answer() -> Output | object:
        return dispatcher.attempt(Invocation(image, image.forward, (x,), {}, moving=MovingWeights()))

    for _ in range(3):
        first = answer()
        assert isinstance(first, Output) and first.value.tolist() == [5.0]
    image._parameters["weight"] = nn.Parameter(buffer.view(torch.int16)[:4], requires_grad=False)
    assert image.weight.data_ptr() == buffer.data_ptr()
    other = answer()
    assert not isinstance(other, Output) or other.value.tolist() == image(x).tolist()


@pytest.mark.parametrize(("moving", "timed"), [(MovingWeights(), 3), (None, 17)])
def test_of_calls_whose_weights_move_one_in_seven_is_timed(moving: MovingWeights | None, timed: int) -> None:
    """A step has sixty of them. What all take is told as if each was."""
    dispatcher, image = Dispatcher("eager", GraphLibrary(GraphCache(1 << 30), Metrics()), HOST), Block(torch.ones(4))
    for _ in range(17):
        dispatcher.attempt(Invocation(image, image.forward, (torch.ones(1),), {}, moving=moving))
    (key,) = dispatcher.graph_keys()
    seconds, (fastest, calls) = dispatcher.times.seconds()[key], dispatcher.times.fastest(key, CALL)
    assert calls == timed and seconds >= 17 * fastest


def test_it_is_known_of_an_answer_whether_code_of_the_module_ran_for_it() -> None:
    """For the first a graph is made, and compared with eager; another dispatcher has to look for it, at first."""
    library, image = GraphLibrary(GraphCache(1 << 30), Metrics()), Block(torch.ones(4))
    for _ in range(2):
        dispatcher = Dispatcher("eager", library, HOST)
        answers = [
            dispatcher.attempt(Invocation(image, image.forward, (torch.ones(1),), {}, moving=MovingWeights()))
            for _ in range(3)
        ]
        assert [isinstance(each, Output) and each.by_graph_alone for each in answers] == [False, True, True]


class Told(RecordedGraph):
    """Records nothing, and keeps which calls were to be recorded."""

    when: When | None = None

    def run(
        self,
        weights: Sequence[torch.Tensor],
        _addresses: list[int],
        tensors: Sequence[torch.Tensor],
        when: When = RecordWhen.ALWAYS,
        _confirmed: Callable[[], bool] | None = None,
        _into: object = None,
    ) -> Outputs | None:
        self.when = when
        return self.inner(weights, tensors)


@pytest.mark.parametrize("moving", [MovingWeights(range(9), device_is_behind=True), None])
def test_what_records_is_told_whether_weights_move(moving: MovingWeights | None) -> None:
    library = GraphLibrary(GraphCache(1 << 30), Metrics())
    dispatcher, image = Dispatcher("eager", library, HOST), Block(torch.ones(4))
    invocation = Invocation(image, image.forward, (torch.ones(1),), {}, moving=moving)
    dispatcher.attempt(invocation)
    (key,) = dispatcher.graph_keys()
    graph = library.cache.get(key)
    assert graph is not None
    told = Told(graph, RecordingPool(lambda: 1 << 30), lambda: None)
    told.compilation = graph.compilation
    library.cache.put(key, told)
    assert isinstance(dispatcher.attempt(invocation), Output)
    assert told.when is (moving or RecordWhen.ALWAYS)
