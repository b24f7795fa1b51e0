"""OneDiff CLIP Speedup."""

from __future__ import annotations

from typing import Any

from ..onediff_comfy.host.actions import speed_up
from ..onediff_comfy.host.node_api import io
from ..onediff_comfy.settings import COMPILE_CHOICES
from .speedup_inputs import compile_input, engine_input


class OneDiffCLIPSpeedup(io.ComfyNode):
    """CLIP in, the same CLIP out, served by compiled graphs."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="OneDiffCLIPSpeedup",
            display_name="OneDiff CLIP Speedup",
            category="OneDiff",
            description=(
                "Makes text encoders faster, with the same result: CLIP, T5 and language models. Put it between the "
                "loader (or a LoRA) and CLIP Text Encode. The encoder is compiled once ever; from then on every "
                "prompt, of any length and with any weights or embeddings in it, uses the compiled graph. Worth it for "
                "large encoders; a small one is done in a moment anyway."
            ),
            search_aliases=["text encoder", "t5", "torch compile", "prompt", "speed", "accelerate", "faster", "加速"],
            inputs=[
                io.Clip.Input(
                    "clip", tooltip="The text encoders to make faster. They are not changed; a copy comes out."
                ),
                engine_input("the text encoders", "prompts are encoded"),
                compile_input("prompt", "prompts are encoded at the"),
            ],
            outputs=[io.Clip.Output(tooltip="The accelerated CLIP. Connect it to CLIP Text Encode.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, clip: Any, engine: str, compile: str = COMPILE_CHOICES[0]) -> io.NodeOutput:
        return io.NodeOutput(speed_up("clip", clip, engine, cls.hidden.unique_id, compile=compile))
