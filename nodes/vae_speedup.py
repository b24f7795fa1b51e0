"""OneDiff VAE Speedup."""

from __future__ import annotations

from typing import Any

from ..onediff_comfy.host.actions import speed_up
from ..onediff_comfy.host.node_api import io
from ..onediff_comfy.settings import COMPILE_CHOICES
from .shape_bucket import Buckets
from .speedup_inputs import compile_input, engine_input


class OneDiffVAESpeedup(io.ComfyNode):
    """VAE in, the same VAE out, served by compiled graphs."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="OneDiffVAESpeedup",
            display_name="OneDiff VAE Speedup",
            category="OneDiff",
            description=(
                "Makes decoding and encoding faster without visibly changing the image. Put it between the loader and "
                "VAE Decode, VAE Decode (Tiled), VAE Encode or VAE Encode (for Inpaint). The VAE is compiled once "
                "ever; from then on every image, of any size, uses the compiled graph. It works in the precision that "
                "ComfyUI has chosen for the VAE."
            ),
            search_aliases=[
                "vae compile",
                "torch compile",
                "decode",
                "encode",
                "speed",
                "accelerate",
                "faster",
                "加速",
            ],
            inputs=[
                io.Vae.Input("vae", tooltip="The VAE to make faster. It is not changed; a copy comes out."),
                engine_input("the VAE", "the VAE works"),
                compile_input("image", "the VAE works at its"),
                io.Boolean.Input(
                    "decode",
                    default=True,
                    optional=True,
                    tooltip="Accelerate decoding: latents to images. Compiled when the first latent is decoded.",
                ),
                io.Boolean.Input(
                    "encode",
                    default=True,
                    optional=True,
                    tooltip="Accelerate encoding: images to latents. Compiled when the first image is encoded.",
                ),
                Buckets.Input(
                    "buckets",
                    optional=True,
                    tooltip=(
                        "Sizes of images that get graphs of their own, a little faster than the general graph that "
                        "serves every other size. From OneDiff Shape Bucket. Without it, sizes that come often get "
                        "one anyway."
                    ),
                ),
            ],
            outputs=[io.Vae.Output(tooltip="The accelerated VAE. Connect it to whatever decodes or encodes.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(
        cls,
        vae: Any,
        engine: str,
        compile: str = COMPILE_CHOICES[0],
        decode: bool = True,
        encode: bool = True,
        buckets: Any = None,
    ) -> io.NodeOutput:
        methods = [name for name, wanted in (("decode", decode), ("encode", encode)) if wanted]
        chosen = {"compile": compile, "buckets": buckets, "methods": methods}
        return io.NodeOutput(speed_up("vae", vae, engine, cls.hidden.unique_id, **chosen))
