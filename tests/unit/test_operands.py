"""engines/inductor/passes/operands.py: what a linear layer multiplies is written once, and is what it was."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from releases import since
from torch import nn

from onediff_comfy.capture.export import Capture
from onediff_comfy.engines.base import CompiledGraph
from onediff_comfy.engines.inductor import engine
from onediff_comfy.engines.inductor.engine import InductorEngine
from onediff_comfy.engines.inductor.passes import operands
from onediff_comfy.engines.inductor.passes.regions import share_regions

# What torch says of itself while its compiler is imported.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")

_WIDTH = 16


class Block(nn.Module):
    """Two products, of a sum and of parts put together, as in the single blocks of Flux."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH, elementwise_affine=False)
        self.modulation = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.first, self.last = nn.Linear(_WIDTH, 7 * _WIDTH), nn.Linear(5 * _WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
        shift, scale, gate = self.modulation(F.silu(vector)).chunk(3, -1)
        own, wide = self.first(torch.addcmul(shift, self.norm(x), 1 + scale)).split([3 * _WIDTH, 4 * _WIDTH], -1)
        query, key, value = own.unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        return x + gate * self.last(torch.cat((attended, F.gelu(wide, approximate="tanh")), 2))


class Blocks(nn.Module):
    """Blocks over text and image together."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        x, vector = torch.cat((text, image), 1), text.mean(1, keepdim=True)
        for block in self.blocks:
            x = block(x, vector)
        return x


class Other(nn.Module):
    """One product of something else."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(_WIDTH, _WIDTH), kind

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        both = torch.cat((text, image), 1)
        operand = {
            "one symbol": image * 2,
            "product of symbols": (image[:, :, None] * text[:, None]).flatten(1, 2),
            "flat": (both * 2).flatten(0, 1),
            "one sample": both[:1] * 2,
            "sum of samples": torch.cat((image, image * 2)),
            "not contiguous": (both * 2).flip(1).transpose(1, 2).contiguous().transpose(1, 2),
            "bmm": both * 2,
        }[self.kind]
        if self.kind == "bmm":
            return operand @ self.linear.weight.expand(operand.shape[0], -1, -1)
        output: torch.Tensor = self.linear(operand)
        return output


def _tensors(batch: int, image: int, text: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, image, _WIDTH), torch.randn(batch, text, _WIDTH)


@since("2.11", "compiles each block, so that each has a copy")
@pytest.mark.parametrize("pointwise", [pytest.param(False, marks=pytest.mark.slow), True])
def test_inductor_copies_no_operand(
    capture_of: Callable[..., Any], pointwise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Blocks().eval()
    captured = capture_of(module, *_tensors(2, 6, 10), general=True)
    ours, code = _compiled(captured.capture, pointwise)
    monkeypatch.setattr(operands, "write_operands_once", lambda graph: graph)
    plain, copying = _compiled(captured.capture, pointwise)
    assert _copies(code) == 0
    assert _copies(copying) == 1 + pointwise  # in the one function that three blocks are
    assert not re.search(r"^[^#\n]*ops\.onediff_comfy", code, re.MULTILINE)  # a saved graph does not need the operator
    for sizes in ((2, 6, 10), (1, 3, 40), (3, 17, 2)):
        tensors = _tensors(*sizes)
        weights = captured.target.weights(captured.capture.binding.weight_names, tensors[0].device)
        with torch.no_grad():
            (output,), (expected,) = ours(weights, tensors), plain(weights, tensors)
            # Put together by one kernel, C++ computes tanh value by value, and its last bit is another one.
            tolerance = {"rtol": 1e-4, "atol": 1e-6} if pointwise else {"rtol": 0, "atol": 0}
            torch.testing.assert_close(output, expected, **tolerance)
            torch.testing.assert_close(output, module(*tensors), rtol=1e-4, atol=1e-5)


def test_blocks_stay_equal(capture_of: Callable[..., Any]) -> None:
    module = Blocks().eval()
    captured = capture_of(module, *_tensors(2, 6, 10), general=True)
    graph = operands.write_operands_once(captured.capture.graph)
    assert [_written(graph), _written(captured.capture.graph)] == [9, 0]  # with activations, as parts
    shared = share_regions(graph)
    assert [_written(function) for name, function in shared.named_children() if "region" in name] == [3]
    assert _written(shared) == 0
    for sizes in ((2, 6, 10), (1, 3, 40)):
        tensors = _tensors(*sizes)
        weights = captured.target.weights(captured.capture.binding.weight_names, tensors[0].device)
        with torch.no_grad():
            (output,) = graph(*captured.capture.binding.feed(weights, tensors))
            torch.testing.assert_close(output, module(*tensors))


def test_sizes_that_are_known_need_nothing(capture_of: Callable[..., Any]) -> None:
    graph = capture_of(Blocks().eval(), *_tensors(2, 6, 10)).capture.graph
    assert operands.write_operands_once(graph) is graph


@pytest.mark.parametrize(
    "kind",
    ["one symbol", "product of symbols", "flat", "one sample", "sum of samples", "not contiguous", "bmm"],
)
def test_anything_else_stays_as_it_is(capture_of: Callable[..., Any], kind: str) -> None:
    captured = capture_of(Other(kind), *_tensors(2, 6, 10), general=True).capture
    assert captured.shapes.general
    assert operands.write_operands_once(captured.graph) is captured.graph


class Turned(nn.Module):
    """A part that lies otherwise in memory, and is used so elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        turned = F.gelu(image.transpose(1, 2).contiguous().transpose(1, 2))
        output: torch.Tensor = self.linear(torch.cat((text, turned), 1))
        return output[:, -image.shape[1] :] + turned.transpose(1, 2).view(image.shape[0], -1).sum(-1)[:, None, None]


def unheard_of(*_graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    raise TypeError("lowerings are registered otherwise now")


_ALL, _WRITTEN = "another form", "operands and angles put into memory"


@pytest.mark.parametrize("left_out", [[], [_ALL], [_ALL, _WRITTEN]])
def test_it_costs_no_compilation(
    capture_of: Callable[..., Any],
    left_out: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Neither where a part keeps its layout, nor where Inductor takes none of it, or not all."""
    forms = engine._forms
    if _ALL in left_out:
        monkeypatch.setattr(engine, "_forms", lambda *of: [(_ALL, unheard_of), *forms(*of)])
    if _WRITTEN in left_out:
        monkeypatch.setattr(operands, "write_operands_once", unheard_of)
    module, tensors = Turned().eval(), _tensors(2, 6, 10)
    captured = capture_of(module, *tensors, general=True)
    with caplog.at_level("INFO"):
        graph = InductorEngine().compile(captured.capture)
    assert [name for name in (_ALL, _WRITTEN) if f"compiled without {name}" in caplog.text] == left_out
    weights = captured.target.weights(captured.capture.binding.weight_names, tensors[0].device)
    with torch.no_grad():
        torch.testing.assert_close(graph(weights, tensors)[0], module(*tensors), rtol=1e-4, atol=1e-5)


def _compiled(captured: Capture, pointwise: bool) -> tuple[CompiledGraph, str]:
    """The compiled graph and its source; with parts put together as on GPUs, or as on CPUs."""
    import torch._inductor.config as config
    from torch._inductor.utils import run_and_get_code

    ours = mock.patch.object(engine, "as_pytorch_sets_them", contextlib.nullcontext)  # which would set it back
    with config.patch(force_pointwise_cat=pointwise), ours:
        graph, code = run_and_get_code(InductorEngine().compile, captured)
    return graph, "\n".join(code)


def _copies(code: str) -> int:
    """How many products have an operand of two dimensions, written for them alone."""
    return len(re.findall(r"extern_kernels\.addmm\(\w+, \w*buf\d+,", code))


def _written(graph: torch.fx.GraphModule) -> int:
    return sum(node.target is operands.in_memory() for node in graph.graph.nodes)
