"""A family whose forward asks for no wrappers, as SD3's, and extensions that change what the host calls around it.

    python own_apply_model.py COMFY_DIR CHECKPOINT

Prints as JSON of each extension how far three pictures are from the host's, how many calls were served, and why others
were not.
"""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

comfyui, checkpoint = sys.argv[1:]
sys.argv = sys.argv[:1]  # the host reads the command line when it is imported
sys.path[:0] = [comfyui, str(Path(__file__).resolve().parents[2])]
from comfy.cli_args import args  # noqa: E402 - the host's path first

args.cpu = args.use_pytorch_cross_attention = True
import comfy.ldm.flux.model as flux  # noqa: E402
import comfy.sd  # noqa: E402
import torch  # noqa: E402
from tiny_flux import sampled  # noqa: E402

from onediff_comfy.host.adapters.model import accelerate, find_dispatcher  # noqa: E402


def forward(
    self: Any,
    x: Any,
    timestep: Any,
    context: Any,
    y: Any = None,
    guidance: Any = None,
    ref_latents: Any = None,
    control: Any = None,
    transformer_options: Any = {},  # noqa: B006 - as the host has it
    **options: Any,
) -> Any:
    """Flux' own, without the wrappers that others ask for."""
    return self._forward(x, timestep, context, y, guidance, ref_latents, control, transformer_options, **options)


class Scaling:
    """An extension with a method of its own in the place of the model's."""

    def __init__(self, model: Any) -> None:
        self.model, self.calls = model, 0

    def apply(self, x: Any, t: Any, *given: Any, **options: Any) -> Any:
        self.calls += 1
        return type(self.model)._apply_model(self.model, x, t, *given, **options) * (1 + 0.02 * self.calls)


def nothing(_model: Any) -> None:
    """No extension."""


def counted(model: Any) -> Any:
    """The model's method counts its calls on the model, and keeps what it gave."""

    def apply(self: Any, x: Any, t: Any, *given: Any, **options: Any) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        output = type(self)._apply_model(self, x, t, *given, **options) * (1 + 0.02 * self.calls)
        output, self.last = output + 0.1 * getattr(self, "last", 0.0), output
        return output

    return types.MethodType(apply, model)


def of_another(model: Any) -> Any:
    """It is another object's method."""
    return Scaling(model).apply


def pictures(extension: Any, accelerated: bool) -> tuple[list[torch.Tensor], Any]:
    model = comfy.sd.load_checkpoint_guess_config(checkpoint, output_clip=False, output_vae=False)[0]
    model = accelerate(model, "eager") if accelerated else model
    method = extension(model.model)
    if method is not None:
        model.add_object_patch("_apply_model", method)
    found = [sampled(model, seed) for seed in (1, 2, 1)]
    dispatcher = find_dispatcher(model)
    return found, None if dispatcher is None else dispatcher.metrics.snapshot()


def main() -> None:
    flux.Flux.forward = forward
    found = {}
    with torch.inference_mode():
        for extension in (nothing, counted, of_another):
            expected, _ = pictures(extension, accelerated=False)
            ours, counts = pictures(extension, accelerated=True)
            off = [float((a - b).abs().max()) for a, b in zip(ours, expected, strict=True)]
            found[extension.__name__] = {"off": off, "served": counts["served"], "eager": counts["fallbacks"]}
    sys.stdout.write(json.dumps(found) + "\n")


main()
