"""What extensions do to a MODEL in Dynamic VRAM that fits, beside the host's own pictures of the same.

    python extended_whole.py COMFY_DIR CHECKPOINT

Prints as JSON what ``extended_blocks.py`` prints.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any
from unittest.mock import patch

import torch
from extended_blocks import Pictures, memory, off, pages_of_cpu, twice


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


def room_made_in_a_patch(model: Any) -> Pictures:
    """As one does that loads another model. Of this one some pages can go, and all else is to stay."""
    model, calls = model.clone(), list[int]()
    generator = torch.Generator().manual_seed(4)
    for name, weight in model.model.diffusion_model.state_dict().items():
        if name.endswith(("bias", "scale")):  # a LoRA on small weights, which the host takes back with the whole model
            added = torch.randn(*weight.shape, generator=generator) * 0.3
            model.add_patches({f"diffusion_model.{name}": ("diff", (added,))}, 1.0)

    def replace(given: dict[str, Any], extra: dict[str, Any]) -> Any:
        calls.append(1)
        if len(calls) == 2:
            page, left = next(iter(model.model.dynamic_vbars.values())).page, (1 << 20, 1 << 20)
            with patch.object(
                memory, "get_free_memory", lambda *_, torch_free_too=False: left if torch_free_too else left[0]
            ):
                memory.free_memory((1 << 20) + 3 * page, memory.get_torch_device())
        return extra["original_block"](given)

    model.set_model_patch_replace(replace, "dit", "double_block", 0)
    return twice(model, 4)


class Stopped(RuntimeError):
    """An extension's."""


def error_of_a_patch(model: Any) -> Pictures:
    """It ends the image, and is for whoever waits for it. Gives how often the patch was called."""
    model, calls = model.clone(), list[int]()

    def replace(given: dict[str, Any], extra: dict[str, Any]) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise Stopped
        return extra["original_block"](given)

    model.set_model_patch_replace(replace, "dit", "double_block", 0)
    with contextlib.suppress(Stopped):
        twice(model)
    return [torch.tensor([0.0, len(calls)])]


if __name__ == "__main__":
    pages_of_cpu.begin()
    scripts = (
        *(hook_in_the_middle, repeated_block, outside_of_inference_mode),
        *(room_made_in_a_patch, error_of_a_patch),
    )
    found = {script.__name__: off(script) for script in scripts}
    sys.stdout.write(json.dumps(found) + "\n")
