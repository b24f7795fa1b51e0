"""serving/module_guard.py: what PyTorch differentiates or traces is computed by the module itself, and then served."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn

from onediff_comfy.compilation.compile_graph import HostServices
from onediff_comfy.compilation.library import GraphLibrary
from onediff_comfy.serving.dispatcher import Dispatcher

HOST = HostServices("host", "transformer_options", {}, lambda: None, lambda _layers: None)
Function = Callable[[torch.Tensor], torch.Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, transformer_options: dict[str, Any] = {}) -> torch.Tensor:  # noqa: B006
        return torch.tanh(self.linear(x)) * x


def _jvp(function: Function, x: torch.Tensor) -> torch.Tensor:
    tangent: torch.Tensor = torch.func.jvp(function, (x,), (torch.ones_like(x),))[1]
    return tangent


def _dual(function: Function, x: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        tangent: torch.Tensor = forward_ad.unpack_dual(function(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
        return tangent


def _vmapped(function: Function, x: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = torch.vmap(function)(torch.stack([x, 2 * x]))
    return output


def _traced(function: Function, x: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = torch.jit.trace(lambda x: function(x) + 1, (x,), check_trace=False)(3 * x)
    return output


@pytest.mark.parametrize("transform", [_jvp, _dual, _vmapped, _traced], ids=lambda transform: transform.__name__)
@pytest.mark.parametrize("known", [True, False])
def test_a_transform_gives_what_it_gives_of_the_module(
    transform: Callable[[Function, torch.Tensor], torch.Tensor], known: bool, library: GraphLibrary
) -> None:
    module, x, dispatcher = Net().eval().requires_grad_(False), torch.randn(2, 4), Dispatcher("eager", library, HOST)

    def served(x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = dispatcher(module, module.forward, (x,), {})
        return output

    if known:
        served(x)
    torch.testing.assert_close(transform(served, x), transform(module, x))
    before = library.metrics.snapshot()["served"]
    torch.testing.assert_close(served(x), module(x))
    assert library.metrics.snapshot()["served"] == before + 1, "the next call is an ordinary one"


def test_weights_have_gradients_where_they_are_wanted(library: GraphLibrary) -> None:
    module, x, dispatcher = Net(), torch.randn(2, 4), Dispatcher("eager", library, HOST)
    with torch.no_grad():
        dispatcher(module, module.forward, (x,), {})
    loss = dispatcher(module, module.forward, (x,), {}).sum()
    (gradient,) = torch.autograd.grad(loss, module.linear.weight)
    torch.testing.assert_close(gradient, torch.autograd.grad(module(x).sum(), module.linear.weight)[0])
    assert library.metrics.snapshot()["served"] == 1
