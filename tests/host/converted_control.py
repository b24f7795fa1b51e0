"""A ControlNet that another extension makes one of its own of, whose code is replaced before the next image.

    python converted_control.py COMFY_DIR CHECKPOINT CONTROL LORA

Prints as JSON: what is converted, and how far images are from those with what is converted of the host's own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

COMFY_DIR, CHECKPOINT, CONTROL, LORA = sys.argv[1:]
sys.path[:0] = [COMFY_DIR, str(Path(__file__).resolve().parents[2])]
sys.argv = sys.argv[:1]

import comfy.cli_args  # noqa: E402

comfy.cli_args.args.cpu = comfy.cli_args.args.use_pytorch_cross_attention = True

import comfy.ldm.modules.diffusionmodules.openaimodel as unet  # noqa: E402
import comfy.sample  # noqa: E402
import comfy.sd  # noqa: E402
import torch  # noqa: E402
from comfy.controlnet import ControlLora, ControlNet, load_controlnet  # noqa: E402

import nodes  # noqa: E402
from onediff_comfy.host.adapters.controlnet import accelerate_control, find_control_dispatcher  # noqa: E402


class Halved(ControlNet):
    """As Advanced-ControlNet writes it: methods of the object itself are in front of those of its class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.base = super()
        self.pre_run = self.base.pre_run
        self.control_merge = self.merge_halved

    def merge_halved(self, control: Any, *args: Any, **kwargs: Any) -> Any:
        halved = {key: [None if x is None else x * 0.5 for x in found] for key, found in control.items()}
        return self.base.control_merge(halved, *args, **kwargs)

    def copy(self) -> Halved:
        copied = Halved(None, load_device=self.load_device, manual_cast_dtype=self.manual_cast_dtype)
        copied.control_model, copied.control_model_wrapped = self.control_model, self.control_model_wrapped
        self.copy_to(copied)
        return copied


def converted(control: Any) -> Any:
    if type(control) != ControlNet:  # noqa: E721
        return control
    halved = Halved(control.control_model, load_device=control.load_device, manual_cast_dtype=control.manual_cast_dtype)
    control.copy_to(halved)
    return halved


def sampled(model: Any, control: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    positive, negative = ([[torch.randn(1, 77, 768, generator=generator), {}]] for _ in range(2))
    image = torch.rand(1, 128, 128, 3, generator=generator)
    conditioning = nodes.ControlNetApplyAdvanced().apply_controlnet(positive, negative, control, image, 1.0, 0, 1)
    latent, noise = torch.zeros(1, 4, 16, 16), torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(2))
    return comfy.sample.sample(model, noise, 2, 3.0, "euler", "simple", *conditioning, latent, disable_pbar=True)


def distance(image: torch.Tensor, other: torch.Tensor) -> float:
    return float((image - other).abs().max() / (other.max() - other.min()))


with torch.inference_mode():
    model = comfy.sd.load_checkpoint_guess_config(CHECKPOINT, output_vae=False, output_clip=False)[0]
    net = load_controlnet(CONTROL)
    own, served = converted(net), converted(accelerate_control(net, "eager"))
    dispatcher = find_control_dispatcher(served)
    found: dict[str, Any] = {
        "kind": isinstance(served, Halved),
        "lora": type(accelerate_control(load_controlnet(LORA), "eager")) == ControlLora,  # noqa: E721
        "off": distance(sampled(model, served), sampled(model, own)),
        "served": dispatcher is not None and dispatcher.metrics.snapshot()["served"],
        "again": distance(sampled(model, served), sampled(model, own)),  # by now a graph is proved
    }
    before = sampled(model, own)
    forward = unet.ResBlock._forward
    with mock.patch.object(unet.ResBlock, "_forward", lambda self, x, emb: forward(self, x, emb) * 1.5):
        expected = sampled(model, own)
        found |= {"changes": distance(expected, before), "off_then": distance(sampled(model, served), expected)}
    found["runs"] = dispatcher is not None and dispatcher.runs
sys.stdout.write(json.dumps(found))
