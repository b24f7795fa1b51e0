"""Flux in Dynamic VRAM, not all of it on the device, whose runs reuse what deep blocks computed in an earlier step.

    python reused_flux.py COMFY_DIR CHECKPOINT

Prints as JSON of each picture how many steps reused something, how far it is from the one of a model that fits into the
memory, and of how many blocks the host was asked for the weights in each step.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

comfyui, checkpoint = sys.argv[1:]
sys.argv = sys.argv[:1]  # the host reads the command line when it is imported
sys.path[:0] = [comfyui, str(Path(__file__).resolve().parents[2])]
from comfy.cli_args import args  # noqa: E402 - the host's path first

args.cpu = args.use_pytorch_cross_attention = True
import comfy.model_management as memory  # noqa: E402
import comfy.sd  # noqa: E402
import pages_of_cpu  # noqa: E402
import torch  # noqa: E402
from tiny_flux import sampled, with_lora  # noqa: E402

from onediff_comfy.host.adapters.model import accelerate, find_dispatcher, with_step_cache  # noqa: E402
from onediff_comfy.host.weights.residency import StreamedModules  # noqa: E402

STEPS, THRESHOLD = 12, 0.5


def loaded() -> Any:
    model = comfy.sd.load_checkpoint_guess_config(checkpoint, output_clip=False, output_vae=False)[0]
    return pages_of_cpu.off_device(model) if model.is_dynamic() else model


def by_step(model: Any, asked: list[int]) -> Any:
    """A clone of ``model`` in each of whose steps the blocks are counted that the host is asked for."""

    def step(apply: Any, given: dict[str, Any]) -> Any:
        asked.append(0)
        return apply(given["input"], given["timestep"], **given["c"])

    clone = model.clone()
    clone.set_model_unet_function_wrapper(step)
    return clone


def picture(fast: Any, expected: torch.Tensor) -> dict[str, Any]:
    """A picture where the host believes that there is hardly any memory to compute in."""
    dispatcher, asked, in_place = find_dispatcher(fast), list[int](), StreamedModules.in_place
    assert dispatcher is not None

    def counted(*given: Any) -> Any:
        asked[-1] += 1
        return in_place(*given)

    before = dispatcher.metrics.snapshot()
    StreamedModules.in_place = counted  # type: ignore[method-assign]
    try:
        actual = sampled(by_step(fast, asked), 1, STEPS)
    finally:
        StreamedModules.in_place = in_place  # type: ignore[method-assign]
    after = dispatcher.metrics.snapshot()
    return {
        "reused": after["reused"] - before["reused"],
        "off": float((actual - expected).abs().max() / (expected.max() - expected.min())),
        "eager": after["fallbacks"],
        "asked": asked,
    }


def main() -> None:
    with torch.inference_mode():
        fits = with_step_cache(accelerate(loaded(), "eager"), THRESHOLD)
        expected = {name: sampled(model, 1, STEPS) for name, model in (("", fits), ("LoRA", with_lora(fits, 0.3)))}
        computed = sampled(accelerate(loaded(), "eager"), 1, STEPS)
        memory.unload_all_models()
        pages_of_cpu.begin()
        memory.get_free_memory = lambda _device=None, torch_free_too=False: (1024, 1024) if torch_free_too else 1024
        fast = with_step_cache(accelerate(loaded(), "eager"), THRESHOLD)
        found = {
            "first": picture(fast, expected[""]),
            "second": picture(fast, expected[""]),
            "LoRA": picture(with_lora(fast, 0.3), expected["LoRA"]),
            "none reused": picture(with_step_cache(fast, 0.0), computed),
        }
    sys.stdout.write(json.dumps(found) + "\n")


main()
