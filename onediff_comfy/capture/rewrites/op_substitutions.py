"""Functions written otherwise than PyTorch writes them, and traced in the place of its own."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

Forms = Mapping[Callable[..., Any], Callable[..., Any]]
"""What is called, by what the model calls."""


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
    """``torch.group_norm`` with its statistics taken in two stages: of each channel's rows, then over all of a group's.

    A group of one image is up to a million values, and there are few groups: a GPU needs them split
    into many small sums. Inductor splits a reduction by itself where it knows how long it is, and not
    where the length is a symbol. Rows are equally long, so by Chan, Golub and LeVeque (1979) the variance
    of all is the mean of the rows' variances plus the variance of the rows' means; as stable as one pass.

    A row is one channel's. A group's four channels lie side by side, 256 bytes from the next pixel's, and an index into
    them takes a division by a symbol. What follows is one product and one sum, as in PyTorch's own kernels. 268 MB of a
    VAE's take 367 microseconds, with what is around them, where rows of all channels of a group took 644 (H200;
    benchmarks/NOTES.md, section 36).

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
    row_variance, row_mean = _of_rows(values) if image.dtype == values.dtype else _of_coarse_rows(values)
    spread, mean = torch.var_mean(row_mean, dim=(2, 3), correction=0, keepdim=True)
    factor = torch.rsqrt(row_variance.mean(dim=(2, 3), keepdim=True) + spread + eps)
    by_channel = (1, groups, channels // groups, 1, 1)
    if weight is not None:
        factor = factor * weight.reshape(by_channel)
    term = -mean * factor
    if bias is not None:
        term = term + bias.reshape(by_channel)
    return (values * factor + term).to(image.dtype).reshape(image.shape)


def _of_rows(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the variance and the mean of each row along the last axis."""
    variance, mean = torch.var_mean(values, dim=-1, correction=0, keepdim=True)
    return variance, mean


def _of_coarse_rows(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same of values that had 16 bits, from sums of their squares: without a division for each value.

    They are counted from a row's first value, since differences of large squares are inexact. What is lost in float32
    is then below what 16 bits leave out.
    """
    first = values[..., :1]
    beyond = values - first
    mean, squares = beyond.mean(-1, keepdim=True), (beyond * beyond).mean(-1, keepdim=True)
    return (squares - mean * mean).clamp_min(0), first + mean


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


SIZELESS: Forms = {torch.linspace: linspace}
"""Needed wherever sizes are symbols."""

FOR_RECORDINGS: Forms = {torch.Tensor.__setitem__: set_item}
"""What can be recorded as a CUDA graph only so."""

FOR_INDUCTOR: Forms = {
    **FOR_RECORDINGS,
    torch.group_norm: group_norm,
    F.gelu: gelu,
    F.group_norm: group_norm,
}
"""What Inductor does better on, whether or not it knows the sizes."""
