"""Samples every tiny model family with the OneFlow engine, beside ComfyUI's own forward.

    python tests/oneflow/families.py COMFY_DIR REPORT [NAME...]

Writes JSON: by family the largest difference as a share of the image's range, and how often which engine answered.
A process of its own, because ComfyUI changes the interpreter it is imported into.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

_STEPS = 2


def main(arguments: list[str]) -> int:
    """See the module's docstring."""
    comfy_dir, report, names = arguments[0], Path(arguments[1]), arguments[2:]
    sys.path[:0] = [comfy_dir, str(Path(__file__).parents[2])]
    import comfy.cli_args

    comfy.cli_args.args.cpu = True
    comfy.cli_args.args.use_pytorch_cross_attention = True
    import torch

    from dev.families import FAMILIES

    found = {}
    with torch.inference_mode(), tempfile.TemporaryDirectory() as folder:
        for name in names or FAMILIES:
            found[name] = _sampled(FAMILIES[name], Path(folder, name))
            sys.stderr.write(f"{name} {found[name]}\n")
    report.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def _sampled(family: Any, folder: Path) -> dict[str, Any]:
    import comfy.sample
    import torch

    from onediff_comfy.graphs.dispatch import Dispatcher  # noqa: F401 - imported before the host's model is
    from onediff_comfy.host.model import accelerate
    from onediff_comfy.host.process import library

    model = family.load()
    latent, prompts = family.latent(), [family.conditioning(1), family.conditioning(2)]
    noise = torch.randn(latent.shape, generator=torch.Generator().manual_seed(1))
    before = library().metrics.snapshot()
    images = [
        comfy.sample.sample(
            chosen, noise, _STEPS, family.cfg, "euler", "normal", *prompts, latent, seed=1, disable_pbar=True
        )
        for chosen in (model, accelerate(model, "oneflow", None))
    ]
    after = library().metrics.snapshot()
    expected, actual = images
    span = float(expected.max() - expected.min())
    return {
        "difference": float((actual - expected).abs().max()) / span,
        "served": after["served"] - before["served"],
        "fallbacks": [reason for reason in after["fallbacks"] if reason not in before["fallbacks"]],
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
