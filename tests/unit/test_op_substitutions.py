"""capture/rewrites/op_substitutions.py: what is traced in the place of torch's functions computes the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from releases import is_before
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from onediff_comfy.capture.rewrites import op_substitutions


def _doubled(x: torch.Tensor) -> torch.Tensor:
    return x + x


def test_compilers_take_an_operator_of_ours_to_pieces() -> None:
    """What is not taken to pieces is not fused with what is around it."""
    doubled = op_substitutions.composite("doubled_in_a_test(Tensor x) -> Tensor", _doubled)
    traced = make_fx(doubled)(torch.ones(2))
    operators = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert operators == [torch.ops.aten.add.Tensor]
    assert torch.equal(doubled(torch.ones(2)), torch.full((2,), 2.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gelu_by_a_sigmoid_is_gelu_by_a_tanh(dtype: torch.dtype) -> None:
    x = torch.cat((torch.linspace(-12, 12, 4001), torch.tensor([0.0, -0.0, 60000.0, -60000.0]))).to(dtype)
    exact = F.gelu(x.double(), approximate="tanh")
    ours, eager = op_substitutions.gelu(x, approximate="tanh"), F.gelu(x, approximate="tanh")
    assert ours.dtype == dtype
    assert (ours - exact).norm() <= 1.5 * (eager - exact).norm()
    torch.testing.assert_close(ours, eager, rtol=1e-3 if dtype == torch.float16 else 1e-2, atol=1e-6)


def test_gelu_by_the_error_function_stays_as_it_is() -> None:
    x = torch.linspace(-5, 5, 101)
    assert torch.equal(op_substitutions.gelu(x), F.gelu(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("affine", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("mean", [0.0, 30.0])
def test_group_norm_is_as_exact_as_pytorchs(dtype: torch.dtype, affine: tuple[bool, bool], mean: float) -> None:
    generator = torch.Generator().manual_seed(0)
    image = (torch.randn(2, 12, 16, 20, generator=generator) + mean).to(dtype)
    weight, bias = (torch.randn(12, generator=generator).to(dtype) if given else None for given in affine)
    doubled = (None if each is None else each.double() for each in (weight, bias))
    exact = F.group_norm(image.double(), 4, *doubled)
    eager, ours = F.group_norm(image, 4, weight, bias), op_substitutions.group_norm(image, 4, weight, bias)
    assert (ours.shape, ours.dtype, ours.stride()) == (eager.shape, eager.dtype, eager.stride())
    error, allowed = (float((each - exact).abs().max()) for each in (ours, eager))
    assert error <= 1.2 * allowed + 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mean", [-300.0, 1000.0])
def test_group_norm_of_16_bits_far_from_zero_is_as_exact_as_pytorchs(dtype: torch.dtype, mean: float) -> None:
    """Where squares in float32 differ by less than they are rounded by."""
    image = (torch.randn(2, 12, 64, 128, generator=torch.Generator().manual_seed(0)) + mean).to(dtype)
    exact = F.group_norm(image.double(), 4)
    error, allowed = ((each - exact).norm() for each in (op_substitutions.group_norm(image, 4), F.group_norm(image, 4)))
    assert error <= 1.1 * allowed
    same = torch.full((1, 12, 8, 8), mean, dtype=dtype)
    assert op_substitutions.group_norm(same, 4).abs().max() <= 0.1, "a picture of one colour is not a number"


@pytest.mark.parametrize("value", [3, 2.5, True, float("nan"), torch.tensor(4.0), torch.ones(3)])
@pytest.mark.parametrize(
    "index",
    [
        0,
        (slice(None), 1),
        (..., 2),
        (None, 1),
        (slice(1, None, 2), slice(0, 2)),
        ...,
        [0, 2],
        torch.tensor([1, 1]),
        torch.tensor([True, False, True]),
        True,
        (slice(None), [1]),
    ],
    ids=repr,
)
def test_what_is_written_to_a_part_is_written(index: Any, value: Any) -> None:
    for dtype in (torch.float32, torch.int64):
        ours, expected = (torch.arange(9).reshape(3, 3).to(dtype) for _ in range(2))
        failed = []
        for write, tensor in ((op_substitutions.set_item, ours), (torch.Tensor.__setitem__, expected)):
            try:
                write(tensor, index, value)
            except (RuntimeError, ValueError, IndexError) as error:  # no such shape, or no such whole number
                failed.append(type(error))
        assert len(failed) in (0, 2)
        torch.testing.assert_close(ours, expected, equal_nan=True)


class _Numbered(nn.Module):
    """Writes numbers to parts of a tensor, as code that makes positions of tokens does: one of them is a size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.zeros(x.shape[0], 3)
        places[:, 0], places[:, 1] = x.shape[1], 7
        return x.sum(1, keepdim=True) + places


@pytest.mark.parametrize("general", [False, True])
def test_a_number_that_is_written_is_no_tensor_in_ram(capture_of: Callable[..., Any], general: bool) -> None:
    module, x = _Numbered(), torch.randn(4, 5)
    plain = capture_of(module, x, general=general).capture
    captured = capture_of(module, x, general=general, forms=op_substitutions.FOR_RECORDINGS).capture
    assert bool(_in_ram(plain)) == is_before("2.15"), "PyTorch 2.15 does it by itself"
    assert not _in_ram(captured)
    (found,) = captured.graph(*captured.binding.feed([], [x]))
    assert torch.equal(found, module(x))


def _in_ram(captured: Any) -> list[Any]:
    """Numbers that a graph has as tensors, of no axes, wherever everything else may be."""
    made = [node for node in captured.graph.graph.nodes if node.target is torch.ops.aten.scalar_tensor.default]
    return [*made, *captured.binding.constants]
