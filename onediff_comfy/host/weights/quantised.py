"""ComfyUI's quantised checkpoints: scaled fp8, mxfp8, nvfp4, int8 and W4A4, as comfy-kitchen's tensors hold them."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from typing import Any

import comfy.ops
import torch

try:
    from comfy.quant_ops import QuantizedTensor
except ImportError:  # a host from before, or from after
    QuantizedTensor = None

from ...capture.rewrites.op_substitutions import Forms
from ...capture.rewrites.scaled_fp8 import dequantize_fp8, fuses_fp8, quantize_fp8, scaled_mm
from ...capture.target.tensor_parts import TensorSubclasses, WeightFormat
from ...capture.values.code_values import functions_in
from ...capture.values.global_reads import cells
from ...compilation.weightless_pickle import NO_FACTORY, LayerFactory
from .gguf import BlocksOfBytes


class KitchenTensors(TensorSubclasses):
    """As PyTorch's protocol has them, only that the one scale of a whole matrix has no axes, in any checkpoint.

    Some files have it with one axis of size 1. The host computes a scale without axes where it applies a LoRA, which
    would be another graph.
    """

    def covers(self, weight: Any) -> bool:
        return QuantizedTensor is not None and isinstance(weight, QuantizedTensor) and super().covers(weight)

    def parts(self, weight: Any) -> Sequence[torch.Tensor]:
        # What the protocol names, in its order, without asking it: it takes 8 microseconds a weight, in every call.
        tensors = [
            weight._qdata,
            *(value for value in vars(weight._params).values() if isinstance(value, torch.Tensor)),
        ]
        return [_without_axes(part) for part in tensors] if weight._layout_cls in _ONE_SCALE else tensors


# Of these a scale is of the whole matrix. Elsewhere its axes say what it is of.
_ONE_SCALE = frozenset(("TensorCoreFP8Layout", "TensorCoreFP8E4M3Layout", "TensorCoreFP8E5M2Layout"))


def _without_axes(part: torch.Tensor) -> torch.Tensor:
    return part.reshape(()) if part.ndim == 1 and len(part) == 1 else part


RECORDABLE_OPERATORS = frozenset(("comfy_kitchen::apply_rope", "comfy_kitchen::apply_rope1"))
"""Of comfy-kitchen's, those that were replayed from CUDA graphs in every step of Flux. In an int8 model a recording
failed under the allocator that ComfyUI's server chooses, and freeing its memory ended the process (seen on an H200)."""


def weight_formats() -> tuple[WeightFormat, ...]:
    """The ways in which a weight of the host's may be several tensors; that of any other library comes last."""
    return KitchenTensors(), BlocksOfBytes(), TensorSubclasses()


_OPERATIONS = "MixedPrecisionOps"
_GIVEN = ("_quant_config", "_compute_dtype", "_full_precision_mm", "_disabled")


def layer_factory() -> LayerFactory:
    """Return what makes the layers of a quantised checkpoint, or of one without: each has classes of its own."""
    make = getattr(comfy.ops, "mixed_precision_ops", None)
    return NO_FACTORY if make is None else LayerFactory(_made, make)


def _made(kind: type) -> tuple[type, tuple[Any, ...]] | None:
    if kind.__module__ != comfy.ops.__name__ or f".<locals>.{_OPERATIONS}" not in kind.__qualname__:
        return None
    operations = kind if kind.__name__ == _OPERATIONS else _holder(kind)
    if operations is None or not all(hasattr(operations, name) for name in _GIVEN):
        return None  # another host's
    return operations, tuple(getattr(operations, name) for name in _GIVEN)


def _holder(kind: type) -> type | None:
    """Return the operations that a class of layers belongs to, which its methods name."""
    functions = (function for member in vars(kind).values() for function in functions_in(member))
    found = (held for function in functions for name, held in cells(function) if name == _OPERATIONS)
    return next((held for held in found if getattr(held, kind.__name__, None) is kind), None)


def kernels() -> str:
    """Which kernels the library has here for its operators, and its version: graphs call them by name."""
    try:
        import comfy_kitchen

        backends = comfy_kitchen.list_backends()
        chosen = sorted(name for name, state in backends.items() if state["available"] and not state["disabled"])
        return f"comfy_kitchen {importlib.metadata.version('comfy_kitchen')} {' '.join(chosen)}"
    except Exception:  # what cannot be asked is not there, or says so in another way now
        return "none"


def fused_operators(device: torch.device) -> Forms:
    """The library's operators that a compiler can compute as part of its own kernels, in the form that it fuses.

    They compute in float32, as the library's kernels for GPUs do.
    """
    operators: Any = torch.ops.comfy_kitchen
    if not hasattr(operators, "quantize_fp8") or not fuses_fp8(device):
        return {}
    forms: dict[Any, Any] = {}
    for operator, form in ((operators.quantize_fp8, quantize_fp8), (operators.dequantize_fp8, dequantize_fp8)):
        forms[operator] = forms[operator.default] = _by_code(form)
    if hasattr(torch, "_scaled_mm_v2"):
        forms[torch._scaled_mm_v2] = scaled_mm
    return forms


_DTYPES = {
    0: torch.float32,
    1: torch.float16,
    2: torch.bfloat16,
    5: torch.float8_e4m3fn,
    6: torch.float8_e5m2,
}
"""What the library's operators take for dtypes."""


def _by_code(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def called(x: torch.Tensor, scale: torch.Tensor, output_dtype_code: int) -> torch.Tensor:
        return function(x, scale, _DTYPES[output_dtype_code])

    return called
