"""engines/inductor/attention_kernels.py: attention by another kernel is attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from onediff_comfy.capture.rewrites import step_cache_split
from onediff_comfy.engines.inductor import attention_kernels as attention
from onediff_comfy.engines.inductor.engine import InductorEngine

FORMS = InductorEngine().forms()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("batch", "heads", "n", "m"), [(1, 1, 70, 70), (2, 3, 33, 64)])
def test_wide_attention_is_attention(
    batch: int, heads: int, n: int, m: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_SCORES_AT_ONCE", 16 * m * batch * heads)  # 16 rows at a time, and a rest
    query, key, value = (torch.randn(batch, heads, size, 512, dtype=dtype) for size in (n, m, m))
    exact = F.scaled_dot_product_attention(query.double(), key.double(), value.double())
    eager = F.scaled_dot_product_attention(query, key, value)
    ours = attention.wide_attention()(query, key, value, 512**-0.5)
    assert (ours.shape, ours.dtype) == (eager.shape, eager.dtype)
    assert (ours - exact).norm() <= 1.2 * (eager - exact).norm() + 1e-6 * exact.norm()


def test_the_kernel_holds_a_row_whole() -> None:
    for columns in (1, 9, 16, 17, 77, 1000, 1024, 1025, 16384, 16385, 1 << 16):
        block = attention._block_of(columns)
        assert max(columns, 16) <= block < max(2 * columns, 32) and block.bit_count() == 1


@pytest.mark.parametrize("heads_last", [False, True])
def test_wide_attention_is_an_operator_that_can_be_traced(heads_last: bool) -> None:
    shapes = [(1, size, 2, 512) if heads_last else (1, 2, size, 512) for size in (5, 7, 7)]
    operands = (*(torch.randn(shape).transpose(1, 2 if heads_last else 1) for shape in shapes), 0.1)
    torch.library.opcheck(attention.wide_attention(), operands, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("options", [{"is_causal": True}, {"attn_mask": torch.randn(6, 6)}, {}])
def test_other_attention_stays_as_it_is(options: dict[str, torch.Tensor | bool]) -> None:
    query, key, value = torch.randn(3, 1, 2, 6, 300).unbind()
    expected = F.scaled_dot_product_attention(query, key, value, **options)
    torch.testing.assert_close(attention.attention(query, key, value, **options), expected, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1000, 5000])
def test_wide_attention_is_no_worse_than_the_kernel_it_replaces(dtype: torch.dtype, tokens: int) -> None:
    error, eagers = _errors_of_wide_attention(dtype, tokens)
    assert error <= 1.1 * eagers


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [9, 1025, 16384])
def test_wide_attention_is_off_by_what_16_bits_cost(dtype: torch.dtype, tokens: int) -> None:
    """Shares of the softmax are rounded to 16 bits, large ones and those below float16's normal ones; so are sums."""
    query, key, value = (torch.randn(1, 1, tokens, 512, dtype=dtype, device="cuda") for _ in range(3))
    shares = (query.double() @ key.double().mT * 512**-0.5).softmax(-1)
    rounded = (shares.to(dtype).double() @ value.double()).to(dtype)
    exact = shares @ value.double()
    assert (attention.attention(query, key, value) - exact).norm() <= 1.1 * (rounded - exact).norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_wide_attention_of_scores_whose_powers_overflow(dtype: torch.dtype) -> None:
    query, key, value = (torch.randn(1, 1, 1000, 512, dtype=dtype, device="cuda") for _ in range(3))
    query *= 60
    exact = F.scaled_dot_product_attention(query.double(), key.double(), value.double())
    # A share next to 1 is rounded to 16 bits, and so is the output.
    assert (attention.attention(query, key, value) - exact).norm() <= 2 * torch.finfo(dtype).eps * exact.norm()


def _errors_of_wide_attention(dtype: torch.dtype, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    query, key, value = (torch.randn(1, 1, tokens, 512, dtype=dtype, device="cuda") for _ in range(3))
    exact = F.scaled_dot_product_attention(query.float(), key.float(), value.float())
    eager = F.scaled_dot_product_attention(query, key, value)
    return (attention.attention(query, key, value) - exact).norm(), (eager - exact).norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_wide_attention_can_be_recorded() -> None:
    """With the server's allocator, too: what is allocated in a recording lies nowhere until it is replayed."""
    operands = [torch.randn(1, 1, 3000, 512, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
    expected = attention.attention(*operands)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attention.attention(*operands)
        kept = found.clone()
    graph.replay()
    torch.testing.assert_close(kept, expected, rtol=0, atol=0)


class _ByCudnn(nn.Module):
    def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        query, key = (x.reshape(x.shape[0], -1, 4, 64).transpose(1, 2) for x in (query, key))
        return attention.cudnn_attention()(query, key, key, None)


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
    return attention.prefers_cudnn(torch.cuda.get_device_capability(), torch.backends.cudnn.version() or 0)


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
            of_itself = capture_of(_Attention(), image, image, forms=FORMS).capture
            of_another = capture_of(_Attention(), image, prompt, forms=FORMS).capture
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
    captured = capture_of(ToItself(), image, general=True, forms=FORMS).capture
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
    ours = attention.cudnn_attention()(query, key, value, None)
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
    assert attention.prefers_cudnn(capability, cudnn) == preferred
