"""Measure how far each variant's latents are from eager's, and from those of the same weights in float32.

    COMFYUI_PATH=... python -m benchmarks.quality --model sdxl --output FILE
    ... python -m benchmarks.quality --model tiny --variants onediff-eager      on a CPU, to see that it runs

Every image of several seeds and conditionings is made by all variants (``benchmarks/variants.py``); reported are the
relative error, PSNR and SSIM of the latents (``benchmarks/measures.py``), the median and the worst of all images. A
variant is lossless where no image is further from float32 than 1.1 times what eager's own is. Eager itself is compared
with its own repetition: on a GPU the two differ.

The weights are random. How far rounding takes an image from another does not depend on that, as far as is known; what a
cache reuses, and what that does to an image, does: such figures compare caches with each other, and say nothing about
pictures of a trained model.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import sys
import traceback
from typing import Any

from .host import reported, start_host
from .sampling import MODELS, Sampler, counters, environment, failure, ours_failed
from .variants import names, variant

LOSSLESS = 1.1
"""The most that a lossless variant's error to float32 may be, relative to eager's own."""

_BETTER_IF_HIGHER = {"relative_error": False, "psnr_db": True, "ssim": True}


def main() -> int:
    """Run the benchmark; write JSON, print a table. Ends with 1 if one of our own variants failed or ran eager."""
    options = _arguments()
    start_host()
    report = reported(lambda: _Bench(options).run(), options.output)
    _print_table(report)
    return ours_failed(report)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="sdxl")
    parser.add_argument("--size", help="image width x height in pixels (default: what the model was made for)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3, help="noises per conditioning")
    parser.add_argument("--prompts", type=int, default=2, help="random conditionings")
    parser.add_argument("--variants", type=names, default="torch_compile,onediff-inductor", help="besides eager")
    parser.add_argument("--output", help="JSON file to write")
    return parser.parse_args()


class _Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        import comfy.model_management

        self.options = options
        self.device = comfy.model_management.get_torch_device()
        self.sampler = Sampler(options.model, options.size, 1, options.steps, options.prompts)
        options.size = self.sampler.size

    def run(self) -> dict[str, Any]:
        from onediff_comfy.host.process.process import library, metrics

        from .models import load

        exact = self.exact_latents()
        library().background = None  # one graph for all images: none is to be replaced by one for this size alone
        model = load(self.sampler.family, self.device)
        eager = self.latents(model.clone())
        again = self.latents(model.clone())
        rows = {"eager": comparison(again, eager) | against_float32(eager, eager, exact)}
        print("eager: done", flush=True)
        for name in self.options.variants:
            if name != "eager":
                rows[name] = self.row(model, name, eager, exact)
        return {
            "what": {key: value for key, value in vars(self.options).items() if key != "output"}
            | {"weights": "random", "lossless_up_to": LOSSLESS},
            "dtype": str(self.sampler.family.dtype),
            "environment": environment(self.device),
            "variants": rows,
            "onediff": metrics().snapshot(),
        }

    def row(self, model: Any, name: str, eager: list[Any], exact: list[Any]) -> dict[str, Any]:
        """What is reported of a variant; if it fails, that is its result."""
        before = counters()
        try:
            latents = self.latents(variant(model, name))
        except Exception as error:
            traceback.print_exc()
            print(f"{name}: failed", flush=True)
            return {"failed": failure(error)}
        after = counters()
        print(f"{name}: done", flush=True)
        counted = {"calls": "served", "calls_reused": "reused", "calls_eager": "fallbacks"}
        calls = {what: after[counter] - before[counter] for what, counter in counted.items()}
        return comparison(latents, eager) | against_float32(latents, eager, exact) | calls

    def exact_latents(self) -> list[Any]:
        """The latents of the same weights in float32, whose model is gone afterwards."""
        import comfy.model_management
        import torch
        from comfy.k_diffusion.utils import tf32_mode

        from .models import load

        model = load(self.sampler.family, self.device, dtype=torch.float32)
        with tf32_mode(cudnn=False, matmul=False):  # cuDNN's convolutions have 10 bits of mantissa unless told not to
            latents = self.latents(model)
        del model
        comfy.model_management.unload_all_models()
        gc.collect()
        comfy.model_management.soft_empty_cache()
        print("float32: done", flush=True)
        return latents

    def latents(self, model: Any) -> list[Any]:
        """Of all seeds and conditionings, on the CPU."""
        pairs = [(seed, prompt) for prompt in range(self.options.prompts) for seed in range(self.options.seeds)]
        return [self.sampler(model, seed, prompt).cpu() for seed, prompt in pairs]


def comparison(latents: list[Any], eager: list[Any]) -> dict[str, Any]:
    """How far latents are from eager's."""
    return {"against_eager": _statistics([_measured(*pair) for pair in zip(latents, eager, strict=True)])}


def against_float32(latents: list[Any], eager: list[Any], exact: list[Any]) -> dict[str, Any]:
    """How far latents are from float32's, and whether that is about as far as eager's are.

    ``error_to_eagers`` is the worst of all images' ratios of the two relative errors. It and the verdict are None where
    eager is exactly what float32 gives, as on a CPU, which computes in nothing less.
    """
    found = [_measured(*pair) for pair in zip(latents, exact, strict=True)]
    own = [_measured(*pair) for pair in zip(eager, exact, strict=True)]
    ratio = None
    if all(image["relative_error"] for image in own):
        ratio = max(a["relative_error"] / b["relative_error"] for a, b in zip(found, own, strict=True))
    lossless = ratio <= LOSSLESS if ratio is not None else None
    return {"against_float32": _statistics(found), "error_to_eagers": ratio, "lossless": lossless}


def _measured(actual: Any, reference: Any) -> dict[str, float]:
    from .measures import psnr, relative_error, ssim

    pair = (actual, reference)
    return {"relative_error": relative_error(*pair), "psnr_db": psnr(*pair), "ssim": ssim(*pair)}


def _statistics(images: list[dict[str, float]]) -> dict[str, Any]:
    """Median, worst and all values of each measure; a PSNR is None where images are equal."""
    found: dict[str, Any] = {}
    for what, higher in _BETTER_IF_HIGHER.items():
        values = [image[what] for image in images]
        worst = min(values) if higher else max(values)
        found[what] = {"median": _finite(statistics.median(values)), "worst": _finite(worst)}
        found[what]["all"] = [_finite(value) for value in values]
    return found


def _finite(value: float) -> float | None:
    return None if value == math.inf else value  # JSON has no infinity


def _print_table(report: dict[str, Any]) -> None:
    what, rows = report["what"], report["variants"]
    width = max(map(len, rows))
    print(f"\n{what['model']} {what['size']} in {report['dtype']}, {what['steps']} steps, random weights")
    print(f"{what['seeds']} seeds × {what['prompts']} conditionings: median (worst); {report['environment']}")
    print(f"{'':{width}} {'rel. error to eager':>20} {'PSNR dB':>14} {'SSIM':>16} {'error to float32':>20}", end="")
    print(f" {'to eagers':>9} {'lossless':>8}")
    for name, row in rows.items():
        if "failed" in row:
            print(f"{name:{width}} failed: {row['failed']}", flush=True)
            continue
        eager, exact = row["against_eager"], row["against_float32"]["relative_error"]
        cells = [
            f"{_pair(eager['relative_error'], '.1e'):>20}",
            f"{_pair(eager['psnr_db'], '.1f'):>14}",
            f"{_pair(eager['ssim'], '.4f'):>16}",
            f"{_pair(exact, '.1e'):>20}",
            f"{row['error_to_eagers']:8.2f}x" if row["error_to_eagers"] is not None else f"{'-':>9}",
            f"{verdict(row['lossless']):>8}",
        ]
        eager_calls = row.get("calls_eager")
        cells += [f" {eager_calls} calls ran eager"] if eager_calls else []
        print(f"{name:{width}} {' '.join(cells)}", flush=True)


def verdict(lossless: bool | None) -> str:
    """For a table."""
    return "-" if lossless is None else "yes" if lossless else "no"


def _pair(values: dict[str, Any], form: str) -> str:
    median, worst = ("equal" if values[which] is None else format(values[which], form) for which in ("median", "worst"))
    return f"{median} ({worst})"


if __name__ == "__main__":
    sys.exit(main())
