"""OneDiff ControlNet Speedup."""

from __future__ import annotations

from typing import Any

from ..onediff_comfy.host.actions import speed_up
from ..onediff_comfy.host.node_api import io
from ..onediff_comfy.settings import COMPILE_CHOICES
from .speedup_inputs import compile_input, engine_input


class OneDiffControlNetSpeedup(io.ComfyNode):
    """CONTROL_NET in, the same CONTROL_NET out, served by compiled graphs."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="OneDiffControlNetSpeedup",
            display_name="OneDiff ControlNet Speedup",
            category="OneDiff",
            description=(
                "Makes a ControlNet or Control LoRA faster without visibly changing the image. Put it between the "
                "loader and Apply ControlNet. It is compiled once ever; from then on every image, of any size, "
                "strength or range of steps, uses the compiled graph. OneDiff Model Speedup does the same for the "
                "diffusion model."
            ),
            search_aliases=["torch compile", "tensorrt", "control", "speed", "accelerate", "faster", "加速"],
            inputs=[
                io.ControlNet.Input(
                    "control_net",
                    tooltip=(
                        "The ControlNet to make faster. It is not changed; a copy comes out. What has no network that "
                        "runs at every step, such as a T2I-Adapter, passes through as it is."
                    ),
                ),
                engine_input("the ControlNet", "the image is made"),
                compile_input("image", "images are made at their"),
            ],
            outputs=[io.ControlNet.Output(tooltip="The accelerated ControlNet. Connect it to Apply ControlNet.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, control_net: Any, engine: str, compile: str = COMPILE_CHOICES[0]) -> io.NodeOutput:
        return io.NodeOutput(speed_up("control_net", control_net, engine, cls.hidden.unique_id, compile=compile))
