"""A new graph proves itself: its first output is compared with eager's before it serves.

Compilers are wrong at times and say nothing (PyTorch 2.13's AOTAutograd cache can return the graph
of another shape). One eager step per graph is the price of knowing.
"""

from __future__ import annotations

import torch
import torch.utils._pytree as pytree

# Largest relative error, ‖graph - eager‖ / ‖eager‖, by the coarsest dtype that takes part. Both
# sides round differently, so each is a multiple of the dtype's epsilon that real models stay well
# under (measured: SDXL fp16 1.2e-3, tiny models fp32 1e-6), while a graph that dropped a patch or
# belongs to another shape is off by 0.1 and more.
_LIMITS = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}
# Rounded to 8 bits, an input of a layer is off by 3%. Layers average that out or add it up.
_FP8_LIMIT = 0.25
# Matrix products and convolutions in TF32 have fp16's mantissa.
_TF32_LIMIT = 1e-2


def relative_error(actual: object, expected: object) -> float:
    """How far one output is off.

    For tensors ‖actual - expected‖ / ‖expected‖ in float64, over the finite values; infinite where
    shapes, dtypes or the places of nan, +inf and -inf disagree. Anything else must be equal.
    """
    if not (isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor)):
        return 0.0 if type(actual) is type(expected) and actual == expected else float("inf")
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return float("inf")
    left, right = (torch.view_as_real(t) if t.is_complex() else t for t in (actual, expected))
    left, right = left.double(), right.double()
    finite = torch.isfinite(right)
    if not torch.equal(finite, torch.isfinite(left)):
        return float("inf")
    if not torch.equal(_kinds(left[~finite]), _kinds(right[~finite])):
        return float("inf")
    left, right = left[finite], right[finite]
    norm = torch.linalg.vector_norm(right)
    error = torch.linalg.vector_norm(left - right)
    return float(error / norm) if norm > 0 else (0.0 if error == 0 else float("inf"))


def difference(actual: object, expected: object) -> float:
    """The largest relative error of the tensors in an output; infinite where it is built otherwise."""
    left, left_spec = pytree.tree_flatten(actual)
    right, right_spec = pytree.tree_flatten(expected)
    if left_spec != right_spec:
        return float("inf")
    return max(map(relative_error, left, right), default=0.0)


def _kinds(values: torch.Tensor) -> torch.Tensor:
    """Non-finite values as numbers that can be compared: nan is not even equal to itself."""
    return values.nan_to_num(nan=0.0, posinf=1.0, neginf=-1.0)


def limit(dtypes: set[torch.dtype], device: torch.device, fp8: bool = False) -> float:
    """The largest relative error that rounding explains for a model with weights and inputs of these dtypes.

    Args:
        fp8: whether its large layers were computed in fp8.
    """
    if fp8:
        return _FP8_LIMIT
    largest = max((_LIMITS[dtype] for dtype in dtypes if dtype in _LIMITS), default=_LIMITS[torch.float32])
    if device.type == "cuda" and torch.float32 in dtypes:
        largest = max(largest, _TF32_LIMIT)
    return largest
