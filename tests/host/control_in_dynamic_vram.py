"""A ControlNet in Dynamic VRAM, whose network is served from the pages that the host keeps its weights in.

    python control_in_dynamic_vram.py COMFY_DIR CHECKPOINT CONTROL

Prints as JSON, by the dtype of the ControlNet's weights, of each picture how far it is from one of an ordinary model
and ControlNet, and what served the network.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

comfyui, checkpoint, control_file = sys.argv[1:]
sys.argv = sys.argv[:1]  # the host reads the command line when it is imported
sys.path[:0] = [comfyui, str(Path(__file__).resolve().parents[2])]
from comfy.cli_args import args  # noqa: E402 - the host's path first

args.cpu = args.use_pytorch_cross_attention = True
import comfy.model_management as memory  # noqa: E402
import comfy.sample  # noqa: E402
import comfy.sd  # noqa: E402
import pages_of_cpu  # noqa: E402
import torch  # noqa: E402
from comfy.controlnet import load_controlnet_state_dict  # noqa: E402
from pages_of_cpu import Pages, looked_at  # noqa: E402

import nodes  # noqa: E402
from benchmarks.memory_modes import off  # noqa: E402
from onediff_comfy.host.adapters.controlnet import accelerate_control, find_control_dispatcher  # noqa: E402


def loaded(dtype: torch.dtype) -> tuple[Any, Any]:
    """Return a MODEL and a ControlNet; in Dynamic VRAM, since that has begun, with weights off the device."""
    model = comfy.sd.load_checkpoint_guess_config(checkpoint, output_clip=False, output_vae=False)[0]
    weights = comfy.utils.load_torch_file(control_file)
    control = load_controlnet_state_dict({name: weight.to(dtype) for name, weight in weights.items()})
    control.manual_cast_dtype = torch.float32
    for each in (model, control.control_model_wrapped):
        if each.is_dynamic():
            pages_of_cpu.off_device(each)
    return model, control


def sampled(model: Any, control: Any, strength: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    positive, negative = ([[torch.randn(1, 77, 768, generator=generator), {}]] for _ in range(2))
    image = torch.rand(1, 128, 128, 3, generator=generator)
    both = positive, negative
    if control is not None:
        both = nodes.ControlNetApplyAdvanced().apply_controlnet(positive, negative, control, image, strength, 0, 1)
    latent, noise = torch.zeros(1, 4, 16, 16), torch.randn(1, 4, 16, 16, generator=generator)
    picture: torch.Tensor = comfy.sample.sample(
        model, noise, 3, 3.0, "euler", "simple", *both, latent, disable_pbar=True, seed=1
    )
    return picture


def case(model: Any, control: Any, expected: torch.Tensor, strength: float = 1.0) -> dict[str, Any]:
    dispatcher = find_control_dispatcher(control)
    assert dispatcher is not None
    patcher = control.control_model_wrapped
    actual, found = looked_at(dispatcher, patcher, lambda: sampled(model, control, strength))
    return {"off": off(actual, expected), **found}


def pictures(model: Any, control: Any) -> list[torch.Tensor]:
    """Return the host's own: with the ControlNet, with less of it, and without it."""
    made = [sampled(model, control, 1.0), sampled(model, control, 0.5), sampled(model, None)]
    memory.unload_all_models()
    return made


def of_dtype(dtype: torch.dtype, expected: torch.Tensor, weaker: torch.Tensor, without: torch.Tensor) -> dict[str, Any]:
    memory.unload_all_models()
    model, control = loaded(dtype)
    fast = accelerate_control(control, "eager")
    patcher = fast.control_model_wrapped
    found: dict[str, Any] = {
        "effect": off(without, expected),
        "shared": patcher.model is control.control_model_wrapped.model,
        "first": case(model, fast, expected),
        "another strength": case(model, fast, weaker, 0.5),
        "a copy": case(model, fast.copy(), expected),
    }
    patcher.partially_unload(None, 1e30)
    found["taken away and back"] = case(model, fast, expected)
    Pages.room = 1
    memory.unload_all_models()
    found["no room"] = case(model, fast, expected)
    Pages.room = 1 << 20
    memory.unload_all_models()
    found["room again"] = case(model, fast, expected)
    found["by the host"] = off(sampled(model, control), expected)
    return found


def main() -> None:
    dtypes = torch.float32, torch.float8_e4m3fn
    with torch.inference_mode():
        ordinary = {dtype: pictures(*loaded(dtype)) for dtype in dtypes}
        pages_of_cpu.begin()
        found = {str(dtype).removeprefix("torch."): of_dtype(dtype, *ordinary[dtype]) for dtype in dtypes}
    sys.stdout.write(json.dumps(found) + "\n")


main()
