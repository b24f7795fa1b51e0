"""A MODEL of which the host keeps no weight on the device, as under --novram, sampled in this process.

    python partly_loaded.py COMFY_DIR CHECKPOINT

Prints as JSON how far each picture is from the host's own, and what served it. The device is the CPU: told that
it is none, the host goes through its own code for a GPU that is too small.
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
import torch  # noqa: E402
from counting import answered  # noqa: E402
from tiny_flux import sampled, with_lora  # noqa: E402

from onediff_comfy.host.adapters.model import accelerate, find_dispatcher  # noqa: E402

_is_device_cpu = memory.is_device_cpu


def too_small(small: bool) -> None:
    """Have the host take the device for a GPU that holds nothing; or for what it is."""
    memory.unload_all_models()
    memory.vram_state = memory.VRAMState.NO_VRAM if small else memory.VRAMState.DISABLED
    memory.is_device_cpu = (lambda _device: False) if small else _is_device_cpu


def taken_away_meanwhile(plain: Any, models: dict[str, tuple[Any, Any]]) -> list[dict[str, Any]]:
    """The host takes a model's weights off the device between two steps of a run, as for another that needs room."""
    cases = []
    for name in ("LoRA", "no LoRA"):
        too_small(False)
        expected = sampled(models[name][0], 2)
        too_small(False)
        model, steps = models[name][1].clone(), []

        def between_steps(apply: Any, given: dict[str, Any], model: Any = model, steps: list[int] = steps) -> Any:
            steps.append(1)
            if len(steps) == 2:
                memory.is_device_cpu = lambda _device: False
                model.partially_unload(model.offload_device, 1 << 40)
            return apply(given["input"], given["timestep"], **given["c"])

        model.set_model_unet_function_wrapper(between_steps)
        dispatcher = find_dispatcher(model)
        assert dispatcher is not None
        before = dispatcher.metrics.snapshot()
        actual = sampled(model, 2)
        after = dispatcher.metrics.snapshot()
        cases.append(
            {
                "name": f"{name}, taken away",
                "offloaded": bool(model.model.model_lowvram),
                "off": float((actual - expected).abs().max() / (expected.max() - expected.min())),
                "steps": len(steps),
                "served": after["served"] - before["served"],
                "eager": sum(after["fallbacks"].values()) - sum(before["fallbacks"].values()),
            }
        )
    return cases


def main() -> None:
    cases = []
    with torch.inference_mode():
        plain = comfy.sd.load_checkpoint_guess_config(checkpoint, output_clip=False, output_vae=False)[0]
        models = {
            "no LoRA": (plain, accelerate(plain, "eager")),
            "LoRA": (with_lora(plain, 0.8), with_lora(accelerate(plain, "eager"), 0.8)),
            "another LoRA": (with_lora(plain, 0.3), accelerate(with_lora(plain, 0.3), "eager")),
            "nobody waits": (plain, accelerate(plain, "inductor", compile="auto")),
        }
        no_lora = sampled(plain, 1)
        for small, name in (
            (False, "LoRA"),
            (True, "no LoRA"),
            (True, "LoRA"),
            (True, "another LoRA"),
            (True, "no LoRA"),
            (False, "LoRA"),
            (False, "no LoRA"),
            (True, "LoRA"),
            (False, "another LoRA"),
            (True, "nobody waits"),  # its blocks, which no other process can compile
        ):
            too_small(small)
            reference, model = models[name]
            expected = sampled(reference, 1)
            dispatcher = find_dispatcher(model)
            assert dispatcher is not None
            before = dispatcher.metrics.snapshot()
            actual = sampled(model, 1)
            after = dispatcher.metrics.snapshot()
            cases.append(
                {
                    "small": small,
                    "name": name,
                    "offloaded": bool(model.model.model_lowvram),
                    "off": float((actual - expected).abs().max() / (expected.max() - expected.min())),
                    "from_no_lora": float((expected - no_lora).abs().max()),
                    **answered(before, after),
                }
            )
        cases += taken_away_meanwhile(plain, models)
    sys.stdout.write(json.dumps(cases) + "\n")


main()
