"""A ControlNet whose image was stopped, and whose layers' code was replaced before the next.

    python stopped_control.py COMFY_DIR CHECKPOINT CONTROL

Prints as JSON how far the next image is from the host's own, and how much the replaced code changes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

COMFY_DIR, CHECKPOINT, CONTROL = sys.argv[1:]
sys.path[:0] = [COMFY_DIR, str(Path(__file__).resolve().parents[2])]
sys.argv = sys.argv[:1]

import comfy.cli_args  # noqa: E402

comfy.cli_args.args.cpu = comfy.cli_args.args.use_pytorch_cross_attention = True

import comfy.ldm.modules.diffusionmodules.openaimodel as unet  # noqa: E402
import comfy.model_management  # noqa: E402
import comfy.sample  # noqa: E402
import comfy.sd  # noqa: E402
import torch  # noqa: E402
from comfy.controlnet import load_controlnet  # noqa: E402

import nodes  # noqa: E402
from onediff_comfy.host.adapters.controlnet import accelerate_control  # noqa: E402


def prompts(control: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    positive, negative = ([[torch.randn(1, 77, 768, generator=generator), {}]] for _ in range(2))
    image = torch.rand(1, 128, 128, 3, generator=generator)
    return nodes.ControlNetApplyAdvanced().apply_controlnet(positive, negative, control, image, 1.0, 0, 1)


def sampled(model: Any, conditioning: Any) -> torch.Tensor:
    latent, noise = torch.zeros(1, 4, 16, 16), torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(2))
    return comfy.sample.sample(model, noise, 3, 3.0, "euler", "simple", *conditioning, latent, disable_pbar=True)


def stop(model: Any, conditioning: Any) -> None:
    def interrupted(apply: Any, given: Any) -> Any:
        apply(given["input"], given["timestep"], **given["c"])
        raise comfy.model_management.InterruptProcessingException

    stopped = model.clone()
    stopped.set_model_unet_function_wrapper(interrupted)
    try:
        sampled(stopped, conditioning)
    except comfy.model_management.InterruptProcessingException:
        return


with torch.inference_mode():
    model = comfy.sd.load_checkpoint_guess_config(CHECKPOINT, output_vae=False, output_clip=False)[0]
    control = load_controlnet(CONTROL)
    plain, ours = prompts(control), prompts(accelerate_control(control, "eager"))
    before = sampled(model, plain)
    sampled(model, ours)
    stop(model, ours)
    own = unet.ResBlock._forward
    unet.ResBlock._forward = lambda self, x, emb: own(self, x, emb) * 0.5
    expected = sampled(model, plain)
    found = {"off": sampled(model, ours) - expected, "changes": expected - before}
    sys.stdout.write(json.dumps({name: float(by.norm() / expected.norm()) for name, by in found.items()}))
