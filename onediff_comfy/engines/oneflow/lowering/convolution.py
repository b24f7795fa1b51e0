"""Convolutions, pooling and changes of resolution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import oneflow as flow
import oneflow.nn.functional as functional
import torch

from ....messages import message
from .table import Table

aten = torch.ops.aten
TABLE = Table()

_CONVOLUTIONS = (functional.conv1d, functional.conv2d, functional.conv3d)
_TRANSPOSED = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)


def _each(value: int | Sequence[int], axes: int) -> tuple[int, ...]:
    """One number per spatial axis; torch takes one for all."""
    numbers = (value,) if isinstance(value, int) else tuple(value)
    return numbers * axes if len(numbers) == 1 else numbers


@TABLE.lowers(aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)
def conv(
    x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Any:
    axes = weight.ndim - 2
    return _CONVOLUTIONS[axes - 1](
        x, weight, bias, _each(stride, axes), _each(padding, axes), _each(dilation, axes), groups
    )


@TABLE.lowers(aten.conv2d.padding)
def conv2d_padding(
    x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: str = "valid", dilation: Any = 1, groups: int = 1
) -> Any:
    amounts: tuple[int, ...] = (0, 0)
    if padding == "same":
        totals = [d * (k - 1) for d, k in zip(_each(dilation, 2), weight.shape[2:], strict=True)]
        if any(total % 2 for total in totals):
            raise NotImplementedError(message("padding that is not the same on both sides"))
        amounts = tuple(total // 2 for total in totals)
    return conv(x, weight, bias, stride, amounts, dilation, groups)


@TABLE.lowers(aten.conv_transpose2d.input)
def conv_transpose2d(
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    return functional.conv_transpose2d(
        x, weight, bias, _each(stride, 2), _each(padding, 2), _each(output_padding, 2), groups, _each(dilation, 2)
    )


@TABLE.lowers(aten.convolution.default)
def convolution(
    x: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Any:
    if not transposed:
        return conv(x, weight, bias, stride, padding, dilation, groups)
    axes = weight.ndim - 2
    return _TRANSPOSED[axes - 1](
        x,
        weight,
        bias,
        _each(stride, axes),
        _each(padding, axes),
        _each(output_padding, axes),
        groups,
        _each(dilation, axes),
    )


@TABLE.lowers(aten.avg_pool2d.default)
def avg_pool2d(
    x: Any,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    kernel = _each(kernel, 2)
    stride = _each(stride, 2) if stride else kernel
    return functional.avg_pool2d(
        x, kernel, stride, _each(padding, 2), ceil_mode, count_include_pad, divisor_override or 0
    )


@TABLE.lowers(aten.max_pool2d.default)
def max_pool2d(
    x: Any, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
) -> Any:
    kernel = _each(kernel, 2)
    stride = _each(stride, 2) if stride else kernel
    return functional.max_pool2d(x, kernel, stride, _each(padding, 2), _each(dilation, 2), False, ceil_mode)


@TABLE.lowers(aten.upsample_nearest2d.vec)
def upsample_nearest2d_vec(x: Any, size: Sequence[int] | None, scales: Sequence[float] | None) -> Any:
    if size is not None:
        return upsample_nearest2d(x, size)
    assert scales is not None  # torch has one or the other
    return upsample_nearest2d(x, [int(n * s) for n, s in zip(x.shape[2:], scales, strict=True)])


@TABLE.lowers(aten.upsample_nearest2d.default)
def upsample_nearest2d(x: Any, size: Sequence[int], *_scales: float | None) -> Any:
    return functional.interpolate(x, size=tuple(size), mode="nearest")


@TABLE.lowers(aten.upsample_bilinear2d.vec)
def upsample_bilinear2d_vec(x: Any, size: Any, align_corners: bool, scales: Any) -> Any:
    if size is None:
        # torch then computes with the factors as given, not with the quotient of sizes.
        return functional.interpolate(
            x, scale_factor=tuple(map(float, scales)), mode="bilinear", align_corners=align_corners
        )
    return functional.interpolate(x, size=tuple(size), mode="bilinear", align_corners=align_corners)


@TABLE.lowers(aten.pixel_shuffle.default)
def pixel_shuffle(x: Any, factor: int) -> Any:
    *batch, channels, height, width = x.shape
    cut = flow.reshape(x, (-1, channels // factor**2, factor, factor, height, width))
    moved = flow.permute(cut, (0, 1, 4, 2, 5, 3))
    return flow.reshape(moved, (*batch, channels // factor**2, height * factor, width * factor))


@TABLE.lowers(aten.pixel_unshuffle.default)
def pixel_unshuffle(x: Any, factor: int) -> Any:
    *batch, channels, height, width = x.shape
    cut = flow.reshape(x, (-1, channels, height // factor, factor, width // factor, factor))
    moved = flow.permute(cut, (0, 1, 3, 5, 2, 4))
    return flow.reshape(moved, (*batch, channels * factor**2, height // factor, width // factor))
