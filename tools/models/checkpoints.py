"""Tiny checkpoints of random weights that ComfyUI's own CheckpointLoaderSimple accepts.

The parameter names and shapes are read off ComfyUI's own modules, built on the meta device, so that
they follow the ComfyUI at hand. Sizes are the smallest that the host's detection still recognises
as the architecture.

    python -m tools.models.checkpoints COMFY_DIR OUT_DIR NAME...
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dev.environment import repository

if TYPE_CHECKING:  # callers of ensure_checkpoints need neither torch nor ComfyUI
    import torch

    StateDict = dict[str, torch.Tensor]


def checkpoint_file(name: str) -> str:
    """The file name of the checkpoint, or of another file that is made here, called ``name``."""
    return f"{name}.safetensors"


def ensure_checkpoints(comfy_dir: Path, folder: Path, names: Sequence[str]) -> None:
    """Make those of the checkpoints ``names`` that are not in ``folder`` yet.

    Raises:
        RuntimeError: a name is unknown, or making them failed; has the output.
    """
    ensure_files("tools.models.checkpoints", comfy_dir, folder, names)


def ensure_files(maker: str, comfy_dir: Path, folder: Path, names: Sequence[str]) -> None:
    """Have the module ``maker`` make those of the files ``names`` that are not in ``folder`` yet.

    Raises:
        RuntimeError: a name is unknown, or making them failed; has the output.
    """
    missing = [name for name in names if not (folder / checkpoint_file(name)).exists()]
    if not missing:
        return
    # Another process, because ComfyUI changes the interpreter it is imported into.
    command = [sys.executable, "-m", maker, str(comfy_dir), str(folder.resolve()), *missing]
    done = subprocess.run(command, cwd=repository(), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{maker} could not make {', '.join(missing)}:\n{done.stdout}{done.stderr}")


# -- below: in the subprocess, with ComfyUI importable ---------------------------------------------

_SD15 = {
    "num_heads": 8,
    "num_head_channels": -1,
    "adm_in_channels": None,
    "context_dim": 768,
    "use_linear_in_transformer": False,
}
_SDXL = {
    "num_classes": "sequential",
    "num_head_channels": 64,
    "adm_in_channels": 2816,
    "context_dim": 2048,
    "use_linear_in_transformer": True,
}

_SD15_MIN: dict[str, Any] = {
    "channel_mult": [1],
    "num_res_blocks": [1],
    "transformer_depth": [1],
    "transformer_depth_output": [1, 0],
    "transformer_depth_middle": -2,
}
_SD15_DEEP: dict[str, Any] = {
    "channel_mult": [1, 2],
    "num_res_blocks": [1, 1],
    "transformer_depth": [1, 1],
    "transformer_depth_output": [1, 0, 1, 0],
    "transformer_depth_middle": 1,
}
_SDXL_DEEP: dict[str, Any] = {
    "channel_mult": [1, 2, 1],
    "num_res_blocks": [1, 1, 1],
    "transformer_depth": [0, 2, 5],
    "transformer_depth_output": [0, 0, 1, 0, 1, 0],
    "transformer_depth_middle": 1,
}


def _sd15_tiny() -> StateDict:
    """SD1.5 of two resolution levels, with its real-size CLIP-L, so that prompts work."""
    blocks: dict[str, Any] = {
        "channel_mult": [1, 1],
        "num_res_blocks": [1, 1],
        "transformer_depth": [1, 0],
        "transformer_depth_output": [1, 1, 0, 0],
        "transformer_depth_middle": -2,
    }
    return {
        **_unet({**_SD15, **blocks}),
        **_taesd(4, "first_stage_model.", "float16"),
        **_clip_l("cond_stage_model.transformer."),
    }


def _sd15_min(seed: int = 1) -> StateDict:
    """The smallest UNet that is still SD1.5: one resolution level, one transformer block."""
    return {**_unet({**_SD15, **_SD15_MIN}, seed), **_taesd(4, "first_stage_model.", "float16")}


def _sd15_deep() -> StateDict:
    """Two levels and a middle block that all attend: every place of a UNet that patches take hold of."""
    return _unet({**_SD15, **_SD15_DEEP})


def _sd15_inpaint() -> StateDict:
    """The smallest inpainting UNet: latent, mask and masked image make nine channels."""
    return _unet({**_SD15, **_SD15_MIN, "in_channels": 9})


def _sd15_control() -> StateDict:
    return _control_unet({**_SD15, **_SD15_DEEP})


def _sdxl_control() -> StateDict:
    return _control_unet({**_SDXL, **_SDXL_DEEP})


def _sdxl_deep() -> StateDict:
    """KOALA-700M's depths with a second level of twice the width and a middle block that attends."""
    return _unet({**_SDXL, **_SDXL_DEEP})


def _sdxl_min(seed: int = 1) -> StateDict:
    """SDXL's family by its depths [0, 2, 5], one of the lists that the host knows."""
    blocks: dict[str, Any] = {
        "channel_mult": [1, 1, 1],
        "num_res_blocks": [1, 1, 1],
        "transformer_depth": [0, 2, 5],
        "transformer_depth_output": [0, 0, 1, 0, 1, 0],
        "transformer_depth_middle": -2,
    }
    return {**_unet({**_SDXL, **blocks}, seed), **_taesd(4, "first_stage_model.", "float16")}


def _flux_min() -> StateDict:
    """Flux with one double and one single block; conditioning of width 64, pooled width 32."""
    import comfy.ldm.flux.model
    import comfy.ops

    model = comfy.ldm.flux.model.Flux(
        image_model="flux",
        in_channels=16,
        out_channels=16,
        patch_size=2,
        vec_in_dim=32,
        context_in_dim=64,
        hidden_size=128,  # the host takes heads of 128 for granted
        mlp_ratio=4.0,
        num_heads=1,
        depth=1,
        depth_single_blocks=1,
        axes_dim=[16, 56, 56],
        theta=10000,
        txt_ids_dims=[],
        qkv_bias=True,
        guidance_embed=True,
        dtype=None,
        device="meta",
        operations=comfy.ops.disable_weight_init,
    )
    # Flux checkpoints are bfloat16, and name their VAE without the first_stage_model of SD.
    weights = random_weights(model.state_dict(), "model.diffusion_model.", "bfloat16", seed=1)
    return {**weights, **_taesd(16, "vae.", "bfloat16")}


CHECKPOINTS: Mapping[str, Callable[[], StateDict]] = {
    "sd15_tiny": _sd15_tiny,
    "sd15_min": _sd15_min,
    "sd15_min_other": lambda: _sd15_min(seed=7),  # another checkpoint of the same architecture
    "sdxl_min": _sdxl_min,
    "sdxl_min_other": lambda: _sdxl_min(seed=7),
    "flux_min": _flux_min,
    "sd15_deep": _sd15_deep,
    "sd15_inpaint": _sd15_inpaint,
    "sd15_control": _sd15_control,
    "sdxl_deep": _sdxl_deep,
    "sdxl_control": _sdxl_control,
}
"""The checkpoints by name. All but sd15_tiny come without text encoders: give them TinyConditioning.

Those for tests of patches (``deep``, ``inpaint``) have no VAE either; ``control`` are ControlNets for the deep ones.
"""


def _unet(config: Mapping[str, Any], seed: int = 1) -> StateDict:
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    config = {"out_channels": 4, "use_temporal_resblock": False, "use_temporal_attention": False, **config}
    return random_weights(_on_meta(UNetModel, config), "model.diffusion_model.", "float16", seed=seed)


def _control_unet(config: Mapping[str, Any]) -> StateDict:
    """A ControlNet over a UNet's first half, for RGB hints of eight times the latent's size."""
    from comfy.cldm.cldm import ControlNet

    return random_weights(_on_meta(ControlNet, {**config, "hint_channels": 3}), "control_model.", "float16", seed=5)


def _on_meta(kind: type, config: Mapping[str, Any]) -> StateDict:
    """Names and shapes of the weights of a UNet, or of what is built like one."""
    import comfy.ops
    import torch

    common = {
        "image_size": 32,
        "use_checkpoint": False,
        "use_spatial_transformer": True,
        "legacy": False,
        "in_channels": 4,
        "model_channels": 320,
        "dtype": torch.float32,
        "device": "meta",
        "operations": comfy.ops.disable_weight_init,
    }
    with torch.device("meta"):
        weights: StateDict = kind(**{**common, **config}).state_dict()
    return weights


def _taesd(channels: int, prefix: str, dtype: str) -> StateDict:
    import torch
    from comfy.taesd.taesd import TAESD

    with torch.device("meta"):
        model = TAESD(latent_channels=channels)
    return random_weights(model.state_dict(), prefix, dtype, seed=2)


def _clip_l(prefix: str) -> StateDict:
    import comfy.clip_model
    import comfy.ops
    import torch

    package = Path(comfy.clip_model.__file__).parent
    config = json.loads((package / "sd1_clip_config.json").read_text())
    model = comfy.clip_model.CLIPTextModel(config, torch.float32, "meta", comfy.ops.disable_weight_init)
    return random_weights(model.state_dict(), prefix, "float16", seed=3)


def random_weights(shapes: Mapping[str, torch.Tensor], prefix: str, dtype: str, *, seed: int) -> StateDict:
    """Seeded weights that keep activations near unit variance, under ``prefix``.

    Matrices and kernels have variance 1/fan_in (LeCun et al., Efficient BackProp, 1998). Biases and
    norms are a little off their neutral values, so that a bias that a graph forgets shows.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, meta in shapes.items():
        if not meta.dtype.is_floating_point:  # position ids
            weights[prefix + name] = torch.arange(meta.numel()).reshape(meta.shape)
            continue
        noise = torch.randn(meta.shape, generator=generator)
        if "embedding" in name and meta.ndim == 2 and name.endswith("embedding.weight"):
            value = noise * 0.02  # CLIP's own initialisation of token and position embeddings
        elif meta.ndim >= 2:
            value = noise / math.sqrt(math.prod(meta.shape[1:]))
        elif name.endswith(("weight", "scale")):
            value = 1 + 0.05 * noise
        else:
            value = 0.05 * noise
        weights[prefix + name] = value.to(getattr(torch, dtype)).contiguous()
    return weights


def make_files(maker: str, builders: Mapping[str, Callable[[], StateDict]], arguments: Sequence[str]) -> int:
    """The command line of a module that makes files: ``python -m maker COMFY_DIR OUT_DIR NAME...``."""
    if len(arguments) < 3:
        print(f"usage: python -m {maker} COMFY_DIR OUT_DIR NAME...", file=sys.stderr)
        return 2
    comfy_dir, folder, names = Path(arguments[0]), Path(arguments[1]), arguments[2:]
    unknown = sorted(set(names) - set(builders))
    if unknown:
        print(f"{maker} knows no {unknown[0]}; there are {', '.join(builders)}", file=sys.stderr)
        return 2
    # The host's own packages (comfy, utils, …) must win over anything of that name in the working folder.
    sys.path.insert(0, str(comfy_dir.resolve()))
    from comfy.cli_args import args

    args.cpu = True  # before anything of ComfyUI looks for a GPU
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        path = folder / checkpoint_file(name)
        if path.exists():
            continue
        weights = {key: weight.contiguous() for key, weight in builders[name]().items()}
        unfinished = path.with_suffix(f".{os.getpid()}.tmp")
        save_file(weights, unfinished, metadata={"format": "pt"})
        unfinished.replace(path)
        count = sum(tensor.numel() for tensor in weights.values())
        print(f"{path.name}: {count / 1e6:.1f} M parameters, {path.stat().st_size / 1e6:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(make_files("tools.models.checkpoints", CHECKPOINTS, sys.argv[1:]))
