"""ComfyUI's quantised checkpoints: scaled fp8, mxfp8, nvfp4, int8 and W4A4, as comfy-kitchen's tensors hold them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from comfy.quant_ops import QuantizedTensor

from ..capture.parts import TensorSubclasses, WeightFormat


class KitchenTensors(TensorSubclasses):
    """As PyTorch's protocol has them, only that the one scale of a whole matrix has no axes, in any checkpoint.

    Some files have it with one axis of size 1. The host computes a scale without axes where it applies a LoRA, which
    would be another graph.
    """

    def covers(self, kind: type) -> bool:
        return issubclass(kind, QuantizedTensor) and super().covers(kind)

    def parts(self, weight: Any) -> Sequence[torch.Tensor]:
        tensors = super().parts(weight)
        return [_without_axes(part) for part in tensors] if weight._layout_cls in _ONE_SCALE else tensors


# Of these a scale is of the whole matrix. Elsewhere its axes say what it is of.
_ONE_SCALE = frozenset(("TensorCoreFP8Layout", "TensorCoreFP8E4M3Layout", "TensorCoreFP8E5M2Layout"))


def _without_axes(part: torch.Tensor) -> torch.Tensor:
    return part.reshape(()) if part.shape == (1,) else part


def weight_formats() -> tuple[WeightFormat, ...]:
    """The ways in which a weight of the host's may be several tensors; that of any other library comes last."""
    return KitchenTensors(), TensorSubclasses()
