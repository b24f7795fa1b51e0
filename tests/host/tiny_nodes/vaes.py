"""Tiny VAEs, what to feed them, and how far two results differ."""

from __future__ import annotations

import math
from typing import Any

import comfy.sd
import torch
from comfy.ldm.models.autoencoder import AutoencoderKL, AutoencodingEngine
from comfy.taesd.taesd import TAESD
from comfy_api.latest import io

_NARROW, _WIDTH = 32, 128  # channels of the first level: the fewest that group norm divides, and what the host builds


def _levels(latent_channels: int, channels: int) -> dict[str, Any]:
    return {
        "double_z": True,
        "z_channels": latent_channels,
        "resolution": 256,
        "in_channels": 3,
        "out_ch": 3,
        "ch": channels,
        "ch_mult": [1, 2, 4, 4],
        "num_res_blocks": 2,
        "attn_resolutions": [],
        "dropout": 0.0,
    }


def _sd() -> tuple[torch.nn.Module, dict[str, Any] | None]:
    """The VAE of SD and SDXL, narrow and shallow throughout: it may come with a configuration of its own."""
    config = {"ddconfig": {**_levels(4, _NARROW), "num_res_blocks": 1}, "embed_dim": 4}
    return AutoencoderKL(**config), {"params": config}


def _flux() -> tuple[torch.nn.Module, dict[str, Any] | None]:
    """The VAE of Flux and SD3: no quantising layers. The host knows it by its weights, and builds a wide encoder."""
    part = "comfy.ldm.modules.diffusionmodules.model"
    module = AutoencodingEngine(
        regularizer_config={"target": "comfy.ldm.models.autoencoder.DiagonalGaussianRegularizer"},
        encoder_config={"target": f"{part}.Encoder", "params": _levels(16, _WIDTH)},
        decoder_config={"target": f"{part}.Decoder", "params": _levels(16, _NARROW)},
    )
    return module, None


def _taesd() -> tuple[torch.nn.Module, dict[str, Any] | None]:
    return TAESD(latent_channels=4), None


_KINDS = {"sd": _sd, "flux": _flux, "taesd": _taesd}


class TinyVAE(io.ComfyNode):
    """A VAE of the host's own making, with seeded weights that keep activations near unit variance."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TinyVAE",
            category="testing",
            inputs=[
                io.Combo.Input("kind", options=list(_KINDS)),
                io.Combo.Input("dtype", options=["float32", "bfloat16"], default="float32"),
                io.Int.Input("seed", default=0),
            ],
            outputs=[io.Vae.Output()],
        )

    @classmethod
    def execute(cls, kind: str, dtype: str, seed: int) -> io.NodeOutput:
        with torch.device("meta"):
            module, config = _KINDS[kind]()
        generator = torch.Generator().manual_seed(seed)
        weights = {}
        for name, meta in module.state_dict().items():
            noise = torch.randn(meta.shape, generator=generator)
            if meta.ndim >= 2:
                weights[name] = noise / math.sqrt(math.prod(meta.shape[1:]))
            else:
                weights[name] = (1 if name.endswith(("weight", "scale")) else 0) + 0.05 * noise
        return io.NodeOutput(comfy.sd.VAE(sd=weights, config=config, dtype=getattr(torch, dtype)))


class TinyLatent(io.ComfyNode):
    """Seeded noise as a latent; the sides are those of the image in pixels."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        sizes = [io.Int.Input(name, default=default) for name, default in (("width", 64), ("height", 64), ("batch", 1))]
        return io.Schema(
            node_id="TinyLatent",
            category="testing",
            inputs=[io.Int.Input("seed", default=0), *sizes, io.Int.Input("channels", default=4)],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, seed: int, width: int, height: int, batch: int, channels: int) -> io.NodeOutput:
        generator = torch.Generator().manual_seed(seed)
        return io.NodeOutput({"samples": torch.randn(batch, channels, height // 8, width // 8, generator=generator)})


class TinyImage(io.ComfyNode):
    """Seeded smooth pictures, and a mask of their right half."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        sizes = [io.Int.Input(name, default=default) for name, default in (("width", 64), ("height", 64), ("batch", 1))]
        return io.Schema(
            node_id="TinyImage",
            category="testing",
            inputs=[io.Int.Input("seed", default=0), *sizes],
            outputs=[io.Image.Output(), io.Mask.Output()],
        )

    @classmethod
    def execute(cls, seed: int, width: int, height: int, batch: int) -> io.NodeOutput:
        small = torch.rand(batch, 3, 5, 7, generator=torch.Generator().manual_seed(seed))
        image = torch.nn.functional.interpolate(small, (height, width), mode="bilinear").movedim(1, -1)
        mask = (torch.arange(width) >= width // 2).float().expand(1, height, width)
        return io.NodeOutput(image, mask)


class RelativeError(io.ComfyNode):
    """How far each result is from the expected one: the norm of the difference by the norm; and the result's shape."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="RelativeError",
            category="testing",
            inputs=[io.AnyType.Input("actual"), io.AnyType.Input("expected")],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, actual: Any, expected: Any) -> io.NodeOutput:
        left, right = (value["samples"] if isinstance(value, dict) else value for value in (actual, expected))
        assert left.shape == right.shape, (left.shape, right.shape)
        assert float(right.std()) > 0.01, "a flat picture proves nothing"
        error = float((left.double() - right.double()).norm() / right.double().norm())
        return io.NodeOutput(ui={"error": [error], "shape": [list(left.shape)]})


NODES = [TinyVAE, TinyLatent, TinyImage, RelativeError]
