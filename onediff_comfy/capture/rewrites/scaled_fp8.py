"""Numbers of few bits with a scale, in operators that a compiler fuses with what is around them.

Libraries round to 8 bits and back by kernels of their own, to which a compiler has to hand everything in memory.
Written in plain operators, rounding is done by the kernel that computes what is rounded: a norm, an activation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .op_substitutions import composite

_ADA = (8, 9)  # Triton has 8-bit floating point from here on
_TENSORWISE = 0  # of torch.nn.functional.ScalingType
_NOT_GIVEN: Sequence[Any] = (
    None,
    None,
    (),
    False,
)  # what _scaled_mm_v2 takes for bias, dtype, contracted dimensions, accumulation


def fuses_fp8(device: torch.device) -> bool:
    """Return True if Inductor's kernels for ``device`` can read and write 8-bit floating point."""
    if device.type == "cuda" and torch.version.hip is None:
        return torch.cuda.get_device_capability(device) >= _ADA
    return device.type == "cpu"


def conversion_saturates(device: torch.device) -> bool:
    """Return True if Inductor's kernels for ``device`` turn what is too large into the largest number.

    The instruction that converts does (PTX ISA, ``cvt`` with ``.satfinite``), and it keeps what is not a number.
    PyTorch's own conversion, which Inductor's C++ calls, gives no number there.
    """
    return device.type == "cuda" and fuses_fp8(device)


def quantize_fp8(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``values / scale`` in 8 bits, computed in float32; beyond the largest number it is the largest.

    Args:
        values: of any shape.
        scale: one number in float32.
        dtype: float8_e4m3fn or float8_e5m2.
    """
    rounded: torch.Tensor = quantize_operator()(values, scale, dtype)
    return rounded


def dequantize_fp8(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``values * scale`` in ``dtype``, computed in float32; ``values`` are in 8 bits and ``scale`` is one number."""
    return (values.float() * scale).to(dtype)


def quantize_operator() -> Any:
    """Return the operator ``onediff_comfy::quantize_fp8``, which compilers take to pieces."""
    return composite("quantize_fp8(Tensor values, Tensor scale, ScalarType dtype) -> Tensor", _quantized)


def saturate_operator() -> Any:
    """Return ``onediff_comfy::saturate_fp8``: ``quantize_fp8`` by a scale of one, without the division."""
    return composite("saturate_fp8(Tensor values, ScalarType dtype) -> Tensor", _saturated)


def _saturated(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    largest = torch.finfo(dtype).max
    return values.float().clamp(-largest, largest).to(dtype)


def _quantized(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return _saturated(values.float() / scale, dtype)


def scaled_mm(left: torch.Tensor, right: torch.Tensor, *scaling: Any) -> torch.Tensor:
    """``torch._scaled_mm_v2``; by the older function where each matrix has one scale, for Inductor knows that one.

    Args:
        left: [rows, inner] of few bits.
        right: [inner, columns] of few bits.
        scaling: the rest, as ``torch.nn.functional.scaled_mm`` hands it over: scales, recipes and swizzles of either
            matrix, bias, dtype of the output, contracted dimensions, and how sums are accumulated.
    """
    left_scales, left_recipes, left_swizzles, right_scales, right_recipes, right_swizzles, *rest = scaling
    given: list[Any] = [*rest, *_NOT_GIVEN[len(rest) :]]
    bias, dtype, contracted, fast = given
    whole = [_TENSORWISE] == list(left_recipes) == list(right_recipes)
    plain = not any(left_swizzles) and not any(right_swizzles) and not len(contracted)
    if not whole or not plain or dtype not in (torch.bfloat16, torch.float16):
        return torch._scaled_mm_v2(left, right, *scaling)
    return torch._scaled_mm(
        left,
        right,
        scale_a=left_scales[0],
        scale_b=right_scales[0],
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=fast,
    )
