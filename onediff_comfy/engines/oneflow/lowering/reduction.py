"""Reductions and normalisations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import oneflow as flow
import torch

from ....messages import message
from .table import Table, axis, dtype_of

aten = torch.ops.aten
TABLE = Table()


def _axes(x: Any, axes: int | Sequence[int] | None) -> list[int]:
    if axes is None or axes == []:
        return list(range(x.ndim))
    return [axis(a, x) for a in ([axes] if isinstance(axes, int) else axes)]


def _converted(x: Any, dtype: torch.dtype | None) -> Any:
    return x if dtype is None else x.to(dtype_of(dtype))


@TABLE.lowers(aten.sum.default, aten.sum.dim_IntList)
def sum_(x: Any, axes: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Any:
    if x.dtype in (flow.bool, flow.uint8, flow.int8, flow.int32) and dtype is None:
        x = x.to(flow.int64)  # as torch does, so that a sum does not overflow
    return flow.sum(_converted(x, dtype), dim=_axes(x, axes), keepdim=keepdim)


@TABLE.lowers(aten.mean.default, aten.mean.dim)
def mean(x: Any, axes: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Any:
    return flow.mean(_converted(x, dtype), dim=_axes(x, axes), keepdim=keepdim)


@TABLE.lowers(aten.var.correction)
def var(x: Any, axes: Any = None, correction: float | None = None, keepdim: bool = False) -> Any:
    return _var_mean(x, axes, correction, keepdim)[0]


@TABLE.lowers(aten.std.correction)
def std(x: Any, axes: Any = None, correction: float | None = None, keepdim: bool = False) -> Any:
    return flow.sqrt(_var_mean(x, axes, correction, keepdim)[0])


@TABLE.lowers(aten.var_mean.correction)
def _var_mean(x: Any, axes: Any = None, correction: float | None = None, keepdim: bool = False) -> tuple[Any, Any]:
    wanted = _axes(x, axes)
    count = 1
    for a in wanted:
        count *= x.shape[a]
    average = flow.mean(x, dim=wanted, keepdim=True)
    difference = x - average
    squares = flow.sum(difference * difference, dim=wanted, keepdim=True)
    variance = squares / (count - (1 if correction is None else correction))
    if keepdim:
        return variance, average
    kept = [size for a, size in enumerate(x.shape) if a not in wanted]
    return flow.reshape(variance, kept), flow.reshape(average, kept)


@TABLE.lowers(aten.amax.default)
def amax(x: Any, axes: Any = (), keepdim: bool = False) -> Any:
    return flow.amax(x, dim=_axes(x, list(axes)), keepdim=keepdim)


@TABLE.lowers(aten.amin.default)
def amin(x: Any, axes: Any = (), keepdim: bool = False) -> Any:
    return flow.amin(x, dim=_axes(x, list(axes)), keepdim=keepdim)


@TABLE.lowers(aten.max.default)
def max_(x: Any) -> Any:
    return flow.amax(x, dim=_axes(x, None))


@TABLE.lowers(aten.min.default)
def min_(x: Any) -> Any:
    return flow.amin(x, dim=_axes(x, None))


@TABLE.lowers(aten.argmax.default)
def argmax(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    return flow.argmax(x, dim=dim, keepdim=keepdim)


@TABLE.lowers(aten.linalg_vector_norm.default)
def vector_norm(
    x: Any, order: float = 2, axes: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Any:
    if order != 2:
        raise NotImplementedError(message("a norm of order {order}", order=order))
    x = _converted(x, dtype)
    return flow.sqrt(flow.sum(x * x, dim=_axes(x, axes), keepdim=keepdim))


@TABLE.lowers(aten.cumsum.default)
def cumsum(x: Any, dim: int, dtype: torch.dtype | None = None) -> Any:
    return flow.cumsum(_converted(x, dtype), axis(dim, x))


@TABLE.lowers(aten._softmax.default)
def softmax(x: Any, dim: int, _half_to_float: bool = False) -> Any:
    return flow.softmax(x, axis(dim, x))


@TABLE.lowers(aten.softmax.int)
def softmax_int(x: Any, dim: int, dtype: torch.dtype | None = None) -> Any:
    return flow.softmax(_converted(x, dtype), axis(dim, x))


@TABLE.lowers(aten.layer_norm.default)
def layer_norm(
    x: Any, shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5, _cudnn: bool = True
) -> Any:
    return flow.nn.functional.layer_norm(x, tuple(shape), weight, bias, eps)


@TABLE.lowers(aten.rms_norm.default)
def rms_norm(x: Any, shape: Sequence[int], weight: Any = None, eps: float | None = None) -> Any:
    axes = list(range(x.ndim - len(shape), x.ndim))
    # In float32 at least, and with torch's default of one machine epsilon.
    values = x.to(flow.float32) if x.dtype in (flow.float16, flow.bfloat16) else x
    eps = flow.finfo(values.dtype).eps if eps is None else eps
    normal = (values * flow.rsqrt(flow.mean(values * values, dim=axes, keepdim=True) + eps)).to(x.dtype)
    return normal if weight is None else normal * weight


@TABLE.lowers(aten.group_norm.default)
def group_norm(
    x: Any, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, _cudnn: bool = True
) -> Any:
    if x.device.type == "cuda":
        return flow._C.group_norm(x, weight, bias, weight is not None, groups, eps)
    # Without a kernel for the CPU it is put together from others.
    grouped = flow.reshape(x, (x.shape[0], groups, -1))
    difference = grouped - flow.mean(grouped, dim=[2], keepdim=True)
    variance = flow.mean(difference * difference, dim=[2], keepdim=True)
    normal = flow.reshape(difference * flow.rsqrt(variance + eps), x.shape)
    per_channel = (1, x.shape[1], *(1 for _ in x.shape[2:]))
    if weight is not None:
        normal = normal * flow.reshape(weight, per_channel)
    return normal if bias is None else normal + flow.reshape(bias, per_channel)
