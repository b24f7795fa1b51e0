"""capture/trace.py: graphs that wait for the device in their middle are known, for they cannot be replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from onediff_comfy.engines.eager import EagerGraph
from onediff_comfy.engines.inductor import InductorEngine
from onediff_comfy.graphs.cache import GraphCache
from onediff_comfy.graphs.library import GraphLibrary
from onediff_comfy.graphs.persist import _binding_from_json, _binding_to_json
from onediff_comfy.graphs.recorded import RecordedGraph
from onediff_comfy.metrics import Metrics


class Net(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(x))


@pytest.mark.parametrize(
    ("function", "waits"),
    [
        pytest.param(lambda x: x[x > 0].sum(), True, id="mask"),
        pytest.param(lambda x: torch.nonzero(x).sum(), True, id="nonzero"),
        pytest.param(lambda x: x[torch.tensor([1, 0])], False, id="positions"),
        pytest.param(lambda x: x.repeat_interleave(2, 0), False, id="repeated"),
        pytest.param(lambda x: x.softmax(-1), False, id="plain"),
    ],
)
def test_graphs_that_wait_are_known(capture_of: Any, function: Callable[..., torch.Tensor], waits: bool) -> None:
    binding = capture_of(Net(function), torch.randn(2, 4)).capture.binding
    assert binding.waits is waits
    assert _binding_from_json(_binding_to_json(binding), binding.constants).waits is waits


def test_artifacts_from_before_do_not_wait(capture_of: Any) -> None:
    binding = capture_of(Net(torch.relu), torch.randn(2, 4)).capture.binding
    fields = _binding_to_json(binding)
    del fields["waits"]
    assert _binding_from_json(fields, binding.constants) == binding


@pytest.mark.parametrize(("function", "recorded"), [(lambda x: x[x > 0], False), (torch.relu, True)])
def test_they_are_not_recorded(
    capture_of: Any, function: Callable[[torch.Tensor], torch.Tensor], recorded: bool
) -> None:
    library = GraphLibrary(GraphCache(1 << 30), Metrics())
    graph = EagerGraph(capture_of(Net(function), torch.randn(2, 4)).capture)
    kept = library._put("key", graph, InductorEngine(), torch.device("cuda"))
    assert isinstance(kept, RecordedGraph) is recorded
