"""Which kernels a sampling step, or a VAE's decoding, is made of, and for how long the GPU waits between them.

    COMFYUI_PATH=... python -m benchmarks.kernels --model sdxl --output FILE
    ... python -m benchmarks.kernels --model vae --size 1024x1024
    ... python -m benchmarks.kernels --model tiny --variant onediff-eager        on a CPU, to see that it runs

Our store of compiled graphs is where ONEDIFF_CACHE_DIR says. Graphs run as they do for a person: once they are
recorded as CUDA graphs, they are replayed. PyTorch's profiler looks at a few steps or calls, after others that it does
not look at, from which the time on the clock is taken: the profiler slows down what it looks at.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable
from typing import Any

from .checkpoints import FORMATTED, load
from .host import reported, start_host
from .sampling import MODELS, Sampler, environment
from .variants import names, variant

_WARM, _CALLS = 6, 4
_LISTED = 100
# By what a kernel's name has in it; the first that fits.
_KINDS = {
    "attention": ("flash", "fmha", "sdpa", "attention"),
    "fused by Inductor": ("triton", "cpp_fused"),
    "convolutions": ("conv", "fprop", "implicit", "nhwc", "nchw"),
    "matrix products": ("gemm", "nvjet", "cutlass", "cublas", "addmm", "aten::mm", "bmm"),
}


def main() -> int:
    """Run the benchmark; write JSON, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*MODELS, "vae"], default="sdxl")
    parser.add_argument("--size", help="image width x height in pixels (default: what the model was made for)")
    parser.add_argument("--format", choices=FORMATTED, default="bf16", help="of the weights of a MODEL")
    parser.add_argument("--variant", default="onediff-inductor", help="one of those of benchmarks/variants.py")
    parser.add_argument("--output", help="JSON file to write")
    options = parser.parse_args()
    names(options.variant)  # refuses others
    start_host()
    report = reported(lambda: _measured(options), options.output)
    _print_table(report)
    return 0


def _measured(options: argparse.Namespace) -> dict[str, Any]:
    import comfy.model_management
    from torch.profiler import ProfilerActivity, profile

    from onediff_comfy.host.process.process import library

    device = comfy.model_management.get_torch_device()
    library().background = None  # nothing is to be compiled beside what is looked at
    run = _decoding(options) if options.model == "vae" else _sampling(options, device)
    run(_WARM)
    start = time.perf_counter()
    run(_CALLS)
    seconds = time.perf_counter() - start
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as found:
        run(_CALLS)
    kernels = [
        {
            "name": event.key,
            "calls": event.count / _CALLS,
            "ms": (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1000 / _CALLS,
        }
        for event in found.key_averages()
    ]
    kernels = sorted((kernel for kernel in kernels if kernel["ms"] > 0), key=lambda kernel: -kernel["ms"])
    kinds: dict[str, dict[str, float]] = {}
    for kernel in kernels:
        kind = kinds.setdefault(_kind(kernel["name"]), {"calls": 0.0, "ms": 0.0})
        kind["calls"] += kernel["calls"]
        kind["ms"] += kernel["ms"]
    return {
        "what": {key: value for key, value in vars(options).items() if key != "output"},
        "environment": environment(device),
        "ms": 1000 * seconds / _CALLS,
        "busy_ms": sum(kernel["ms"] for kernel in kernels),
        "kinds": kinds,
        "kernels": kernels[:_LISTED],
    }


def _sampling(options: argparse.Namespace, device: Any) -> Callable[[int], None]:
    """Makes a latent in as many steps as it is told."""
    sampler = Sampler(options.model, options.size, batch=1, steps=1)
    options.size = sampler.size
    model = variant(load(sampler.family, device, options.format), options.variant)

    def run(steps: int) -> None:
        sampler.steps = steps
        sampler(model, seed=steps)

    return run


def _decoding(options: argparse.Namespace) -> Callable[[int], None]:
    """Decodes as often as it is told."""
    import torch

    from onediff_comfy.host.adapters.vae import accelerate_vae

    from .vae import random_vae

    options.size = options.size or "1024x1024"
    width, height = map(int, options.size.split("x"))
    plain = random_vae(128)
    vae = plain if options.variant == "eager" else accelerate_vae(plain, options.variant.removeprefix("onediff-"))
    latent = torch.randn(1, 4, height // 8, width // 8).to(vae.device, vae.vae_dtype)
    decode = functools.partial(vae.first_stage_model.decode, latent)
    vae.decode(latent.float().cpu())  # has the host load it

    def run(calls: int) -> None:
        for _ in range(calls):
            decode()
        if latent.is_cuda:
            torch.cuda.synchronize()

    return run


def _kind(name: str) -> str:
    lower = name.lower()
    return next((kind for kind, parts in _KINDS.items() if any(part in lower for part in parts)), "other")


def _print_table(report: dict[str, Any]) -> None:
    what = report["what"]
    print(f"\n{what['model']} {what['format']} {what['size']} {what['variant']}; {report['environment']}")
    print(f"{report['ms']:.2f} ms on the clock, {report['busy_ms']:.2f} ms in kernels")
    for kind, found in sorted(report["kinds"].items(), key=lambda item: -item[1]["ms"]):
        print(f"{found['ms']:9.3f} ms {found['calls']:8.1f}x  {kind}")
    for kernel in report["kernels"][:40]:
        print(f"{kernel['ms']:9.3f} ms {kernel['calls']:8.1f}x  {kernel['name'][:130]}")


if __name__ == "__main__":
    sys.exit(main())
