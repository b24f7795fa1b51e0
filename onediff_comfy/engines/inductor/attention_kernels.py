"""Attention by the kernel that is fastest, in the place of PyTorch's choice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._triton import has_triton

from ...capture.rewrites.op_substitutions import composite
from ...capture.shape_range import hint
from ...once import once

_FUSED_HEAD = 256  # the widest attention head that cuDNN and FlashAttention have kernels for
_TOKENS = 1024  # enough to see whether a kernel takes them
_CUDNN_CAPABILITIES = ((9, 0), (10, 0))
_CUDNN_NEWER_THAN = 91500
_SCORES_AT_ONCE = 1 << 25  # in float32 and once more in 16 bits: 200 MB
_MOST_COLUMNS = 1 << 16  # that our kernel keeps in registers
_COLUMNS_OF_8_WARPS = 4096


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    **options: Any,
) -> torch.Tensor:
    """``scaled_dot_product_attention`` by the kernel that is fastest; PyTorch's choice wherever there is a mask.

    A VAE has one head of 512, and no fused kernel takes it. PyTorch's remaining one needs 4.0 ms for 16384 tokens,
    where those for narrower heads are several times as fast per operation (H200, bfloat16).

    On data-centre GPUs from Hopper on, cuDNN's kernel takes 184 microseconds where FlashAttention 2 takes 303 (SDXL,
    4096 tokens), and 406 for 787 (Flux); against 77 tokens of a prompt both take the same (H200). PyTorch would choose
    cuDNN's by itself there, and the host has it choose FlashAttention.
    """
    plain = attn_mask is None and not (dropout_p or is_causal or any(options.values()))
    plain = plain and query.ndim == key.ndim == value.ndim == 4
    if plain and query.dtype in (torch.float16, torch.bfloat16) and query.device.type == "cuda":
        if query.shape[-1] > _FUSED_HEAD and _multiplies_into_float32():
            return wide_attention()(query, key, value, query.shape[-1] ** -0.5 if scale is None else scale)
        if _faster_by_cudnn(query, key, value):
            return cudnn_attention()(query, key, value, scale)
    return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **options)


def cudnn_attention() -> Callable[..., torch.Tensor]:
    """The operator ``onediff_comfy::cudnn_attention``.

    It takes query, key and value, [batch, heads, n or m, width] each, and a scale or None; it gives [batch, heads, n,
    width of the values] in the same dtype.
    """
    return composite("cudnn_attention(Tensor query, Tensor key, Tensor value, float? scale) -> Tensor", _by_cudnn)


def _by_cudnn(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None) -> torch.Tensor:
    output: torch.Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, compute_log_sumexp=False, scale=scale
    )[0]
    return output


def _faster_by_cudnn(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether cuDNN's kernel is the fastest for tensors like these, whose sizes may be symbols with hints."""
    if str(query.shape[2]) != str(key.shape[2]):  # comparing symbols would make them equal for good
        return False
    version = torch.backends.cudnn.version() or 0
    return prefers_cudnn(torch.cuda.get_device_capability(query.device), version) and _cudnn_takes(query, key, value)


def prefers_cudnn(capability: tuple[int, int], cudnn: int) -> bool:
    """Whether PyTorch, left alone, prefers cuDNN's attention to its own.

    As in ``check_prefer_cudnn_attention`` of PyTorch 2.11's ``sdp_utils.cpp``. That cannot be asked: PyTorch asks it
    once in a process, in its first attention, and the answer ends with whatever context that was in.

    Args:
        capability: major and minor compute capability of the device.
        cudnn: cuDNN's version, as 91501 for 9.15.1.
    """
    return capability in _CUDNN_CAPABILITIES and cudnn > _CUDNN_NEWER_THAN


def _cudnn_takes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    shapes = [[hint(size) for size in tensor.shape] for tensor in (query, key, value)]
    with _disable_current_modes():  # those of a trace
        # As models make them: [batch, tokens, heads * width], viewed. It makes no difference how many there are of
        # either, and a video's would take gigabytes.
        real_query, real_key, real_value = (
            torch.empty(1, min(tokens, _TOKENS), heads, width, dtype=query.dtype, device=query.device).transpose(1, 2)
            for _, heads, tokens, width in shapes
        )
        options = (None, 0.0, False, False)  # no mask, no dropout, not causal, as many heads of keys as of queries
        parameters = torch.backends.cuda.SDPAParams(real_query, real_key, real_value, *options)
        return torch.backends.cuda.can_use_cudnn_attention(parameters)


def _multiplies_into_float32() -> bool:
    return "dtype" in torch.ops.aten.bmm.overloads() and torch.version.hip is None


@once
def wide_attention() -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]:
    """The operator ``onediff_comfy::wide_attention``: softmax(scale · query · keyᵀ) · value by matrix products.

    The operator takes [batch, heads, n or m, width] each, and gives [batch, heads, n, width] in the same dtype.
    Scores, their scale and their softmax are in float32, as in fused kernels. 16384 tokens take 1,456 microseconds, and
    2,614 with the scale, the softmax and the rounding by kernels of PyTorch's (H200; benchmarks/NOTES.md, section 36).
    """

    @torch.library.custom_op("onediff_comfy::wide_attention", mutates_args=())
    def wide_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        heads, keys = query.shape[0] * query.shape[1], key.shape[2]
        queries, turned, values = query.flatten(0, 1), key.flatten(0, 1).transpose(1, 2), value.flatten(0, 1)
        output = query.new_empty(queries.shape)  # contiguous, however the arguments lie
        rows = max(1, _SCORES_AT_ONCE // (heads * keys))
        for few, into in zip(queries.split(rows, 1), output.split(rows, 1), strict=True):
            into.copy_(_product(_softmax(_product(few, turned), scale, values.dtype), values))
        return output.unflatten(0, query.shape[:2])

    @wide_attention.register_fake
    def _(query: torch.Tensor, _key: torch.Tensor, _value: torch.Tensor, _scale: float) -> torch.Tensor:
        return query.new_empty(query.shape)

    return wide_attention


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return a matrix product in float32: whoever wants fewer bits rounds each sum once.

    Where rows are no multiple of 8 numbers, cuBLAS cuts a sum into parts, and by PyTorch's default it adds these up in
    the output's dtype: in 16 bits, 1.4 times what rounding the sum costs (1023, 1025, 1026 and 1028 tokens, H200).
    """
    if left.is_cuda:
        return torch.bmm(left, right, out_dtype=torch.float32)
    return torch.bmm(left.float(), right.float())


def _block_of(columns: int) -> int:
    """Return how many numbers a kernel holds that holds a row: a power of two."""
    return max(16, 1 << (columns - 1).bit_length())


def _softmax(scores: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """Return softmax(scale · scores) along the last axis in ``dtype``; the scores may be written to.

    Args:
        scores: contiguous, in float32.
    """
    columns = scores.shape[-1]
    if not (scores.is_cuda and columns <= _MOST_COLUMNS and has_triton()):
        return scores.mul_(scale).softmax(-1).to(dtype)
    from .kernels import softmax_kernel

    found = torch.empty_like(scores, dtype=dtype)
    block = _block_of(columns)
    # By address: what is allocated in a recording lies nowhere yet, see triton_launch.py.
    softmax_kernel[(scores.numel() // columns,)](
        scores.data_ptr(),
        found.data_ptr(),
        scale,
        columns,
        IS_HALF=dtype == torch.float16,
        BLOCK=block,
        num_warps=8 if block <= _COLUMNS_OF_8_WARPS else 16,
    )
    return found
