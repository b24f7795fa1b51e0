"""Tiny ControlNets of random weights that ComfyUI's own ControlNetLoader accepts.

They go with the tiny checkpoints of ``dev.checkpoints``.

    python -m dev.controls COMFY_DIR OUT_DIR NAME...
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .checkpoints import random_weights
from .environment import repository

if TYPE_CHECKING:  # callers of ensure_controls need neither torch nor ComfyUI
    import torch

    StateDict = dict[str, torch.Tensor]


def control_file(name: str) -> str:
    """The file name of the control called ``name`` (one of ``CONTROLS``)."""
    return f"{name}.safetensors"


def ensure_controls(comfy_dir: Path, folder: Path, names: Sequence[str]) -> None:
    """Make those of the controls ``names`` that are not in ``folder`` yet.

    Raises:
        RuntimeError: a name is unknown, or making them failed; has the output.
    """
    missing = [name for name in names if not (folder / control_file(name)).exists()]
    if not missing:
        return
    command = [sys.executable, "-m", "dev.controls", str(comfy_dir), str(folder.resolve()), *missing]
    done = subprocess.run(command, cwd=repository(), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"could not make the controls {', '.join(missing)}:\n{done.stdout}{done.stderr}")


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


def main(arguments: Sequence[str]) -> int:
    """Make the named controls; see the module's docstring for the arguments."""
    if len(arguments) < 3:
        print("usage: python -m dev.controls COMFY_DIR OUT_DIR NAME...", file=sys.stderr)
        return 2
    comfy_dir, folder, names = Path(arguments[0]), Path(arguments[1]), arguments[2:]
    unknown = sorted(set(names) - set(CONTROLS))
    if unknown:
        print(f"unknown control {unknown[0]}; there are {', '.join(CONTROLS)}", file=sys.stderr)
        return 2
    sys.path.insert(0, str(comfy_dir.resolve()))
    from comfy.cli_args import args

    args.cpu = True  # before anything of ComfyUI looks for a GPU
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        path = folder / control_file(name)
        unfinished = path.with_suffix(f".{os.getpid()}.tmp")
        weights = {key: weight.contiguous() for key, weight in CONTROLS[name]().items()}
        save_file(weights, unfinished, metadata={"format": "pt"})
        unfinished.replace(path)
        print(f"{path.name}: {path.stat().st_size / 1e6:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
