"""OneDiff Model Speedup."""

from __future__ import annotations

from typing import Any

from ..onediff_comfy.host.actions import speed_up
from ..onediff_comfy.host.node_api import io
from ..onediff_comfy.settings import COMPILE_CHOICES, PRECISIONS
from .shape_bucket import Buckets
from .speedup_inputs import compile_input, engine_input


class OneDiffModelSpeedup(io.ComfyNode):
    """MODEL in, the same MODEL out, served by compiled graphs."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="OneDiffModelSpeedup",
            display_name="OneDiff Model Speedup",
            category="OneDiff",
            description=(
                "Makes every image from this model faster without visibly changing it. Put it between the loader (or "
                "the last LoRA) and the sampler. Another process compiles the model, once ever, which takes up "
                "to a few minutes; from then on every image uses the compiled graph."
            ),
            search_aliases=["torch compile", "tensorrt", "speed", "accelerate", "faster", "加速"],
            inputs=[
                io.Model.Input("model", tooltip="The model to make faster. It is not changed; a copy comes out."),
                engine_input("the model", "the image is made"),
                compile_input("image", "images are made at their"),
                io.Int.Input(
                    "cache_budget_mb",
                    default=0,
                    min=0,
                    max=1 << 20,
                    optional=True,
                    tooltip=(
                        "Memory in MB that compiled graphs may use, for all nodes together and without the models' "
                        "weights. Beyond it, the least recently used are dropped. 0: an eighth of all memory."
                    ),
                ),
                Buckets.Input(
                    "buckets",
                    optional=True,
                    tooltip=(
                        "Sizes that get graphs of their own, a little faster than the general graph that serves every "
                        "other size. From OneDiff Shape Bucket. Without it, sizes that come often get one anyway."
                    ),
                ),
                io.Combo.Input(
                    "precision",
                    options=list(PRECISIONS),
                    default=PRECISIONS[0],
                    optional=True,
                    tooltip=(
                        "lossless: the same image as without the node, up to rounding. fp8: large layers in 8 bits, "
                        "which is faster but changes the image: every input of such a layer is rounded to 4 "
                        "significant bits. Needs a GeForce RTX 40, Hopper or later; elsewhere graphs stay lossless and "
                        "the node says so."
                    ),
                ),
            ],
            outputs=[io.Model.Output(tooltip="The accelerated model. Connect it to the sampler.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(
        cls,
        model: Any,
        engine: str,
        compile: str = COMPILE_CHOICES[0],
        cache_budget_mb: int = 0,
        buckets: Any = None,
        precision: str = PRECISIONS[0],
    ) -> io.NodeOutput:
        chosen = {
            "compile": compile,
            "budget_mb": cache_budget_mb,
            "buckets": buckets,
            "precision": precision,
        }
        return io.NodeOutput(speed_up("model", model, engine, cls.hidden.unique_id, **chosen))
