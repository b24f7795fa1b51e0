"""Samples every tiny model family with the OneFlow engine, beside ComfyUI's own forward.

    python tests/oneflow/families.py COMFY_DIR [NAME...]

Writes what came out into benchmarks/results/oneflow_families.json, beside what other families' runs left there: by
family whether the image is eager's, how often OneFlow answered, and why not where it did not. ``test_docs`` keeps
docs/oneflow.md at that.
A process of its own, because ComfyUI changes the interpreter it is imported into.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "oneflow_families.json"
BOUND = 1e-4
"""Largest difference, as a share of the image's range, that is rounding: as pictures.assert_same_picture explains."""
_STEPS = 2


def main(arguments: list[str]) -> int:
    """See the module's docstring."""
    comfy_dir, names = arguments[0], arguments[1:]
    sys.path[:0] = [comfy_dir, str(Path(__file__).parents[2])]
    import comfy.cli_args

    comfy.cli_args.args.cpu = True
    comfy.cli_args.args.use_pytorch_cross_attention = True
    import torch

    from tools.models.families import FAMILIES

    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    with torch.inference_mode():
        for name in names or FAMILIES:
            found[name] = _sampled(FAMILIES[name])
            sys.stderr.write(f"{name} {found[name]}\n")
            in_order = {name: found[name] for name in FAMILIES if name in found}
            RESULTS.write_text(json.dumps(in_order, indent=1) + "\n")
    return 0


def _sampled(family: Any) -> dict[str, Any]:
    import comfy.sample
    import torch

    from onediff_comfy.host.adapters.model import accelerate
    from onediff_comfy.host.process.process import library

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
        "same": float((actual - expected).abs().max()) <= BOUND * span,
        "served": after["served"] - before["served"],
        "fallbacks": [reason for reason in after["fallbacks"] if reason not in before["fallbacks"]],
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
