"""A comparison with eager that shows nothing: the graph is neither proved nor retired by it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from test_general import Served, process
from torch import nn

from onediff_comfy.engines.eager import EagerGraph
from onediff_comfy.serving.verification.eager_times import EagerTimes


class Wrong(nn.Module):
    """Of one sample another factor, which no trace for all sizes sees: the graph is wrong for it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.linear(x) * (7.0 if x.shape[0] == 1 else 2.0)
        return output


class Normed(nn.Module):
    """Group norm of an image of one colour is rounding, made large."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.norm = nn.Conv2d(3, 32, 1), nn.GroupNorm(32, 32, eps=1e-14)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.norm(self.before(x))
        return output


def off(served: Served, x: torch.Tensor) -> float:
    with torch.no_grad():
        actual = served.dispatcher(served.module, served.module.forward, (x,), {})
        return float((actual - served.module(x)).nan_to_num().abs().max())


def test_zeros_prove_nothing() -> None:
    served = Served(process(), Wrong())
    kept = served.module.linear.weight.clone(), served.module.linear.bias.clone()
    assert off(served, torch.randn(2, 4)) < 1e-5
    for own in (served.module.linear.weight, served.module.linear.bias):
        own.zero_()
    assert off(served, torch.randn(1, 4)) == 0
    assert served.counts["proved"] == 1
    for own, before in zip((served.module.linear.weight, served.module.linear.bias), kept, strict=True):
        own.copy_(before)
    assert [off(served, torch.randn(1, 4)) for _ in range(2)] == [0, 0]


def test_nor_does_what_is_no_number() -> None:
    served = Served(process(), Wrong())
    assert off(served, torch.randn(2, 4)) < 1e-5
    assert off(served, torch.full((1, 4), math.nan)) == 0
    assert [off(served, torch.randn(1, 4)) for _ in range(2)] == [0, 0]


def test_what_never_tells_is_left_to_comfyui_after_a_few_calls() -> None:
    served = Served(process(), Wrong())
    for own in (served.module.linear.weight, served.module.linear.bias):
        own.zero_()
    assert [off(served, torch.randn(2, 4)) for _ in range(5)] == [0] * 5
    assert list(served.fallbacks.values()) == [3]
    assert "retired" not in served.counts and "proved" not in served.counts


@pytest.fixture
def rounded_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs round as if their inputs were off in the last place."""
    run = EagerGraph.__call__

    def call(graph: EagerGraph, weights: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> Any:
        signs = torch.randint(0, 2, tensors[0].shape, generator=torch.Generator().manual_seed(1)) * 2 - 1
        return run(graph, weights, [tensors[0] * (1 + signs * torch.finfo(torch.float32).eps)])

    monkeypatch.setattr(EagerGraph, "__call__", call)


GRAY = torch.full((1, 3, 16, 16), 0.5)


@pytest.mark.usefixtures("rounded_otherwise")
def test_rounding_that_the_model_makes_large_retires_no_graph() -> None:
    served = Served(process(), Normed())
    assert off(served, GRAY) == 0  # eager's output is given
    assert "retired" not in served.counts and "proved" not in served.counts
    assert off(served, torch.randn(1, 3, 16, 16)) < 1e-4
    assert served.counts["proved"] == 1 and served.counts["compiled"] == 1


@pytest.mark.usefixtures("rounded_otherwise")
def test_nor_does_it_end_the_service_of_one_that_is_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(process(), Normed())
    assert off(served, torch.randn(1, 3, 16, 16)) < 1e-4
    monkeypatch.setattr(EagerTimes, "due", lambda *_: True)  # eager is timed beside each call
    assert [off(served, GRAY) for _ in range(5)] == [0] * 5
    assert (served.counts["served"], served.counts["proved"], served.fallbacks) == (6, 1, {})
