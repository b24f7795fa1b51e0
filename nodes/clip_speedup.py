"""OneDiff CLIP Speedup."""

from __future__ import annotations

from typing import Any

from ..onediff_comfy.host.actions import speed_up_clip
from ..onediff_comfy.host.node_api import io
from ..onediff_comfy.settings import ENGINE_NAMES


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
                "loader (or a LoRA) and CLIP Text Encode. The first prompt compiles the encoder; every later one, of "
                "any length and with any weights or embeddings in it, uses the compiled graph. Worth it for large "
                "encoders; a small one is done in a moment anyway."
            ),
            search_aliases=["text encoder", "t5", "torch compile", "prompt", "speed", "accelerate", "faster", "加速"],
            inputs=[
                io.Clip.Input(
                    "clip", tooltip="The text encoders to make faster. They are not changed; a copy comes out."
                ),
                io.Combo.Input(
                    "engine",
                    options=list(ENGINE_NAMES),
                    default="auto",
                    tooltip=(
                        "What compiles the text encoders. auto: the best engine this machine has. inductor: PyTorch's "
                        "compiler, fastest on current GPUs. oneflow: OneFlow graphs. cudagraph: no compiling, only the "
                        "overhead of launching is saved (NVIDIA). eager: the captured graph step by step, for finding "
                        "faults, not faster. An engine that cannot run here says why on the node, and prompts are "
                        "encoded without it."
                    ),
                ),
                io.Combo.Input(
                    "compile",
                    options=["wait", "background"],
                    default="wait",
                    optional=True,
                    tooltip=(
                        "Who waits for compiling. wait: the first prompt does. background: nobody; prompts are encoded "
                        "at the usual speed while another process compiles, and faster once it is done."
                    ),
                ),
            ],
            outputs=[io.Clip.Output(tooltip="The accelerated CLIP. Connect it to CLIP Text Encode.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, clip: Any, engine: str, compile: str = "wait") -> io.NodeOutput:
        return io.NodeOutput(speed_up_clip(clip, engine, compile == "background", cls.hidden.unique_id))
