"""Tiny files of random weights, each a part of what a checkpoint has or a change to it, for ComfyUI's own loaders.

The LoRA goes with the tiny checkpoint sd15_min; the others are what a video workflow loads file by file.

    python -m tools.models.model_parts COMFY_DIR OUT_DIR NAME...
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .checkpoints import CHECKPOINTS, ensure_files, make_files, random_weights
from .families import FAMILIES

if TYPE_CHECKING:  # callers of ensure_model_parts need neither torch nor ComfyUI
    import torch

    StateDict = dict[str, torch.Tensor]

_RANK = 4


def ensure_model_parts(comfy_dir: Path, folder: Path, names: Sequence[str]) -> None:
    """Make those of the parts ``names`` that are not in ``folder`` yet; see ``ensure_files``."""
    ensure_files("tools.models.model_parts", comfy_dir, folder, names)


# -- below: in the subprocess, with ComfyUI importable ---------------------------------------------


def _sd15_min_lora() -> StateDict:
    """A LoRA for every matrix of sd15_min's attention, named as training scripts name them."""
    import torch

    generator = torch.Generator().manual_seed(8)
    weights: StateDict = {}
    for name, weight in CHECKPOINTS["sd15_min"]().items():
        layer, _, kind = name.removeprefix("model.diffusion_model.").rpartition(".")
        if "attn" in layer and kind == "weight" and weight.ndim == 2:
            stem = f"lora_unet_{layer.replace('.', '_')}"
            weights[f"{stem}.lora_up.weight"] = (torch.randn(weight.shape[0], _RANK, generator=generator) * 0.1).half()
            down = torch.randn(_RANK, weight.shape[1], generator=generator) / weight.shape[1] ** 0.5
            weights[f"{stem}.lora_down.weight"] = down.half()
            weights[f"{stem}.alpha"] = torch.tensor(float(_RANK))
    return weights


def _wan_min() -> StateDict:
    """Wan 2.1, text to video, of two blocks; text of width 4096 as the real one's."""
    return FAMILIES["wan21"].build()


def _wan_min_vae() -> StateDict:
    """Wan 2.1's video VAE with 8 channels in place of 96."""
    import torch
    from comfy.ldm.wan.vae import WanVAE

    with torch.device("meta"):
        model = WanVAE(dim=8, z_dim=16, temperal_downsample=[False, True, True])
    return random_weights(model.state_dict(), "", "float16", seed=9)


PARTS: Mapping[str, Callable[[], StateDict]] = {
    "sd15_min_lora": _sd15_min_lora,
    "wan_min": _wan_min,
    "wan_min_vae": _wan_min_vae,
}
"""The files by name."""


if __name__ == "__main__":
    sys.exit(make_files("tools.models.model_parts", PARTS, sys.argv[1:]))
