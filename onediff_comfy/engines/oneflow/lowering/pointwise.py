"""Operators that work on each element by itself."""

from __future__ import annotations

import math
from typing import Any

import oneflow as flow
import oneflow.nn.functional as functional
import torch

from ....messages import message
from .table import Table, dtype_of

aten = torch.ops.aten
TABLE = Table()


def _one_argument(operator: Any, function: Any) -> None:
    TABLE.lowers(operator)(lambda x: function(x))


for _operator, _function in (
    (aten.abs.default, flow.abs),
    (aten.neg.default, flow.neg),
    (aten.exp.default, flow.exp),
    (aten.expm1.default, flow.expm1),
    (aten.log.default, flow.log),
    (aten.log1p.default, flow.log1p),
    (aten.sqrt.default, flow.sqrt),
    (aten.rsqrt.default, flow.rsqrt),
    (aten.reciprocal.default, flow.reciprocal),
    (aten.square.default, flow.square),
    (aten.sin.default, flow.sin),
    (aten.cos.default, flow.cos),
    (aten.tan.default, flow.tan),
    (aten.tanh.default, flow.tanh),
    (aten.atan.default, flow.atan),
    (aten.erf.default, flow.erf),
    (aten.sigmoid.default, flow.sigmoid),
    (aten.relu.default, flow.relu),
    (aten.silu.default, functional.silu),
    (aten.mish.default, functional.mish),
    (aten.hardswish.default, functional.hardswish),
    (aten.floor.default, flow.floor),
    (aten.ceil.default, flow.ceil),
    (aten.round.default, flow.round),
    (aten.sign.default, flow.sign),
    (aten.logical_not.default, flow.logical_not),
):
    _one_argument(_operator, _function)


@TABLE.lowers(aten.gelu.default)
def gelu(x: Any, approximate: str = "none") -> Any:
    if approximate == "none":
        return functional.gelu(x)
    # OneFlow's fast_gelu is this form too, on CUDA only. Hendrycks and Gimpel (2016).
    return 0.5 * x * (1.0 + flow.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))


@TABLE.lowers(aten.leaky_relu.default)
def leaky_relu(x: Any, slope: float = 0.01) -> Any:
    return functional.leaky_relu(x, slope)


@TABLE.lowers(aten.elu.default)
def elu(x: Any, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Any:
    negative = alpha * (flow.exp(flow.clamp(x, max=0.0) * input_scale) - 1.0)
    return (flow.relu(x) + negative) * scale


@TABLE.lowers(aten.softplus.default)
def softplus(x: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
    return functional.softplus(x, float(beta), float(threshold))


@TABLE.lowers(aten.add.Tensor, aten.add.Scalar)
def add(a: Any, b: Any, alpha: float = 1) -> Any:
    return a + (b if alpha == 1 else b * alpha)


@TABLE.lowers(aten.sub.Tensor, aten.sub.Scalar)
def sub(a: Any, b: Any, alpha: float = 1) -> Any:
    return a - (b if alpha == 1 else b * alpha)


@TABLE.lowers(aten.rsub.Tensor, aten.rsub.Scalar)
def rsub(a: Any, b: Any, alpha: float = 1) -> Any:
    return b - (a if alpha == 1 else a * alpha)


@TABLE.lowers(aten.mul.Tensor, aten.mul.Scalar)
def mul(a: Any, b: Any) -> Any:
    return a * b


@TABLE.lowers(aten.div.Tensor, aten.div.Scalar)
def div(a: Any, b: Any) -> Any:
    if not a.is_floating_point() and not (isinstance(b, flow.Tensor) and b.is_floating_point()):
        a = a.to(flow.float32)  # torch divides whole numbers as real ones
    return a / b


@TABLE.lowers(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_rounded(a: Any, b: Any, rounding_mode: str | None = None) -> Any:
    if rounding_mode is None:
        return div(a, b)
    if a.is_floating_point() or isinstance(b, float) or (isinstance(b, flow.Tensor) and b.is_floating_point()):
        quotient = a / b
    else:  # exact up to 2**53, beyond which no size or index goes
        quotient = a.to(flow.float64) / (b.to(flow.float64) if isinstance(b, flow.Tensor) else float(b))
    down = flow.floor(quotient)
    return down if rounding_mode == "floor" else flow.where(quotient < 0, flow.ceil(quotient), down)


@TABLE.lowers(aten.floor_divide.default)
def floor_divide(a: Any, b: Any) -> Any:
    return div_rounded(a, b, "floor")


@TABLE.lowers(aten.remainder.Scalar, aten.remainder.Tensor)
def remainder(a: Any, b: Any) -> Any:
    return a - div_rounded(a, b, "floor").to(a.dtype) * b


@TABLE.lowers(aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor)
def pow_(a: Any, b: Any) -> Any:
    return flow.pow(a, b)


@TABLE.lowers(aten.pow.Scalar)
def pow_of_number(base: float, exponent: Any) -> Any:
    return flow.pow(flow.ones_like(exponent) * float(base), exponent)


@TABLE.lowers(aten.maximum.default)
def maximum(a: Any, b: Any) -> Any:
    return flow.maximum(a, b)


@TABLE.lowers(aten.minimum.default)
def minimum(a: Any, b: Any) -> Any:
    return flow.minimum(a, b)


@TABLE.lowers(aten.clamp.default)
def clamp(x: Any, low: float | None = None, high: float | None = None) -> Any:
    return flow.clamp(x, low, high)


@TABLE.lowers(aten.clamp_min.default)
def clamp_min(x: Any, low: float) -> Any:
    return flow.clamp(x, min=low)


@TABLE.lowers(aten.clamp_max.default)
def clamp_max(x: Any, high: float) -> Any:
    return flow.clamp(x, max=high)


@TABLE.lowers(aten.addcmul.default)
def addcmul(x: Any, a: Any, b: Any, value: float = 1) -> Any:
    product = a * b
    return x + (product if value == 1 else product * value)


@TABLE.lowers(aten.addcdiv.default)
def addcdiv(x: Any, a: Any, b: Any, value: float = 1) -> Any:
    quotient = a / b
    return x + (quotient if value == 1 else quotient * value)


@TABLE.lowers(aten.lerp.Scalar, aten.lerp.Tensor)
def lerp(start: Any, end: Any, weight: Any) -> Any:
    return start + (end - start) * weight


@TABLE.lowers(aten.eq.Tensor, aten.eq.Scalar)
def eq(a: Any, b: Any) -> Any:
    return flow.eq(a, b)


@TABLE.lowers(aten.ne.Tensor, aten.ne.Scalar)
def ne(a: Any, b: Any) -> Any:
    return flow.ne(a, b)


@TABLE.lowers(aten.lt.Tensor, aten.lt.Scalar)
def lt(a: Any, b: Any) -> Any:
    return flow.lt(a, b)


@TABLE.lowers(aten.le.Tensor, aten.le.Scalar)
def le(a: Any, b: Any) -> Any:
    return flow.le(a, b)


@TABLE.lowers(aten.gt.Tensor, aten.gt.Scalar)
def gt(a: Any, b: Any) -> Any:
    return flow.gt(a, b)


@TABLE.lowers(aten.ge.Tensor, aten.ge.Scalar)
def ge(a: Any, b: Any) -> Any:
    return flow.ge(a, b)


@TABLE.lowers(aten.logical_and.default)
def logical_and(a: Any, b: Any) -> Any:
    return flow.logical_and(a, b)


@TABLE.lowers(aten.logical_or.default)
def logical_or(a: Any, b: Any) -> Any:
    return flow.logical_or(a, b)


@TABLE.lowers(aten.where.self)
def where(condition: Any, a: Any, b: Any) -> Any:
    return flow.where(condition, a, b)


@TABLE.lowers(aten.masked_fill.Scalar)
def masked_fill(x: Any, mask: Any, value: float) -> Any:
    return flow.masked_fill(x, mask, value)


@TABLE.lowers(aten._to_copy.default)
def to_copy(x: Any, dtype: torch.dtype | None = None, device: torch.device | None = None, **_layout: Any) -> Any:
    if device is not None and torch.device(device).type != x.device.type:
        raise NotImplementedError(message("a tensor moves from {here} to {device}", here=x.device.type, device=device))
    return x if dtype is None else x.to(dtype_of(dtype))
