"""Images that belong to the levels of another: what a ControlNet made of a UNet's levels, added there.

Their sizes follow from each other, so one graph serves them all; the image's own is then twice another's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from onediff_comfy.capture.call import TensorSpec, bind, split
from onediff_comfy.capture.tracing.example_sizes import fold_factors
from onediff_comfy.engines.base import Engine
from onediff_comfy.engines.eager import EagerEngine
from onediff_comfy.engines.inductor.engine import InductorEngine

SIZES = [(1, 16, 16), (2, 8, 24), (3, 12, 20)]


class Controlled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.last = nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x: torch.Tensor, upper: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
        x = self.first(x) + upper
        x = F.silu(self.down(x) + lower)
        return self.last(F.interpolate(x, size=upper.shape[-2:]))


def call(batch: int, height: int, width: int) -> tuple[torch.Tensor, ...]:
    x, upper = torch.randn(batch, 4, height, width), torch.randn(batch, 8, height, width)
    return x, upper, torch.randn(batch, 8, height // 2, width // 2)


@pytest.mark.parametrize("engine", [EagerEngine(), InductorEngine()], ids=lambda engine: engine.name)
def test_one_graph_serves_all_sizes(engine: Engine, capture_of: Callable[..., Any]) -> None:
    module = Controlled().eval().requires_grad_(False)
    captured = capture_of(module, *call(*SIZES[0]), general=True, multiple=2)
    graph = engine.compile(captured.capture)
    weights = captured.target.weights(graph.binding.weight_names, torch.device("cpu"))
    assert graph.shapes.general
    for sizes in SIZES:
        made = split(bind(module.forward, call(*sizes), {}))
        assert graph.shapes.values(made.signature.tensors) is not None
        (actual,) = graph(weights, made.tensors)
        torch.testing.assert_close(actual, module(**made.rebuild(made.tensors)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("shapes", "multiple", "expected"),
    [
        ([(2, 4, 64, 96)], 4, {0: 4}),
        ([(2, 9, 16, 24), (2, 4, 64, 96), (2, 8, 32, 48)], 4, {1: 4, 2: 2}),
        ([(2, 4, 64, 96), (2, 4, 64, 96)], 1, {}),
        ([(2, 4, 64, 96), (2, 4, 32, 96)], 4, {0: 4, 1: 4}),  # of another shape: no level of the first
        ([(2, 4, 64, 96), (2, 4, 60, 90), (2, 4)], 2, {0: 2, 1: 2}),
        ([(2, 4, 63, 96)], 2, {}),
    ],
    ids=str,
)
def test_deeper_levels_are_folded_by_less(
    shapes: list[tuple[int, ...]], multiple: int, expected: dict[int, int]
) -> None:
    specs = [TensorSpec(shape, torch.float32, torch.device("cpu")) for shape in shapes]
    assert fold_factors(specs, multiple) == expected


def test_residuals_of_another_image_are_not_served(capture_of: Callable[..., Any]) -> None:
    module = Controlled().eval().requires_grad_(False)
    captured = capture_of(module, *call(*SIZES[0]), general=True, multiple=2)
    x, upper, _ = call(2, 16, 24)
    assert not captured.covers(module, x, upper, torch.randn(2, 8, 8, 8))
