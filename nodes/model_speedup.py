"""OneDiff Model Speedup."""

from __future__ import annotations

from typing import Any

from ..onediff_comfy.host.actions import speed_up
from ..onediff_comfy.host.node_api import io
from ..onediff_comfy.settings import ENGINE_NAMES


class OneDiffModelSpeedup(io.ComfyNode):
    """MODEL in, the same MODEL out, served by compiled graphs."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="OneDiffModelSpeedup",
            display_name="OneDiff Model Speedup",
            category="OneDiff",
            description=(
                "Makes every image from this model faster, with the same pixels. Put it between the loader "
                "(or the last LoRA) and the sampler. The first image compiles the model, which takes about a "
                "minute; every later one uses the compiled graph."
            ),
            search_aliases=["torch compile", "tensorrt", "speed", "accelerate", "faster", "加速"],
            inputs=[
                io.Model.Input("model", tooltip="The model to make faster. It is not changed; a copy comes out."),
                io.Combo.Input(
                    "engine",
                    options=list(ENGINE_NAMES),
                    default="auto",
                    tooltip=(
                        "What compiles the model. auto: the best engine this machine has. inductor: PyTorch's "
                        "compiler, fastest on current GPUs. oneflow: OneFlow graphs. cudagraph: no compiling, only "
                        "the overhead of launching is saved (NVIDIA). eager: the captured graph step by step, for "
                        "finding faults, not faster. An engine that cannot run here says why on the node, and the "
                        "image is made without it."
                    ),
                ),
            ],
            outputs=[io.Model.Output(tooltip="The accelerated model. Connect it to the sampler.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, model: Any, engine: str) -> io.NodeOutput:
        return io.NodeOutput(speed_up(model, engine, cls.hidden.unique_id))
