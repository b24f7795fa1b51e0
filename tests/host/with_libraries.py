"""Pictures of a tiny Flux, by the host alone and served, with whatever libraries are on the path.

    python with_libraries.py COMFY_DIR CHECKPOINT

Prints as JSON, for a checkpoint as it is and in scaled fp8, which comfy-kitchen computes: what came of it.
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
import comfy.sd  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from tiny_flux import sampled  # noqa: E402

from onediff_comfy.host.adapters.model import accelerate  # noqa: E402
from onediff_comfy.host.compatibility import host_changes  # noqa: E402
from onediff_comfy.host.process.process import metrics  # noqa: E402
from tools.models.formats import scaled_fp8  # noqa: E402

_PREFIX = "model.diffusion_model."


def served(weights: dict[str, torch.Tensor]) -> str:
    """Return how many calls of a picture were served, and how far it is off; or why none were."""
    before = metrics().snapshot()
    plain: Any = comfy.sd.load_diffusion_model_state_dict(dict(weights))
    expected = sampled(plain, 1)
    actual = sampled(accelerate(plain, "eager"), 1)
    now = metrics().snapshot()
    calls, reasons = now["served"] - before["served"], set(now["fallbacks"]) - set(before["fallbacks"])
    if reasons or not calls:
        return f"eager ({', '.join(map(str, reasons)) or 'no call was served'})"
    error = float((actual - expected).norm() / expected.norm())
    return f"{calls} calls served, off by {error:.0e}"


def main() -> None:
    weights = {
        name.removeprefix(_PREFIX): weight for name, weight in load_file(checkpoint).items() if name.startswith(_PREFIX)
    }
    changes = host_changes()
    found = {"changed": "; ".join(map(str, changes))} if changes else {}
    with torch.inference_mode():
        found["as it is"] = served(weights)
        found["scaled fp8"] = served(scaled_fp8(weights))
    sys.stdout.write(json.dumps(found) + "\n")


main()
