"""Diffusion models of real size with random weights, loaded through ComfyUI's own loader.

Speed and memory do not depend on what the weights are, so no gigabytes need to be fetched. The
weights keep activations near unit scale, so that differences between two ways of computing the
same thing mean what they would mean on a trained model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


@dataclass(frozen=True)
class Family:
    """How to build a model and what to feed it.

    Attributes:
        build: makes the model's module on the meta device, for a dtype.
        dtype: of weights and computation on a GPU.
        latent_channels: of the latent, which is 1/8 of the image in each direction.
        context: (tokens, width) of the text conditioning.
        pooled: width of the pooled conditioning, 0 for none.
        cfg: the guidance scale; 1 means one model call per image and step, more means two.
        extra: further conditioning values.
        size: of the images to measure at, width x height in pixels.
        frames: of a video's latent; 0 for images.
    """

    build: Callable[[torch.dtype], torch.nn.Module]
    dtype: torch.dtype
    latent_channels: int
    context: tuple[int, int]
    pooled: int
    cfg: float
    extra: dict[str, float]
    size: str = "1024x1024"
    frames: int = 0


_UNET: dict[str, Any] = {
    "image_size": 32,
    "in_channels": 4,
    "model_channels": 320,
    "use_spatial_transformer": True,
    "legacy": False,
}
_SDXL: dict[str, Any] = {
    "num_classes": "sequential",
    "adm_in_channels": 2816,
    "num_res_blocks": [2, 2, 2],
    "transformer_depth": [0, 0, 2, 2, 10, 10],
    "channel_mult": [1, 2, 4],
    "transformer_depth_middle": 10,
    "use_linear_in_transformer": True,
    "context_dim": 2048,
    "num_head_channels": 64,
}
_SD15: dict[str, Any] = {
    "num_res_blocks": [2, 2, 2, 2],
    "transformer_depth": [1, 1, 1, 1, 1, 1, 0, 0],
    "channel_mult": [1, 2, 4, 4],
    "transformer_depth_middle": 1,
    "use_linear_in_transformer": False,
    "context_dim": 768,
    "num_heads": 8,
    "num_head_channels": -1,
    "adm_in_channels": None,
}
_SD15_TINY: dict[str, Any] = {
    **_SD15,
    "num_res_blocks": [1, 1],
    "transformer_depth": [1, 1],
    "channel_mult": [1, 2],
}


def _operations() -> Any:
    """The host's layers with weights of their own: in Dynamic VRAM its own have none before a file gives them some."""
    import comfy.ops

    class Operations(comfy.ops.disable_weight_init):
        Linear = torch.nn.Linear
        Embedding = torch.nn.Embedding

    return Operations


def _unet(dtype: torch.dtype, config: dict[str, Any], transformer_depth_output: list[int]) -> torch.nn.Module:
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    return UNetModel(
        out_channels=4,
        use_temporal_attention=False,
        use_temporal_resblock=False,
        dtype=dtype,
        operations=_operations(),
        transformer_depth_output=transformer_depth_output,
        **_UNET,
        **config,
    )


def _sdxl(dtype: torch.dtype) -> torch.nn.Module:
    return _unet(dtype, _SDXL, [0, 0, 0, 2, 2, 2, 10, 10, 10])


def _sd15(dtype: torch.dtype) -> torch.nn.Module:
    return _unet(dtype, _SD15, [1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0])


def _sd15_tiny(dtype: torch.dtype) -> torch.nn.Module:
    return _unet(dtype, _SD15_TINY, [1, 0, 1, 0])


def control_shapes(name: str) -> dict[str, torch.Tensor]:
    """The weights of a ControlNet for the UNet called ``name``, on the meta device."""
    from comfy.cldm.cldm import ControlNet

    config = {"sdxl": _SDXL, "sd15": _SD15}[name]
    with torch.device("meta"):
        network = ControlNet(hint_channels=3, operations=_operations(), **_UNET, **config)
    return network.state_dict()


def _flux(dtype: torch.dtype, **sizes: int) -> torch.nn.Module:
    from comfy.ldm.flux.model import Flux

    return Flux(
        image_model="flux",
        in_channels=16,
        out_channels=16,
        patch_size=2,
        mlp_ratio=4.0,
        axes_dim=[16, 56, 56],
        theta=10000,
        qkv_bias=True,
        guidance_embed=True,
        txt_ids_dims=[],
        dtype=dtype,
        operations=_operations(),
        **sizes,
    )


_FLUX: dict[str, Any] = {
    "vec_in_dim": 768,
    "context_in_dim": 4096,
    "hidden_size": 3072,
    "num_heads": 24,
    "depth": 19,
    "depth_single_blocks": 38,
}
_TINY: dict[str, Any] = {
    "vec_in_dim": 32,
    "context_in_dim": 64,
    "hidden_size": 128,
    "num_heads": 1,
    "depth": 2,
    "depth_single_blocks": 4,
}


def _wan(dtype: torch.dtype, **sizes: int) -> torch.nn.Module:
    from comfy.ldm.wan.model import WanModel

    return WanModel(image_model="wan2.1", model_type="t2v", dtype=dtype, operations=_operations(), **sizes)


_WAN: dict[str, Any] = {"dim": 1536, "ffn_dim": 8960, "num_heads": 12, "num_layers": 30}
_WAN_14B: dict[str, Any] = {"dim": 5120, "ffn_dim": 13824, "num_heads": 40, "num_layers": 40}
_TINY_WAN: dict[str, Any] = {"dim": 128, "ffn_dim": 256, "num_heads": 1, "num_layers": 2}


def _z_image(dtype: torch.dtype, **sizes: int) -> torch.nn.Module:
    from comfy.ldm.lumina.model import NextDiT

    return NextDiT(
        image_model="lumina2",
        patch_size=2,
        in_channels=16,
        qk_norm=True,
        axes_dims=[32, 48, 48],
        axes_lens=[1536, 512, 512],
        rope_theta=256.0,
        ffn_dim_multiplier=8 / 3,
        z_image_modulation=True,
        time_scale=1000.0,
        pad_tokens_multiple=32,
        dtype=dtype,
        operations=_operations(),
        **sizes,
    )


_Z_IMAGE: dict[str, Any] = {"dim": 3840, "n_layers": 30, "n_heads": 30, "n_kv_heads": 30, "cap_feat_dim": 2560}


def _qwen_image(dtype: torch.dtype) -> torch.nn.Module:
    from comfy.ldm.qwen_image.model import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel(image_model="qwen_image", dtype=dtype, operations=_operations())


_GUIDANCE: dict[str, float] = {"guidance": 3.5}
FAMILIES = {
    "sd15": Family(_sd15, torch.float16, 4, (77, 768), 0, 7.0, {}, "512x512"),
    "sdxl": Family(_sdxl, torch.float16, 4, (77, 2048), 1280, 7.0, {}),
    "flux": Family(partial(_flux, **_FLUX), torch.bfloat16, 16, (512, 4096), 768, 1.0, _GUIDANCE),
    # Wan 2.1 of 1.3 billion weights, two seconds at 16 frames a second.
    "wan": Family(partial(_wan, **_WAN), torch.bfloat16, 16, (512, 4096), 0, 6.0, {}, "832x480", 9),
    "wan-14b": Family(partial(_wan, **_WAN_14B), torch.bfloat16, 16, (512, 4096), 0, 6.0, {}, "832x480", 9),
    # Two that people run in four to eight steps, without negative prompts. Z-Image fills prompts up to 32 tokens: its
    # graph for one that is full is another, and few are.
    "z-image": Family(partial(_z_image, **_Z_IMAGE), torch.bfloat16, 16, (100, 2560), 0, 1.0, {}),
    "qwen-image": Family(_qwen_image, torch.bfloat16, 16, (128, 3584), 0, 1.0, {}, "1328x1328", 1),
    # Five seconds of Wan 2.2, with a LoRA for four steps: one of its two models, which are alike.
    "wan-5s": Family(partial(_wan, **_WAN_14B), torch.bfloat16, 16, (512, 4096), 0, 1.0, {}, "832x480", 21),
    # For a CPU, to see that something runs: Flux and Wan with few and narrow blocks.
    "tiny": Family(partial(_flux, **_TINY), torch.bfloat16, 16, (16, 64), 32, 1.0, _GUIDANCE, "128x128"),
    "tiny-wan": Family(partial(_wan, **_TINY_WAN), torch.bfloat16, 16, (16, 4096), 0, 6.0, {}, "128x128", 2),
    "tiny-wan-long": Family(partial(_wan, **_TINY_WAN), torch.bfloat16, 16, (16, 4096), 0, 1.0, {}, "64x64", 9),
    # The same for what changes a UNet.
    "tiny_unet": Family(_sd15_tiny, torch.float32, 4, (77, 768), 0, 7.0, {}, "128x128"),
}


def random_weights(family: Family, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a diffusion model by name, one after another, on ``device`` in the family's own dtype."""
    with torch.device("meta"):
        shapes = family.build(family.dtype).state_dict()
    generator = torch.Generator(device).manual_seed(0)
    for name, shape in shapes.items():
        yield name, random_weight(name, torch.empty(shape.shape, device=device, dtype=family.dtype), generator)


def random_weight(name: str, weight: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Fill a weight so that activations stay near unit scale: matrices, norms' scales by their names, and biases."""
    if weight.ndim >= 2:
        return weight.normal_(0, 0.7 / math.sqrt(weight[0].numel()), generator=generator)
    if name.endswith(("weight", "scale")):
        return weight.fill_(1)
    return weight.normal_(0, 0.02, generator=generator)


def load(family: Family, device: torch.device, file: Path | None = None, dtype: torch.dtype | None = None) -> Any:
    """A ComfyUI MODEL with random weights.

    Args:
        family: what to build.
        device: where the weights are made.
        file: written and loaded from, as Dynamic VRAM needs it; without, weights stay where they were made.
        dtype: to compute in, with weights of the values that they have in the family's own dtype, which is the default.
    """
    import comfy.sd

    weights = {name: weight.to(dtype or family.dtype) for name, weight in random_weights(family, device)}
    options = {"dtype": dtype or family.dtype}
    if file is None:
        return comfy.sd.load_diffusion_model_state_dict(weights, model_options=options)
    save_file(weights, file, metadata={"format": "pt"})
    del weights
    return comfy.sd.load_diffusion_model(str(file), model_options=options)


def conditioning(family: Family, seed: int, tokens: int | None = None) -> list[Any]:
    """Random conditioning in the host's form, on the CPU as text encoders leave it."""
    generator = torch.Generator().manual_seed(seed)
    length, width = family.context
    extras: dict[str, Any] = dict(family.extra)
    if family.pooled:
        extras["pooled_output"] = torch.randn(1, family.pooled, generator=generator)
    return [[torch.randn(1, tokens or length, width, generator=generator), extras]]


def random_lora(model: Any, seed: int, rank: int = 16) -> dict[str, torch.Tensor]:
    """A LoRA of random weights for every matrix of a MODEL's attention."""
    generator = torch.Generator().manual_seed(seed)
    lora = {}
    for name, weight in model.model.diffusion_model.state_dict().items():
        if "attn" in name and name.endswith(".weight") and weight.ndim == 2:
            layer = f"diffusion_model.{name.removesuffix('.weight')}"
            up = torch.randn(weight.shape[0], rank, generator=generator) * 0.1 / math.sqrt(rank)
            lora[f"{layer}.lora_up.weight"] = up
            lora[f"{layer}.lora_down.weight"] = torch.randn(rank, weight.shape[1], generator=generator) / math.sqrt(
                weight.shape[1]
            )
    return lora
