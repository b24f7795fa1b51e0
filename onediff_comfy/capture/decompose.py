"""Functions of a general capture, written so that compilers do well on them without knowing sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


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
    rstd = torch.rsqrt(row_variance.mean(dim=3, keepdim=True) + spread + eps)
    normal = (values - mean) * rstd
    scale = (1, groups, channels // groups, 1, 1)
    if weight is not None:
        normal = normal * weight.reshape(scale)
    if bias is not None:
        normal = normal + bias.reshape(scale)
    return normal.to(image.dtype).reshape(image.shape)


def linspace(start: Any, end: Any, steps: int, **options: Any) -> torch.Tensor:
    """``torch.linspace``; arithmetic where the number of steps is a symbol, which export would take for a number."""
    if not isinstance(steps, torch.SymInt):
        return torch.linspace(start, end, steps, **options)
    counted: torch.Tensor = torch.arange(steps, **{"dtype": torch.get_default_dtype(), **options})
    return start + counted * ((end - start) / torch.sym_max(steps - 1, 1))


GENERAL_FORMS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.linspace: linspace,
    torch.group_norm: group_norm,
    torch.nn.functional.group_norm: group_norm,
}
"""What is traced in place of torch's functions where sizes are symbols."""
