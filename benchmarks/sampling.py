"""Time whole sampling runs through ComfyUI's own sampler: eager, ComfyUI's compile node, and ours.

    COMFYUI_PATH=... python -m benchmarks.sampling --model sdxl --size 1024x1024 --steps 20

Every variant gets an empty compile cache. Our store of compiled graphs is where ONEDIFF_CACHE_DIR
says; point it to an empty folder to time a compilation. The first image of each is timed as a person waits for
it, compilation included; then all variants take turns, image by image, and the median is reported.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .host import start_host

VARIANTS = ("eager", "torch_compile", "onediff-inductor", "onediff-cudagraph", "onediff-eager")


def main() -> int:
    """Run the benchmark; write JSON, print a table."""
    options = _arguments()
    start_host()
    report = _measure(options)
    if options.output:
        Path(options.output).write_text(json.dumps(report, indent=1) + "\n")
    _print_table(report)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["sd15", "sdxl", "flux"], default="sdxl")
    parser.add_argument("--size", default="1024x1024", help="image width x height in pixels")
    parser.add_argument("--batch", type=int, default=1, help="images per run")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5, help="timed images per variant")
    parser.add_argument("--variants", default="eager,torch_compile,onediff-inductor")
    parser.add_argument("--output", help="JSON file to write")
    parser.add_argument("--inductor-cache", help="folder to keep Inductor's cache in (default: a new one each)")
    return parser.parse_args()


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    import comfy.model_management
    import torch

    from .models import FAMILIES, conditioning, load

    family = FAMILIES[options.model]
    device = comfy.model_management.get_torch_device()
    width, height = map(int, options.size.split("x"))
    start = time.perf_counter()
    with torch.inference_mode():  # as the host's executor runs every node
        model = load(family, device)
        print(f"{options.model}: weights made and loaded in {time.perf_counter() - start:.1f} s", flush=True)
        positive, negative = conditioning(family, 1), conditioning(family, 2)
        latent = torch.zeros(options.batch, family.latent_channels, height // 8, width // 8)
        names = options.variants.split(",")
        runs: dict[str, Callable[[int], torch.Tensor]] = {}
        rows: dict[str, dict[str, Any]] = {}
        for name in names:
            cache = options.inductor_cache or tempfile.mkdtemp(prefix="onediff-bench-")
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
            runs[name] = _sampler(variant(model, name), family.cfg, positive, negative, latent, options.steps)
            _reset_peak()
            seconds, first = _timed(runs[name], 0)
            rows[name] = {"first_image_s": seconds, "first_image_peak_mib": _peak_mib()}
            rows[name].update(_difference(first, runs["eager"](0)) if "eager" in runs else {})
            print(f"{name}: first image {seconds:.2f} s", flush=True)
        times: dict[str, list[float]] = {name: [] for name in names}
        for number in range(options.rounds):
            for name in names:
                _reset_peak()
                times[name].append(_timed(runs[name], number + 1)[0])
                rows[name]["peak_mib"] = _peak_mib()
        for name in names:
            per_step = [1000 * seconds / options.steps for seconds in times[name]]
            rows[name]["step_ms"] = statistics.median(per_step)
            rows[name]["step_ms_all"] = per_step
            rows[name]["image_s"] = statistics.median(times[name])
        from onediff_comfy.host.process import metrics

        return {
            "what": {key: value for key, value in vars(options).items() if key != "output"},
            "environment": environment(device),
            "variants": rows,
            "onediff": metrics().snapshot(),
        }


def variant(model: Any, name: str) -> Any:
    """``model`` as one of ``VARIANTS`` would run it."""
    if name == "eager":
        return model.clone()
    if name == "torch_compile":
        from comfy_api.torch_helpers import set_torch_compile_wrapper

        # What the host's TorchCompileModel node does, guard filter included.
        def skip_options(guards: Any) -> list[bool]:
            return [("transformer_options" not in guard.name) for guard in guards]

        clone = model.clone()
        set_torch_compile_wrapper(model=clone, backend="inductor", options={"guard_filter_fn": skip_options})
        return clone
    if name.startswith("onediff-"):
        from onediff_comfy.host.model import accelerate

        return accelerate(model, name.removeprefix("onediff-"))
    raise SystemExit(f"unknown variant {name!r}; choose from {', '.join(VARIANTS)}")


def _sampler(model: Any, cfg: float, positive: Any, negative: Any, latent: Any, steps: int) -> Callable[[int], Any]:
    import comfy.sample
    import torch

    def run(seed: int) -> torch.Tensor:
        noise = torch.randn(latent.shape, generator=torch.Generator().manual_seed(seed))
        result = comfy.sample.sample(
            model, noise, steps, cfg, "euler", "simple", positive, negative, latent, seed=seed, disable_pbar=True
        )
        assert isinstance(result, torch.Tensor)
        return result

    return run


def _timed(run: Callable[[int], Any], seed: int) -> tuple[float, Any]:
    import torch

    start = time.perf_counter()
    result = run(seed)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start, result


def _reset_peak() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def _peak_mib() -> float | None:
    import torch

    return torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else None


def _difference(actual: Any, expected: Any) -> dict[str, float]:
    difference = (actual - expected).abs().max()
    span = expected.max() - expected.min()
    norm = (actual - expected).norm() / expected.norm()
    return {"max_difference_of_range": float(difference / span), "relative_error": float(norm)}


def environment(device: Any) -> dict[str, Any]:
    import comfyui_version
    import torch

    found: dict[str, Any] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "comfyui": comfyui_version.__version__,
        "cpus": os.cpu_count(),
        "device": str(device),
        "date": time.strftime("%Y-%m-%d"),
    }
    if torch.cuda.is_available():
        import subprocess

        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        name, driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split(",")[:2]
        found |= {"gpu": name.strip(), "driver": driver.strip().splitlines()[0], "cuda": torch.version.cuda}
    return found


def _print_table(report: dict[str, Any]) -> None:
    what, rows = report["what"], report["variants"]
    eager = rows.get("eager", {}).get("step_ms")
    print(f"\n{what['model']} {what['size']} batch {what['batch']}, {what['steps']} steps; {report['environment']}")
    print(f"{'variant':20} {'step ms':>8} {'ratio':>6} {'first s':>8} {'peak MiB':>9} {'rel. error':>10}")
    for name, row in rows.items():
        ratio = f"{eager / row['step_ms']:.2f}x" if eager else "-"
        peak = f"{row['peak_mib']:.0f}" if row["peak_mib"] else "-"
        error = f"{row['relative_error']:.1e}" if "relative_error" in row else "-"
        line = f"{name:20} {row['step_ms']:8.1f} {ratio:>6} {row['first_image_s']:8.2f} {peak:>9} {error:>10}"
        print(line, flush=True)
    print("onediff:", {k: v for k, v in report["onediff"].items() if k != "graphs"})
    for graph in report["onediff"]["graphs"]:
        print(f"  {graph['how']} {graph['what']} with {graph['engine']} in {graph['seconds']} s")


if __name__ == "__main__":
    sys.exit(main())
