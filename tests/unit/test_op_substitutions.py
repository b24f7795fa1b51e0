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
from torch.nn.attention import SDPBackend, sdpa_kernel

from onediff_comfy.capture.rewrites import op_substitutions, step_cache_split


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("batch", "heads", "n", "m"), [(1, 1, 70, 70), (2, 3, 33, 64)])
def test_wide_attention_is_attention(
    batch: int, heads: int, n: int, m: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(op_substitutions, "_SCORES_AT_ONCE", 16 * m * batch * heads)  # 16 rows at a time, and a rest
    query, key, value = (torch.randn(batch, heads, size, 512, dtype=dtype) for size in (n, m, m))
    exact = F.scaled_dot_product_attention(query.double(), key.double(), value.double())
    eager = F.scaled_dot_product_attention(query, key, value)
    ours = op_substitutions.wide_attention()(query, key, value, 512**-0.5)
    assert (ours.shape, ours.dtype) == (eager.shape, eager.dtype)
    assert (ours - exact).norm() <= 1.2 * (eager - exact).norm() + 1e-6 * exact.norm()


@pytest.mark.parametrize("heads_last", [False, True])
def test_wide_attention_is_an_operator_that_can_be_traced(heads_last: bool) -> None:
    shapes = [(1, size, 2, 512) if heads_last else (1, 2, size, 512) for size in (5, 7, 7)]
    operands = (*(torch.randn(shape).transpose(1, 2 if heads_last else 1) for shape in shapes), 0.1)
    torch.library.opcheck(op_substitutions.wide_attention(), operands, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("options", [{"is_causal": True}, {"attn_mask": torch.randn(6, 6)}, {}])
def test_other_attention_stays_as_it_is(options: dict[str, torch.Tensor | bool]) -> None:
    query, key, value = torch.randn(3, 1, 2, 6, 300).unbind()
    expected = F.scaled_dot_product_attention(query, key, value, **options)
    torch.testing.assert_close(op_substitutions.attention(query, key, value, **options), expected, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_wide_attention_is_no_worse_than_the_kernel_it_replaces(dtype: torch.dtype) -> None:
    query, key, value = (torch.randn(1, 1, 5000, 512, dtype=dtype, device="cuda") for _ in range(3))
    exact = F.scaled_dot_product_attention(query.float(), key.float(), value.float())
    eager = F.scaled_dot_product_attention(query, key, value)
    ours = op_substitutions.attention(query, key, value)
    assert (ours - exact).norm() <= 1.1 * (eager - exact).norm()


class _ByCudnn(nn.Module):
    def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        query, key = (x.reshape(x.shape[0], -1, 4, 64).transpose(1, 2) for x in (query, key))
        return op_substitutions.cudnn_attention()(query, key, key, None)


def test_cudnns_attention_is_one_node_of_a_capture(capture_of: Callable[..., Any]) -> None:
    captured = capture_of(_ByCudnn(), *(torch.randn(2, n, 256).half() for n in (48, 77)), general=True).capture
    (node,) = (n for n in captured.graph.graph.nodes if n.op == "call_function" and "attention" in str(n.target))
    assert node.target is torch.ops.onediff_comfy.cudnn_attention.default
    assert (node.meta["val"].dtype, node.meta["val"].stride()[1:]) == (torch.half, (64, 256, 1))  # as the query lies
    assert step_cache_split.work(captured) > 0


class _Attention(nn.Module):
    def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, key)


def _preferred() -> bool:
    """Whether cuDNN's attention is used on the GPU that is here."""
    return op_substitutions.prefers_cudnn(torch.cuda.get_device_capability(), torch.backends.cudnn.version() or 0)


def _named(captured: Any) -> bool:
    """Whether a capture says that attention is to be cuDNN's."""
    return torch.ops.onediff_comfy.cudnn_attention.default in {node.target for node in captured.graph.graph.nodes}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("allowed", [False, True])
def test_a_capture_names_cudnns_attention_where_it_is_faster(capture_of: Callable[..., Any], allowed: bool) -> None:
    """Whatever the host has PyTorch prefer, in the first attention of a process and in the second."""
    image, prompt = (torch.randn(2, tokens, 4, 64, device="cuda").half().transpose(1, 2) for tokens in (96, 77))
    for _ in range(2):
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION], set_priority=True):
            torch.backends.cuda.enable_cudnn_sdp(allowed)
            of_itself = capture_of(_Attention(), image, image, forms=op_substitutions.FOR_INDUCTOR).capture
            of_another = capture_of(_Attention(), image, prompt, forms=op_substitutions.FOR_INDUCTOR).capture
        assert _named(of_itself) == (_preferred() and allowed)
        assert not _named(of_another)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_capture_for_all_sizes_names_cudnns_attention_of_an_image_to_itself(capture_of: Callable[..., Any]) -> None:
    class ToItself(nn.Module):
        def forward(self, image: torch.Tensor) -> torch.Tensor:
            heads = image.reshape(image.shape[0], -1, 4, 64).transpose(1, 2)
            return F.scaled_dot_product_attention(heads, heads * 2, heads)

    image = torch.randn(2, 96, 256, device="cuda").half()
    captured = capture_of(ToItself(), image, general=True, forms=op_substitutions.FOR_INDUCTOR).capture
    assert _named(captured) == _preferred()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "width", "tokens"), [(10, 64, 4096), (20, 64, 1000), (24, 128, 1536)])
def test_cudnns_attention_is_no_worse_than_the_kernel_it_replaces(
    heads: int, width: int, tokens: int, dtype: torch.dtype
) -> None:
    if not _preferred():
        pytest.skip("cuDNN's attention is not used on this GPU")
    query, key, value = (
        torch.randn(2, tokens, heads, width, dtype=dtype, device="cuda").transpose(1, 2) for _ in range(3)
    )
    exact = F.scaled_dot_product_attention(query.float(), key.float(), value.float())
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        flash = F.scaled_dot_product_attention(query, key, value)
    ours = op_substitutions.cudnn_attention()(query, key, value, None)
    assert (ours - exact).norm() <= 1.1 * (flash - exact).norm()


@pytest.mark.parametrize(
    ("capability", "cudnn", "preferred"),
    [
        ((9, 0), 91900, True),
        ((10, 0), 91501, True),
        ((9, 0), 91002, False),
        ((8, 9), 91900, False),
        ((12, 0), 0, False),
    ],
)
def test_cudnns_attention_is_for_gpus_that_pytorch_prefers_it_on(
    capability: tuple[int, int], cudnn: int, preferred: bool
) -> None:
    assert op_substitutions.prefers_cudnn(capability, cudnn) == preferred


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
