"""dispatcher.py: a block's weights are wherever the host has brought them to, where another block's were before."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from onediff_comfy.cache.memory import GraphCache
from onediff_comfy.compilation.compile_graph import HostServices
from onediff_comfy.compilation.library import GraphLibrary
from onediff_comfy.engines.base import Outputs
from onediff_comfy.metrics import Metrics
from onediff_comfy.runtime.cuda_graphs import RecordedGraph
from onediff_comfy.runtime.launch_bound import MovingWeights, RecordWhen, When
from onediff_comfy.runtime.recording_pool import RecordingPool
from onediff_comfy.serving.decision import Invocation, Output
from onediff_comfy.serving.dispatcher import Dispatcher

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
    ) -> Outputs | None:
        self.when = when
        return self.inner(weights, tensors)


@pytest.mark.parametrize("moving", [MovingWeights(range(9), late=True), None])
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
