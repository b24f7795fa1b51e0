"""OneDiff Warm Up."""

from __future__ import annotations

from typing import Any

from ..onediff_comfy.host.actions import warm_up
from ..onediff_comfy.host.node_api import io
from .shape_bucket import Buckets


class OneDiffWarmUp(io.ComfyNode):
    """Every bucket of a MODEL, a VAE or both prepared before the first image."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="OneDiffWarmUp",
            display_name="OneDiff Warm Up",
            category="OneDiff",
            description=(
                "Prepares every bucket ahead, so that no image waits for compiling. Put it between OneDiff Model "
                "Speedup and the sampler, between OneDiff VAE Speedup and VAE Decode, or both; or run it by itself. "
                "Stop it at any time: what is done is kept, and the next run goes on from there."
            ),
            search_aliases=["compile ahead", "precompile", "prepare", "warmup", "预热"],
            is_output_node=True,
            inputs=[
                io.Model.Input("model", optional=True, tooltip="A model that went through OneDiff Model Speedup."),
                Buckets.Input("buckets", tooltip="From OneDiff Shape Bucket."),
                io.Conditioning.Input(
                    "positive",
                    optional=True,
                    tooltip="The prompt that the sampler gets. A model needs it, a VAE does not.",
                ),
                io.Conditioning.Input(
                    "negative",
                    optional=True,
                    tooltip="The negative prompt; leave it out for models that are sampled at cfg 1.",
                ),
                io.Vae.Input(
                    "vae",
                    optional=True,
                    tooltip=(
                        "A VAE that went through OneDiff VAE Speedup: what is switched on there, decoding and "
                        "encoding, is prepared for images of these sizes."
                    ),
                ),
            ],
            outputs=[
                io.Model.Output(tooltip="The same model. Connect it to the sampler, which then waits for this."),
                io.Vae.Output(tooltip="The same VAE. Connect it to whatever decodes or encodes."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(
        cls, buckets: Any, model: Any = None, positive: Any = None, negative: Any = None, vae: Any = None
    ) -> io.NodeOutput:
        things = {"model": model, "vae": vae}
        summary, prepared = warm_up(things, buckets, positive, negative, cls.hidden.unique_id)
        return io.NodeOutput(model, vae, ui={"text": (summary,), "warm_up": prepared})
