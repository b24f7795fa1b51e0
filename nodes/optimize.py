"""OneDiff Optimize."""

from __future__ import annotations

from typing import Any

from ..onediff_comfy.host.actions import optimize
from ..onediff_comfy.host.node_api import io
from ..onediff_comfy.settings import GOALS


class OneDiffOptimize(io.ComfyNode):
    """MODEL, VAE and CLIP in and out, accelerated by one choice."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="OneDiffOptimize",
            display_name="OneDiff Optimize",
            category="OneDiff",
            description=(
                "Makes the model, VAE and text encoders faster with a single setting. Put it after the loader or the "
                "last LoRA. Another process compiles them, once ever, which takes up to a few minutes; from then on "
                "every image uses the compiled graphs. The other OneDiff nodes do this one at a time, with more "
                "choices."
            ),
            search_aliases=[
                *(
                    "speed",
                    "speed up",
                    "compile",
                    "compiler",
                    "torch compile",
                    "optimize",
                    "optimise",
                    "faster",
                    "accelerate",
                ),
                *("fp8", "cache", "teacache", "tensorrt", "编译", "加速", "优化"),
            ],
            inputs=[
                io.Model.Input("model", tooltip="The model to make faster. It is not changed; a copy comes out."),
                io.Combo.Input(
                    "goal",
                    options=list(GOALS),
                    default=GOALS[0],
                    tooltip=(
                        "exact: the same image as without the node, up to rounding. faster: skips deep layers in steps "
                        "where they would hardly change anything, which changes the image; worth it from about 20 "
                        "steps on. fastest: also computes large layers in 8 bits, for models and GPUs where that is "
                        "faster (Flux on a GeForce RTX 40, Hopper or later); elsewhere it is the same as faster."
                    ),
                ),
                io.Vae.Input(
                    "vae", optional=True, tooltip="The VAE to make faster. Leave it out to keep ComfyUI's own."
                ),
                io.Clip.Input(
                    "clip",
                    optional=True,
                    tooltip="The text encoders to make faster. Worth it for large ones, such as T5.",
                ),
            ],
            outputs=[
                io.Model.Output(tooltip="The accelerated model. Connect it to the sampler."),
                io.Vae.Output(tooltip="The accelerated VAE. Connect it to whatever decodes or encodes."),
                io.Clip.Output(tooltip="The accelerated CLIP. Connect it to CLIP Text Encode."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, model: Any, goal: str, vae: Any = None, clip: Any = None) -> io.NodeOutput:
        things = {"model": model, "vae": vae, "clip": clip}
        made = optimize(things, goal, cls.hidden.unique_id)
        return io.NodeOutput(*(made[kind] for kind in things))
