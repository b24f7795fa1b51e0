"""serving/verification/numerics.py: how far a right graph may be off whose model rounds what it computes to 8 bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from onediff_comfy.cache.memory import GraphCache
from onediff_comfy.compilation.compile_graph import HostServices
from onediff_comfy.compilation.library import GraphLibrary
from onediff_comfy.engines.eager import EagerGraph
from onediff_comfy.metrics import Metrics
from onediff_comfy.serving.dispatcher import Dispatcher
from onediff_comfy.serving.verification import numerics as proof

HOST = HostServices("host", "transformer_options", {}, lambda: None, lambda _layers: None)
WIDTH, ROWS, DEPTH = 64, 384, 8
E4M3 = torch.float8_e4m3fn


class Eighths(torch.nn.Module):
    """A linear layer of 8-bit weights that rounds its input to 8 bits, too."""

    def __init__(self, generator: torch.Generator, dtype: torch.dtype) -> None:
        super().__init__()
        weight = torch.randn(WIDTH, WIDTH, generator=generator) * WIDTH**-0.5
        self.register_buffer("scale", weight.abs().max() / 448)
        self.register_buffer("weight", (weight / self.scale).to(E4M3))
        self.register_buffer("bias", torch.randn(WIDTH, generator=generator) * 0.2)
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rounded = x.clamp(-448, 448).to(E4M3).to(self.dtype)
        return F.linear(rounded, self.weight.to(self.dtype) * self.scale.to(self.dtype), self.bias.to(self.dtype))


class Net(torch.nn.Module):
    """Blocks of such layers; in float64 it is the same model with other rounding of everything else."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.blocks = torch.nn.ModuleList(Eighths(generator, dtype) for _ in range(DEPTH))
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.dtype)
        for block in self.blocks:
            x = x + F.gelu(block(F.layer_norm(x, (WIDTH,))))
        return x.float()


def rows() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(2))


def allowed(net: Net) -> float:
    again = proof.again(net.forward, (rows(),), {})
    assert again is not None
    return proof.excused(again(net(rows())))


def test_a_model_that_is_rounded_otherwise_is_right() -> None:
    """By more than rounding in float32 explains: values are rounded to other 8-bit numbers."""
    net = Net()
    off = proof.difference(Net(torch.float64)(rows()), net(rows()))
    assert proof.limit({torch.float32}, torch.device("cpu")) < off < allowed(net)


def _wrong_scale(net: Net) -> None:
    net.blocks[2].scale = net.blocks[2].scale * 1.5


def _no_scale(net: Net) -> None:
    net.blocks[0].scale = torch.ones(())


def _no_bias(net: Net) -> None:
    net.blocks[3].bias = torch.zeros(WIDTH)


def _swapped(net: Net) -> None:
    one, other = net.blocks[1], net.blocks[4]
    one.weight, other.weight = other.weight, one.weight


def _other_rows(net: Net) -> None:
    weight = net.blocks[5].weight.view(torch.uint8)
    net.blocks[5].weight = torch.cat((weight[:16].flip(0), weight[16:])).view(E4M3)


@pytest.mark.parametrize("spoil", [_wrong_scale, _no_scale, _no_bias, _swapped, _other_rows])
def test_a_wrong_one_is_wrong(spoil: Callable[[Net], None]) -> None:
    net, wrong = Net(), Net(torch.float64)
    spoil(wrong)
    assert proof.difference(wrong(rows()), net(rows())) > 1.5 * allowed(net)


def test_a_model_of_plain_weights_is_not_asked_twice() -> None:
    weights = (torch.zeros(2, dtype=dtype) for dtype in (torch.float16, torch.float32, torch.int64))
    assert proof.rounds_to_few_bits(weights) is False


def test_what_eager_uses_up_is_there_for_the_second_time() -> None:
    given = {"residuals": [rows(), rows()]}

    def forward(x: torch.Tensor, residuals: list[torch.Tensor]) -> torch.Tensor:
        return x + residuals.pop() + residuals.pop()

    again = proof.again(forward, (rows(),), given)
    expected = forward(rows(), **given)
    assert given == {"residuals": []}
    assert again is not None and 0 < again(expected) < 1e-3


def test_a_model_that_is_all_chance_does_not_excuse_everything() -> None:
    again = proof.again(lambda x: (1e6 * x).sin(), (rows(),), {})
    assert again is not None and proof.excused(again((1e6 * rows()).sin())) == 0.1


@pytest.mark.parametrize(("factor", "right"), [(1.0, True), (1.0 + 1e-3, True), (1.05, False)])
def test_a_graph_is_served_by_it_or_retired(monkeypatch: pytest.MonkeyPatch, factor: float, right: bool) -> None:
    run = EagerGraph.__call__

    def otherwise(graph: EagerGraph, weights: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> Any:
        return [output * factor for output in run(graph, weights, tensors)]

    monkeypatch.setattr(EagerGraph, "__call__", otherwise)
    metrics, net = Metrics(), Net()
    dispatcher = Dispatcher("eager", GraphLibrary(GraphCache(1 << 30), metrics), HOST)
    with torch.no_grad():
        dispatcher(net, net.forward, (rows(),), {})
        dispatcher(net, net.forward, (rows(),), {})
    counted = metrics.snapshot()
    assert (counted["proved"] == 1, counted["retired"] > 0, counted["served"] > 1) == (right, not right, right)
