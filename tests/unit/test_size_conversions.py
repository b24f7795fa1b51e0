"""capture/rewrites/size_conversions.py: ``float(size)`` leaves a graph for all sizes, and a model as it was."""

from __future__ import annotations

import math
import sys
import types
from typing import Any

import pytest
import torch
from torch import nn

from onediff_comfy.capture.rewrites.size_conversions import keep_sizes_symbolic

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="the bytecode does not say what is called")

SIZES = (2, 8, 11, 16, 17, 999)


def scaled(x: torch.Tensor, *, by: float = 2.0) -> torch.Tensor:
    return x * float(x.shape[1]) * by


def through_another(x: torch.Tensor) -> torch.Tensor:
    return scaled(x, by=3.0)


class _Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


class InForward(_Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * float(x.shape[1])


class InAMethod(_Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor(x) * self.linear(x)

    def factor(self, x: torch.Tensor) -> Any:
        return float(x.shape[1]) / 3


class InAChild(_Base):
    def __init__(self) -> None:
        super().__init__()
        self.child = InForward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.child(x)


class InAFunction(_Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return through_another(self.linear(x))


class InAComprehension(_Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(self.linear(x) * number for number in [float(size) for size in x.shape[1:2]])


class WithSuper(InForward):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * float(x.shape[1]) + len(super().__repr__())


class InLinspace(_Base):
    """As ErnieImage counts its positions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.shape[1]
        length = float(tokens)
        return self.linear(x) + torch.linspace(0.0, length - 1 + 0.0, steps=tokens)[:, None]


class OfATensor(_Base):
    """What is no size is converted as ever."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * (float("2.5") + float(True) + float(math.inf > 0))


KINDS = (
    InForward, InAMethod, InAChild, InAFunction, InAComprehension, WithSuper, InLinspace, OfATensor,
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_one_graph_is_for_all_sizes(kind: type[nn.Module], capture_of: Any) -> None:
    module = kind().requires_grad_(False)
    captured = capture_of(module, torch.randn(2, 16, 4), general=True)
    for tokens in SIZES:
        x = torch.randn(3, tokens, 4)
        assert captured.covers(module, x)
        torch.testing.assert_close(captured.run_on(module, x), module(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_as_it_was_afterwards(kind: type[nn.Module], capture_of: Any) -> None:
    module = kind().requires_grad_(False)
    before = [dict(vars(layer)) for layer in module.modules()]
    capture_of(module, torch.randn(2, 16, 4), general=True)
    assert [dict(vars(layer)) for layer in module.modules()] == before
    assert type(float(3)) is float


class ComparesTypes(_Base):
    """Uses the class ``float`` as a class, where another function would not do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * (2 if isinstance(float(x.shape[1]), float) else 3)


class HasItsOwnFloat(_Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * float(x.shape[1])


@pytest.mark.parametrize("kind", [ComparesTypes, HasItsOwnFloat])
def test_what_does_more_with_float_than_to_call_it_is_left_alone(kind: type[nn.Module]) -> None:
    module = kind()
    if kind is HasItsOwnFloat:
        function = kind.forward
        known = {**function.__globals__, "float": lambda _value: 7.0}
        kind.forward = types.FunctionType(function.__code__, known)  # type: ignore[method-assign]
    forward = module.forward
    assert keep_sizes_symbolic([module], forward) == forward
    assert "forward" not in vars(module)


def test_a_method_that_somebody_has_set_on_a_layer_stays() -> None:
    module = InForward()
    replaced = vars(module)["forward"] = lambda x: x
    keep_sizes_symbolic([module], module.forward)
    assert vars(module)["forward"] is replaced


def test_functions_that_call_each_other_are_followed_once() -> None:
    module = Recursive()
    forward = keep_sizes_symbolic([module], module.forward)
    assert forward != module.forward.__func__
    x = torch.ones(1, 3, 4)
    assert torch.equal(forward(x), module(x))


def even(x: torch.Tensor, left: int) -> torch.Tensor:
    return x * float(left) if left == 0 else odd(x + 1, left - 1)


def odd(x: torch.Tensor, left: int) -> torch.Tensor:
    return x if left == 0 else even(x, left - 1)


class Recursive(_Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return odd(x, 5)
