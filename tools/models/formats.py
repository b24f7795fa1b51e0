"""Checkpoints whose weights are of fewer bits, in each of the forms that ComfyUI reads.

A quantised layer has its data, its scales, and an entry ``comfy_quant`` with a few bytes of JSON that name the form.
Nothing of ComfyUI or torch is imported before something is quantised.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

FORMATS: Mapping[str, Mapping[str, Any]] = {
    "fp8": {"format": "float8_e4m3fn"},
    "fp8-full": {"format": "float8_e4m3fn", "full_precision_matrix_mult": True},
    "mxfp8": {"format": "mxfp8"},
    "nvfp4": {"format": "nvfp4"},
    "int8": {"format": "int8_tensorwise"},
    "w4a4": {"format": "convrot_w4a4"},
}
"""What a checkpoint says of its quantised layers, by what the form is called here: ``fp8`` multiplies in 8 bits where
the GPU can, ``fp8-full`` must not."""

_GROUPS = {"convrot_w4a4": 256}  # columns that one scale, or one rotation, is for
_LEAST_COLUMNS = 64
_TWO_IN_A_BYTE = ("nvfp4", "convrot_w4a4")
# By its columns ComfyUI tells which UNet a checkpoint is of. In forms with two numbers in a byte it has half of them,
# and ComfyUI knows no such UNet: whoever makes such a file leaves that layer as it is.
_DETECTED_BY = "attn2.to_k.weight"
_LOOKED_UP = "relative_attention_bias"  # a table of T5's: ComfyUI asks its scale whether it is 1, which no graph can


def is_quantised(name: str, weight: torch.Tensor, form: str) -> bool:
    """Return True for the matrices of blocks, which such checkpoints quantise, if their sizes let be."""
    columns = _GROUPS.get(FORMATS[form]["format"], _LEAST_COLUMNS)
    matrix = name.endswith("weight") and weight.ndim == 2 and weight.shape[1] % columns == 0
    if FORMATS[form]["format"] in _TWO_IN_A_BYTE and name.endswith(_DETECTED_BY):
        return False
    layer = name.rpartition("block")[2]
    return matrix and "block" in name and "mod" not in layer and _LOOKED_UP not in layer


def quantised(name: str, weight: torch.Tensor, form: str) -> dict[str, torch.Tensor]:
    """A checkpoint's entries for one matrix.

    Args:
        name: of the weight, which ends with ``weight``.
        weight: [out, in].
        form: one of ``FORMATS``.
    """
    import torch
    from comfy.quant_ops import QUANT_ALGOS, QuantizedTensor

    said = dict(FORMATS[form])
    layout = QUANT_ALGOS[said["format"]]["comfy_tensor_layout"]
    options = {"scale": "recalculate"} if said["format"].startswith("float8") else {}
    tensor = QuantizedTensor.from_float(weight.contiguous(), layout, **options)
    if said["format"] == "convrot_w4a4":
        said["convrot_groupsize"] = tensor.params.convrot_groupsize
    mark = torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)
    return {**tensor.state_dict(name), f"{name.removesuffix('weight')}comfy_quant": mark}


def checkpoint(weights: Mapping[str, torch.Tensor], form: str) -> dict[str, torch.Tensor]:
    """The same checkpoint in one of ``FORMATS``."""
    entries: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        entries |= quantised(name, weight, form) if is_quantised(name, weight, form) else {name: weight}
    return entries


def scaled_fp8(weights: Mapping[str, torch.Tensor], prefix: str = "") -> dict[str, torch.Tensor]:
    """The same checkpoint with its blocks' matrices in 8 bits, in the form that ComfyUI has read longest.

    Args:
        weights: by name.
        prefix: of the names of the model's weights.
    """
    import torch

    kind = torch.float8_e4m3fn
    entries = {f"{prefix}scaled_fp8": torch.empty(2, dtype=kind)}  # of two elements: it multiplies in full precision
    for name, weight in weights.items():
        entries[name] = weight
        if weight.ndim == 2 and "_blocks." in name:
            scale = weight.float().abs().max() / torch.finfo(kind).max
            entries[name] = (weight.float() / scale).to(kind)
            entries[f"{name.removesuffix('weight')}scale_weight"] = scale.reshape(1)
    return entries
