"""OneDiff Warm Up."""

from __future__ import annotations

from typing import Any

from ..onediff_comfy.host.actions import warm_up
from ..onediff_comfy.host.node_api import io
from .shape_bucket import Buckets


class OneDiffWarmUp(io.ComfyNode):
    """Every bucket of a MODEL prepared before the first image."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="OneDiffWarmUp",
            display_name="OneDiff Warm Up",
            category="OneDiff",
            description=(
                "Prepares every bucket ahead, so that no image waits for compiling. Put it between OneDiff Model "
                "Speedup and the sampler, or run it by itself. Stop it at any time: what is done is kept, and the next "
                "run goes on from there."
            ),
            search_aliases=["compile ahead", "precompile", "prepare", "warmup", "预热"],
            is_output_node=True,
            inputs=[
                io.Model.Input("model", tooltip="A model that went through OneDiff Model Speedup."),
                Buckets.Input("buckets", tooltip="From OneDiff Shape Bucket."),
                io.Conditioning.Input("positive", tooltip="The prompt that the sampler gets."),
                io.Conditioning.Input(
                    "negative",
                    optional=True,
                    tooltip="The negative prompt; leave it out for models that are sampled at cfg 1.",
                ),
            ],
            outputs=[io.Model.Output(tooltip="The same model. Connect it to the sampler, which then waits for this.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, model: Any, buckets: Any, positive: Any, negative: Any = None) -> io.NodeOutput:
        summary, prepared = warm_up(model, buckets, positive, negative, cls.hidden.unique_id)
        return io.NodeOutput(model, ui={"text": (summary,), "warm_up": prepared})
