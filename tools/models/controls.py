"""Tiny ControlNets of random weights that ComfyUI's own ControlNetLoader accepts.

They go with the tiny checkpoints of ``tools.models.checkpoints``.

    python -m tools.models.controls COMFY_DIR OUT_DIR NAME...
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .checkpoints import ensure_files, make_files, random_weights

if TYPE_CHECKING:  # callers of ensure_controls need neither torch nor ComfyUI
    import torch

    StateDict = dict[str, torch.Tensor]


def ensure_controls(comfy_dir: Path, folder: Path, names: Sequence[str]) -> None:
    """Make those of the controls ``names`` that are not in ``folder`` yet; see ``ensure_files``."""
    ensure_files("tools.models.controls", comfy_dir, folder, names)


# -- below: in the subprocess, with ComfyUI importable ---------------------------------------------

_SD15_MIN: Mapping[str, Any] = {
    "image_size": 32,
    "in_channels": 4,
    "model_channels": 320,
    "hint_channels": 3,
    "num_heads": 8,
    "use_spatial_transformer": True,
    "context_dim": 768,
    "legacy": False,
    "channel_mult": [1],
    "num_res_blocks": [1],
    "transformer_depth": [1],
    "transformer_depth_middle": -2,
}
# The layers that a Control LoRA has of its own; of all others it changes the diffusion model's, and the tiny one
# has no middle block.
_OWN = ("input_hint_block.", "zero_convs.", "middle_block_out.", "middle_block.")
_RANK = 4


def _network(seed: int) -> StateDict:
    import comfy.ops
    import torch
    from comfy.cldm.cldm import ControlNet

    with torch.device("meta"):
        shapes: StateDict = ControlNet(**_SD15_MIN, operations=comfy.ops.disable_weight_init).state_dict()
    return random_weights(shapes, "", "float16", seed=seed)


def _sd15_min_control(seed: int = 5) -> StateDict:
    """A ControlNet for sd15_min, in the form with all its weights under control_model."""
    return {f"control_model.{name}": weight for name, weight in _network(seed).items()}


def _sd15_min_control_lora() -> StateDict:
    """A Control LoRA for sd15_min: changes of low rank to every matrix and kernel of its first half."""
    import torch

    generator = torch.Generator().manual_seed(6)
    weights: StateDict = {"lora_controlnet": torch.zeros(1)}
    for name, weight in _network(seed=6).items():
        layer, _, kind = name.rpartition(".")
        if name.startswith(_OWN):
            weights[name] = weight
        elif kind == "weight" and weight.ndim >= 2:
            up = torch.randn(weight.shape[0], _RANK, generator=generator) / _RANK
            down = torch.randn(_RANK, weight[0].numel(), generator=generator) / weight[0].numel() ** 0.5
            weights[f"{layer}.up"], weights[f"{layer}.down"] = up.half(), down.half().reshape(_RANK, *weight.shape[1:])
    return weights


def _flux_min_control() -> StateDict:
    """A ControlNet for flux_min in the form that XLabs published: one result, given to each of Flux's 19 blocks."""
    import comfy.ops
    import torch
    from comfy.ldm.flux.controlnet import ControlNetFlux

    with torch.device("meta"):
        shapes: StateDict = ControlNetFlux(
            image_model="flux",
            in_channels=16,
            out_channels=16,
            patch_size=2,
            vec_in_dim=32,
            context_in_dim=64,
            hidden_size=128,
            mlp_ratio=4.0,
            num_heads=1,
            depth=1,
            depth_single_blocks=1,
            axes_dim=[16, 56, 56],
            theta=10000,
            txt_ids_dims=[],
            qkv_bias=True,
            guidance_embed=True,
            operations=comfy.ops.disable_weight_init,
        ).state_dict()
    weights = random_weights(shapes, "", "bfloat16", seed=9)
    # Files have an older name for it, by which the host knows them.
    return {name.replace("_norm.weight", "_norm.scale"): weight for name, weight in weights.items()}


def _t2i_adapter() -> StateDict:
    """The light adapter for SD1.5, which runs once for an image."""
    import torch
    from comfy.t2i_adapter.adapter import Adapter_light

    with torch.device("meta"):
        shapes: StateDict = Adapter_light(cin=192, channels=[320, 640, 1280, 1280], nums_rb=4).state_dict()
    return random_weights(shapes, "", "float32", seed=8)


CONTROLS: Mapping[str, Callable[[], StateDict]] = {
    "sd15_min_control": _sd15_min_control,
    "sd15_min_control_other": lambda: _sd15_min_control(seed=7),  # of the same architecture
    "sd15_min_control_lora": _sd15_min_control_lora,
    "flux_min_control": _flux_min_control,
    "t2i_adapter": _t2i_adapter,
}
"""The controls by name."""


if __name__ == "__main__":
    sys.exit(make_files("tools.models.controls", CONTROLS, sys.argv[1:]))
