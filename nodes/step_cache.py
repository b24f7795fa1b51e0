"""OneDiff Step Cache."""

from __future__ import annotations

from typing import Any

from ..onediff_comfy.host.actions import cache_steps
from ..onediff_comfy.host.node_api import io
from ..onediff_comfy.settings import STEP_CACHE_THRESHOLD


class OneDiffStepCache(io.ComfyNode):
    """MODEL in, MODEL out, whose deep layers are not computed in every step."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="OneDiffStepCache",
            display_name="OneDiff Step Cache",
            category="OneDiff",
            description=(
                "Skips a model's deep layers in steps where they would hardly change anything. Much faster from about "
                "20 steps on, but the image is not the same: compare with and without it. Put it between OneDiff Model "
                "Speedup and the sampler. The first image compiles the model for it, once ever."
            ),
            search_aliases=["first block cache", "fbcache", "teacache", "deepcache", "easycache", "faster", "缓存"],
            inputs=[
                io.Model.Input("model", tooltip="A model that went through OneDiff Model Speedup."),
                io.Float.Input(
                    "threshold",
                    default=STEP_CACHE_THRESHOLD,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip=(
                        "How much the result of the model's first block may change, relative to its size, before all "
                        "layers are computed again. Higher is faster and further from the image without the cache; 0 "
                        "computes every step in full. The node shows how many calls were reused."
                    ),
                ),
            ],
            outputs=[io.Model.Output(tooltip="The model with a step cache. Connect it to the sampler.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, model: Any, threshold: float) -> io.NodeOutput:
        return io.NodeOutput(cache_steps(model, threshold, cls.hidden.unique_id))
