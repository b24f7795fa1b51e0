"""Any size, any batch, any prompt length: what a general graph costs, and that nothing is compiled again.

    COMFYUI_PATH=... python -m benchmarks.any_size --model sdxl --output FILE          general graph
    COMFYUI_PATH=... python -m benchmarks.any_size --special 1024x1024b1 --output FILE a graph for one size
    COMFYUI_PATH=... python -m benchmarks.any_size --host 1024x1024b1 --output FILE    the host's own node

The first form makes the first images in background mode, while another process compiles; then walks
through random sizes, batches and prompts and compares each picture with eager's; then times a step of
each shape. A step's time is the difference between a long and a short sampling run, divided by the
difference in steps: what a person sees, the host's sampler included.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from .sampling import environment, variant

_MEASURED, _PATIENCE_S = 8, 420  # images; seconds until a background compilation must have ended
_SHORT, _LONG, _ROUNDS = 4, 14, 2  # steps, steps, times
_LARGE = tuple((w, h, b) for w, h in ((1024, 1024), (832, 1216), (1536, 1536)) for b in (1, 2, 4))
SHAPES = {"sdxl": _LARGE, "flux": _LARGE, "sd15": ((512, 512, 1), (512, 768, 1), (768, 768, 2))}
"""Width and height in pixels and the number of images, for each model."""


def main() -> int:
    """Run the benchmark and write JSON."""
    options = _arguments()
    sys.argv = sys.argv[:1]  # the host parses the command line when it is imported
    sys.path.insert(0, os.environ.get("COMFYUI_PATH", str(Path(__file__).parent.parent / ".cache" / "ComfyUI-0.30.0")))
    import torch

    if not torch.cuda.is_available():
        import comfy.cli_args

        comfy.cli_args.args.cpu = True
    with torch.inference_mode():  # as the host's executor runs every node
        report = _Bench(options).run()
    Path(options.output).write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["sd15", "sdxl", "flux"], default="sdxl")
    parser.add_argument("--special", help="time a graph made for this shape alone, such as 1024x1024b1")
    parser.add_argument("--host", help="time the host's own compile node for this shape")
    parser.add_argument("--changes", type=int, default=24, help="random changes to walk through")
    parser.add_argument("--waiting", action="store_true", help="compile in wait mode, not in the background")
    parser.add_argument("--wait-for", help="after compiling, wait for this file before anything is timed")
    parser.add_argument("--compiled", help="file to make when compiling is over")
    parser.add_argument("--output", required=True, help="JSON file to write")
    return parser.parse_args()


def _shape_of(text: str) -> tuple[int, int, int]:
    size, batch = text.split("b")
    width, height = size.split("x")
    return int(width), int(height), int(batch)


class _Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        import comfy.model_management

        from .models import FAMILIES, load

        self.options = options
        self.family = FAMILIES[options.model]
        self.device = comfy.model_management.get_torch_device()
        self.model = load(self.family, self.device)
        self.say("loaded")

    def say(self, *words: Any) -> None:
        print(f"[{self.options.special or self.options.host or self.options.model}]", *words, flush=True)

    def run(self) -> dict[str, Any]:
        report: dict[str, Any] = {"model": self.options.model, "environment": environment(self.device)}
        if self.options.special or self.options.host:
            shape = _shape_of(self.options.special or self.options.host)
            model = self.special(shape) if self.options.special else variant(self.model, "torch_compile")
            start = time.perf_counter()
            self.sample(model, shape, 3)
            report["first_image_s"] = time.perf_counter() - start
            self.say("first image", report["first_image_s"])
            self.wait()
            report["ms_per_step"] = {str(shape): self.step(model, shape)}
            self.say(report["ms_per_step"])
            return report
        fast = self.accelerated(in_background=not self.options.waiting)
        if self.options.waiting:
            start = time.perf_counter()
            self.sample(fast, SHAPES[self.options.model][0], 3)
            report["first_image_s"] = time.perf_counter() - start
        else:
            report["background"] = self.background(fast)
        self.wait()
        report["walk"] = self.walk(fast)
        report["ms_per_step"] = self.shapes(fast)
        return report

    def accelerated(self, **options: Any) -> Any:
        from onediff_comfy.host.model import accelerate

        return accelerate(self.model, "inductor", None, **options)

    def special(self, shape: tuple[int, int, int]) -> Any:
        from onediff_comfy.graphs.buckets import BucketSet

        width, height, batch = shape
        return self.accelerated(buckets=BucketSet.parse(f"{width}x{height} b{batch}"))

    def wait(self) -> None:
        if self.options.compiled:
            Path(self.options.compiled).touch()
        while self.options.wait_for and not Path(self.options.wait_for).exists():
            time.sleep(0.2)

    def sample(
        self, model: Any, shape: tuple[int, int, int], steps: int, tokens: int | None = None, cfg: float | None = None
    ) -> Any:
        import comfy.sample
        import torch

        from .models import conditioning

        width, height, batch = shape
        latent = torch.zeros(batch, self.family.latent_channels, height // 8, width // 8)
        noise = torch.randn(latent.shape, generator=torch.Generator().manual_seed(1))
        positive, negative = conditioning(self.family, 1, tokens), conditioning(self.family, 2, tokens)
        cfg = self.family.cfg if cfg is None else cfg
        return comfy.sample.sample(
            model, noise, steps, cfg, "euler", "normal", positive, negative, latent, disable_pbar=True, seed=1
        )

    def step(self, model: Any, shape: tuple[int, int, int]) -> float:
        """Milliseconds; of several rounds the fastest, for what disturbs only ever makes slower."""
        self.sample(model, shape, _SHORT)
        times: dict[int, list[float]] = {_SHORT: [], _LONG: []}
        for _ in range(_ROUNDS):
            for steps, taken in times.items():
                start = time.perf_counter()
                self.sample(model, shape, steps)
                taken.append(time.perf_counter() - start)
        return (min(times[_LONG]) - min(times[_SHORT])) / (_LONG - _SHORT) * 1e3

    def background(self, fast: Any) -> dict[str, Any]:
        """Images while another process compiles, against eager ones before."""
        from onediff_comfy.host.process import metrics

        shape, steps = SHAPES[self.options.model][0], 20
        seconds: dict[str, list[float]] = {"eager": [], "meanwhile": []}
        self.sample(self.model, shape, 3)
        for _ in range(5):
            start = time.perf_counter()
            self.sample(self.model, shape, steps)
            seconds["eager"].append(time.perf_counter() - start)
        began = time.perf_counter()
        while not metrics().snapshot()["served"] and time.perf_counter() - began < _PATIENCE_S:
            start = time.perf_counter()
            self.sample(fast, shape, steps)
            seconds["meanwhile"].append(time.perf_counter() - start)
            time.sleep(0 if len(seconds["meanwhile"]) < _MEASURED else 3)
        taken = time.perf_counter() - began
        start = time.perf_counter()
        self.sample(fast, shape, steps)
        snapshot = metrics().snapshot()
        result = {
            "first_image_s": seconds["meanwhile"][0],
            "second_image_s": seconds["meanwhile"][1],
            "eager_image_s": statistics.median(seconds["eager"]),
            "image_meanwhile_s": statistics.median(seconds["meanwhile"][:_MEASURED]),
            "images_meanwhile": len(seconds["meanwhile"]),
            "until_served_s": taken,
            "image_afterwards_s": time.perf_counter() - start,
            "fallbacks": snapshot["fallbacks"],
        }
        self.say(result)
        return result

    def walk(self, fast: Any) -> dict[str, Any]:
        """Random changes, each compared with eager."""
        from onediff_comfy.host.process import metrics

        dice = random.Random(7)
        before = metrics().snapshot()
        rows: list[dict[str, Any]] = []
        errors: list[float] = []
        for _ in range(self.options.changes):
            width, height = (dice.randrange(512, 1537, 64) for _ in "wh")
            shape = (width, height, dice.choice([1, 1, 2, 3, 4]))
            tokens = dice.choice([77, 154, 231])
            cfg = dice.choice([1.0, self.family.cfg])
            expected = self.sample(self.model, shape, 3, tokens, cfg)
            start = time.perf_counter()
            actual = self.sample(fast, shape, 3, tokens, cfg)
            error = float((actual - expected).norm() / expected.norm())
            seconds = time.perf_counter() - start
            errors.append(error)
            row = {"shape": shape, "tokens": tokens, "cfg": cfg, "error": error, "s": seconds, **self.memory()}
            rows.append(row)
            self.say(row)
        after = metrics().snapshot()
        counted = {name: after[name] - before[name] for name in after if isinstance(after[name], int)}
        self.say(counted)
        return {"changes": rows, "counted": counted, "worst_error": max(errors)}

    def memory(self) -> dict[str, int]:
        import torch

        from onediff_comfy.host.process import library

        held = {"rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10}
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info()
            held["allocated_mb"] = torch.cuda.memory_allocated() >> 20
            held["reserved_mb"] = torch.cuda.memory_reserved() >> 20
            held["device_used_mb"] = (total - free) >> 20
            held["recordings_mb"] = library().recordings.nbytes >> 20
        return held

    def shapes(self, fast: Any) -> dict[str, dict[str, float]]:
        from onediff_comfy.host.process import library, set_budget

        table = {}
        for shape in SHAPES[self.options.model]:
            row = {"eager": self.step(self.model, shape), "general + CUDA graph": self.step(fast, shape)}
            set_budget(1)  # no room for recordings
            row["general"] = self.step(self.accelerated(), shape)
            set_budget(0)
            table[str(shape)] = row
            self.say(shape, {name: round(value, 2) for name, value in row.items()}, len(library().cache))
        return table


if __name__ == "__main__":
    sys.exit(main())
