"""The first call of models whose forward asks for no wrappers: code that nodes put into them counts what it is called.

    python first_call.py COMFY_DIR FAMILY...

Prints as JSON, by family, how often a patch was called with ComfyUI alone and with ours, and how far its pictures are
apart.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

COMFY_DIR, names = sys.argv[1], sys.argv[2:]
sys.path[:0] = [COMFY_DIR, str(Path(__file__).resolve().parents[2])]
sys.argv = sys.argv[:1]

import comfy.cli_args  # noqa: E402

comfy.cli_args.args.cpu = True

import comfy.sample  # noqa: E402
import torch  # noqa: E402

from onediff_comfy.host.adapters.model import accelerate  # noqa: E402
from tools.models.families import FAMILIES, Family  # noqa: E402


class EveryOther:
    """Make every other call's result larger, as patches that leave out steps tell calls apart."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, args: Any, extra: Any) -> dict[str, Any]:
        self.calls += 1
        factor = 1.5 if self.calls % 2 else 1.0
        output = extra["original_block"](args)
        return {key: value * factor if isinstance(value, torch.Tensor) else value for key, value in output.items()}


def sampled(family: Family, model: Any) -> tuple[torch.Tensor, int]:
    patch, patched = EveryOther(), model.clone()
    patched.set_model_patch_replace(patch, "dit", "double_block", 0)
    latent = family.latent()
    noise = torch.randn(latent.shape, generator=torch.Generator().manual_seed(1))
    prompts = family.conditioning(1), family.conditioning(2)
    made = comfy.sample.sample(
        patched, noise, 3, family.cfg, "euler", "simple", *prompts, latent, disable_pbar=True, seed=1
    )
    return made, patch.calls


def measured(family: Family) -> dict[str, Any]:
    model = family.load()
    expected, calls = sampled(family, model)
    made, ours = sampled(family, accelerate(model, "eager"))
    return {"calls": [calls, ours], "off": float((made - expected).abs().max() / expected.abs().max())}


with torch.inference_mode():
    sys.stdout.write(json.dumps({name: measured(FAMILIES[name]) for name in names}))
