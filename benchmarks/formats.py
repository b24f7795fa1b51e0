"""Time models whose weights are of fewer bits, in each of ComfyUI's forms: eager and ours by turns, image by image.

    COMFYUI_PATH=... python -m benchmarks.formats --model flux --formats bf16,fp8,int8,nvfp4 --steps 8
    ... python -m benchmarks.formats --model tiny --variants eager,onediff-eager         on a CPU, to see that it runs

Weights are random ones of real size, made where they stay and quantised by the library that the host uses. What a
format is called says what it is to ComfyUI: ``fp8`` multiplies in 8 bits where the GPU can, ``fp8-full`` has a mark in
its file that it must not, ``fp8-cast`` is the loader's weight_dtype.

With --products, the products of a Flux step are timed by themselves first: in 16 bits, and in 8 bits with either way
of adding up.
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from .checkpoints import FORMATTED, load
from .host import reported, start_host
from .sampling import MODELS, Bench, ours_failed, print_table
from .variants import names

_PRODUCTS = ((4608, 3072, 21504), (4608, 15360, 3072), (4096, 3072, 9216), (4096, 3072, 12288), (4096, 12288, 3072))
_REPEATS = 20


def main() -> int:
    """Run the benchmark; write JSON, print a table a format. Ends with 1 if one of our variants failed or ran eager."""
    options = _arguments()
    start_host()
    report = reported(lambda: _run(options), options.output)
    for name, found in report["formats"].items():
        print(f"\n== {name}", flush=True)
        print_table(found)
    return max(ours_failed(found) for found in report["formats"].values())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="flux")
    parser.add_argument("--formats", type=_formats, default="fp8,int8,nvfp4", help=f"of {', '.join(FORMATTED)}")
    parser.add_argument("--size", help="image width x height in pixels (default: what the model was made for)")
    parser.add_argument("--batch", type=int, default=1, help="images per run")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5, help="timed images per variant")
    parser.add_argument("--variants", type=names, default="eager,onediff-inductor")
    parser.add_argument("--products", action="store_true", help="time products by themselves, too")
    parser.add_argument("--output", help="JSON file to write")
    parser.add_argument("--inductor-cache", help="folder to keep Inductor's cache in (default: a new one each)")
    return parser.parse_args()


def _formats(text: str) -> list[str]:
    found = text.split(",")
    unknown = [name for name in found if name not in FORMATTED]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown format {unknown[0]!r}; known are {', '.join(FORMATTED)}")
    return found


def _run(options: argparse.Namespace) -> dict[str, Any]:
    import comfy.model_management
    import torch

    products = _products() if options.products and torch.cuda.is_available() else None
    found = {}
    for name in options.formats:
        found[name] = Bench(options, functools.partial(load, form=name)).run()
        comfy.model_management.unload_all_models()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    environment = next(iter(found.values()))["environment"]
    return {"environment": environment, "products_us": products, "formats": found}


def _products() -> dict[str, dict[str, float]]:
    """Microseconds of each product of a Flux step, by how it is computed."""
    import torch

    found = {}
    for rows, inner, columns in _PRODUCTS:
        left = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
        right = torch.randn(columns, inner, device="cuda", dtype=torch.bfloat16)
        bias = torch.randn(columns, device="cuda", dtype=torch.bfloat16)
        one = torch.ones((), device="cuda")
        left8, right8 = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn)
        scaled = functools.partial(
            torch._scaled_mm, left8, right8.t(), scale_a=one, scale_b=one, bias=bias, out_dtype=torch.bfloat16
        )
        found[f"{rows}x{inner}x{columns}"] = {
            "bf16": _microseconds(functools.partial(torch.nn.functional.linear, left, right, bias)),
            "fp8": _microseconds(functools.partial(scaled, use_fast_accum=False)),
            "fp8 fast accumulation": _microseconds(functools.partial(scaled, use_fast_accum=True)),
        }
        print(f"{rows}x{inner}x{columns}: {found[f'{rows}x{inner}x{columns}']}", flush=True)
    return found


def _microseconds(work: Callable[[], object]) -> float:
    import torch

    for _ in range(3):
        work()
    times = []
    for _ in range(_REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(10):
            work()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e5)
    return round(statistics.median(times), 1)


if __name__ == "__main__":
    sys.exit(main())
