"""What extensions do to a MODEL in Dynamic VRAM that fits, beside the host's own pictures of the same.

    python extended_whole.py COMFY_DIR CHECKPOINT

Prints as JSON what ``extended_blocks.py`` prints.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from extended_blocks import Pictures, off, pages_of_cpu, twice


def hook_in_the_middle(model: Any) -> Pictures:
    """A wrapper sets a hook on a layer from the second step on, and takes it off before the next image."""
    layer, calls, hooks = model.model.diffusion_model.single_blocks[0].linear2, list[int](), list[Any]()

    def wrapper(apply: Any, given: dict[str, Any]) -> Any:
        calls.append(1)
        if len(calls) % 4 == 2:
            hooks.append(layer.register_forward_hook(lambda _layer, _given, output: output * 1.2))
        elif len(calls) % 4 == 0:
            hooks.pop().remove()
        return apply(given["input"], given["timestep"], **given["c"])

    model = model.clone()
    model.set_model_unet_function_wrapper(wrapper)
    return twice(model, 4)


def repeated_block(model: Any) -> Pictures:
    """A block is called once more, from the second image on."""
    found, blocks = twice(model), model.model.diffusion_model.single_blocks
    blocks.append(blocks[0])
    return [*found, *twice(model)]


def outside_of_inference_mode(model: Any) -> Pictures:
    """A wrapper makes the second call as code does that computes gradients elsewhere."""
    calls = list[int]()

    def wrapper(apply: Any, given: dict[str, Any]) -> Any:
        calls.append(1)
        with torch.inference_mode(len(calls) != 2), torch.no_grad():
            return apply(given["input"], given["timestep"], **given["c"])

    model = model.clone()
    model.set_model_unet_function_wrapper(wrapper)
    return twice(model, 4)


if __name__ == "__main__":
    pages_of_cpu.begin()
    scripts = hook_in_the_middle, repeated_block, outside_of_inference_mode
    found = {script.__name__: off(script) for script in scripts}
    sys.stdout.write(json.dumps(found) + "\n")
