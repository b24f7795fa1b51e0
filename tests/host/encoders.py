"""A prompt through a tiny text encoder: of all graphs by Inductor one of these is compiled the fastest."""

from __future__ import annotations

from typing import Any

from pictures import FAMILIES

from tools.models.checkpoints import checkpoint_file
from tools.workflows import Workflow


def encoded(
    text: str, engine: str | None = "eager", *, family: str = "sd15", before: Any = (), behind: Any = (), seed: int = 0
) -> Workflow:
    """A prompt encoded, and what came out saved.

    Args:
        engine: of the CLIP Speedup node; None leaves it out.
        before: (class_type, inputs, output) of nodes between the loader and the node.
        behind: likewise between it and the prompt.
        seed: of the encoders' weights.
    """
    workflow: Workflow = {"loader": {"class_type": "TinyTextEncoder", "inputs": {"family": family, "seed": seed}}}
    clip = ["loader", 0]
    nodes = [*before, *([("OneDiffCLIPSpeedup", {"engine": engine, "compile": "wait"}, 0)] if engine else []), *behind]
    for number, (class_type, inputs, output) in enumerate(nodes):
        name = "speedup" if class_type.startswith("OneDiff") else f"node{number}"
        workflow[name] = {"class_type": class_type, "inputs": {**inputs, "clip": clip}}
        clip = [name, output]
        if "model" in inputs:
            checkpoint = checkpoint_file(FAMILIES["sd15"].checkpoint)
            workflow["model"] = {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": checkpoint}}
    workflow["prompt"] = {"class_type": "CLIPTextEncode", "inputs": {"clip": clip, "text": text}}
    workflow["result"] = {"class_type": "ConditioningAsLatent", "inputs": {"conditioning": ["prompt", 0]}}
    saved = {"samples": ["result", 0], "filename_prefix": "conditioning"}
    workflow["save"] = {"class_type": "SaveLatent", "inputs": saved}
    return workflow
