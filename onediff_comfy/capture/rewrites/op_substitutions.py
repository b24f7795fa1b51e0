"""Functions written otherwise than PyTorch writes them, and traced in the place of its own."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import _disable_current_modes

from ..shape_range import hint

Forms = Mapping[Callable[..., Any], Callable[..., Any]]
"""What is called, by what the model calls."""

_FUSED_HEAD = 256  # the widest attention head that cuDNN and FlashAttention have kernels for
_TOKENS = 1024  # enough to see whether a kernel takes them
_CUDNN_CAPABILITIES = ((9, 0), (10, 0))
_CUDNN_NEWER_THAN = 91500
_SCORES_AT_ONCE = 1 << 25  # in float32 and once more in 16 bits: 200 MB


def linspace(start: Any, end: Any, steps: int, **options: Any) -> torch.Tensor:
    """``torch.linspace``; arithmetic where the number of steps is a symbol, which export would take for a number."""
    if not isinstance(steps, torch.SymInt):
        return torch.linspace(start, end, steps, **options)
    counted: torch.Tensor = torch.arange(steps, **{"dtype": torch.get_default_dtype(), **options})
    return start + counted * ((end - start) / torch.sym_max(steps - 1, 1))


def group_norm(
    image: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    _cudnn: bool = True,
) -> torch.Tensor:
    """``torch.group_norm`` with its statistics taken in two stages, row by row and then over rows.

    A group of one image is up to a million values, and there are few groups: a GPU needs them split
    into many small sums. Inductor splits a reduction by itself where it knows how long it is, and not
    where the length is a symbol. Rows are equally long, so by Chan, Golub and LeVeque (1979) the variance
    of all is the mean of the rows' variances plus the variance of the rows' means; as stable as one pass.

    What follows is one product and one sum, as in PyTorch's own kernels: 268 MB of a VAE's take 653 microseconds
    instead of 862, with what is around them (H200; benchmarks/NOTES.md, section 35).

    Args:
        image: [batch, channels, ..., width]; statistics are taken in float32 at least.
        groups: divides channels.
        weight: [channels] or None.
        bias: [channels] or None.
        eps: added to the variance.

    Returns:
        The normalised image, of the image's shape and dtype.
    """
    batch, channels = image.shape[:2]
    width = image.shape[-1] if image.ndim > 2 else 1
    rows = image.reshape(batch, groups, channels // groups, -1, width)
    values = rows.to(torch.float32) if image.dtype in (torch.float16, torch.bfloat16) else rows
    row_variance, row_mean = torch.var_mean(values, dim=(2, 4), correction=0, keepdim=True)
    spread, mean = torch.var_mean(row_mean, dim=3, correction=0, keepdim=True)
    factor = torch.rsqrt(row_variance.mean(dim=3, keepdim=True) + spread + eps)
    by_channel = (1, groups, channels // groups, 1, 1)
    if weight is not None:
        factor = factor * weight.reshape(by_channel)
    term = -mean * factor
    if bias is not None:
        term = term + bias.reshape(by_channel)
    return (values * factor + term).to(image.dtype).reshape(image.shape)


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


def gelu(values: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    """``F.gelu``; in its approximation by tanh, as ``x · sigmoid(2u)`` in place of ``x · (1 + tanh(u)) / 2``.

    Both are the same function (Hendrycks and Gimpel, 2016). The sigmoid takes one exponential; the tanh that compilers
    call takes some twenty instructions, and bounds kernels that do little else: 50 million elements took 88
    microseconds, for which their bytes take 36 (Flux, fp8, H200). Where u is far below 0 it is also the more exact.

    Args:
        values: of any shape; computed in float32 where their dtype has 16 bits.
    """
    if approximate != "tanh" or not values.is_floating_point():
        return F.gelu(values, approximate=approximate)
    x = values.to(torch.promote_types(values.dtype, torch.float32))
    twice_u = 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    return (x * torch.sigmoid(twice_u)).to(values.dtype)


def set_item(tensor: torch.Tensor, index: Any, value: Any) -> None:
    """``tensor[index] = value``, by ``fill_`` where a number is written to a part.

    Traced as it is, the number becomes a tensor in RAM, which is copied to the device in each call. No CUDA graph can
    be recorded with that.

    Args:
        index: as for ``Tensor.__setitem__``.
        value: likewise.
    """
    parts = index if isinstance(index, tuple) else (index,)
    shows_a_part = all(part is None or part is Ellipsis or type(part) in (int, slice, torch.SymInt) for part in parts)
    if shows_a_part and isinstance(value, (bool, int, float, torch.SymInt, torch.SymFloat)):
        tensor[index].fill_(value)  # type: ignore[arg-type,unused-ignore]
    else:
        tensor[index] = value


def composite(schema: str, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """An operator of ours that is one node of a capture, and that compilers take to pieces.

    Args:
        schema: its name and types, as in ``double(Tensor x) -> Tensor``.
        function: what it computes, in torch's operators.
    """
    return _composite(schema, function)[1]


@functools.cache
def _composite(
    schema: str, function: Callable[..., torch.Tensor]
) -> tuple[torch.library.Library, Callable[..., torch.Tensor]]:
    library = torch.library.Library("onediff_comfy", "FRAGMENT")  # defines the operator for as long as it is kept
    library.define(schema)
    name = schema.partition("(")[0]
    library.impl(name, function, "CompositeImplicitAutograd")
    return library, getattr(torch.ops.onediff_comfy, name)


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


@functools.cache
def wide_attention() -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]:
    """The operator ``onediff_comfy::wide_attention``: softmax(scale · query · keyᵀ) · value by matrix products.

    The operator takes [batch, heads, n or m, width] each, and gives [batch, heads, n, width] in the same dtype.
    Scores, their scale and their softmax are in float32, as in fused kernels.
    """

    @torch.library.custom_op("onediff_comfy::wide_attention", mutates_args=())
    def wide_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        heads, keys = query.shape[0] * query.shape[1], key.shape[2]
        queries, turned, values = query.flatten(0, 1), key.flatten(0, 1).transpose(1, 2), value.flatten(0, 1)
        output = query.new_empty(queries.shape)  # contiguous, however the arguments lie
        rows = max(1, _SCORES_AT_ONCE // (heads * keys))
        for few, into in zip(queries.split(rows, 1), output.split(rows, 1), strict=True):
            scores = _product(few, turned).mul_(scale)
            into.copy_(torch.bmm(scores.softmax(-1).to(values.dtype), values))
        return output.unflatten(0, query.shape[:2])

    @wide_attention.register_fake
    def _(query: torch.Tensor, _key: torch.Tensor, _value: torch.Tensor, _scale: float) -> torch.Tensor:
        return query.new_empty(query.shape)

    return wide_attention


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    if left.is_cuda:
        return torch.bmm(left, right, out_dtype=torch.float32)
    return torch.bmm(left.float(), right.float())


SIZELESS: Forms = {torch.linspace: linspace}
"""Needed wherever sizes are symbols."""

FOR_RECORDINGS: Forms = {torch.Tensor.__setitem__: set_item}
"""What can be recorded as a CUDA graph only so."""

FOR_INDUCTOR: Forms = {
    **FOR_RECORDINGS,
    torch.group_norm: group_norm,
    F.gelu: gelu,
    F.group_norm: group_norm,
    F.scaled_dot_product_attention: attention,
}
"""What Inductor does better on, whether or not it knows the sizes."""
