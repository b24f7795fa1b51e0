"""Any size, any batch, any prompt length: what a general graph costs, and that nothing is compiled again.

    COMFYUI_PATH=... python -m benchmarks.any_size walk --output FILE
        first images in background mode while another process compiles; then random sizes, batches and
        prompts, each picture compared with eager's
    COMFYUI_PATH=... python -m benchmarks.any_size prepare 1024x1024b1 [...]
        makes graphs for these sizes alone, in ONEDIFF_CACHE_DIR
    COMFYUI_PATH=... python -m benchmarks.any_size times --output FILE
        a step of each shape: eager and ours, with whatever graphs are in ONEDIFF_CACHE_DIR
    COMFYUI_PATH=... python -m benchmarks.any_size host 1024x1024b1 --output FILE
        the same with the host's own compile node

A step's time is the difference between a long and a short sampling run, divided by the difference in
steps: what a person sees, the host's sampler included.
"""

from __future__ import annotations

import argparse
import random
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from onediff_comfy.settings import COMPILE_CHOICES

from .host import kinds_of_graphs, reported, start_host
from .sampling import environment
from .variants import variant

_SHORT, _LONG = 3, 9  # steps
_LEAST_ROUNDS, _MOST_ROUNDS, _ENOUGH_S = 2, 8, 5.0
_LARGE = tuple((w, h, b) for w, h in ((1024, 1024), (832, 1216), (1536, 1536)) for b in (1, 2, 4))
SHAPES = {"sdxl": _LARGE, "flux": _LARGE, "sd15": ((512, 512, 1), (512, 768, 1), (768, 768, 2))}
"""Width and height in pixels and the number of images, for each model."""


def main() -> int:
    """Run the benchmark and write JSON."""
    options = _arguments()
    start_host()
    reported(lambda: _Bench(options).run(), options.output)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["walk", "prepare", "times", "host"])
    parser.add_argument("shapes", nargs="*", type=_shape_of, help="such as 1024x1024b1; default: the model's list")
    parser.add_argument("--model", choices=["sd15", "sdxl", "flux"], default="sdxl")
    parser.add_argument("--changes", type=int, default=24, help="random changes to walk through")
    parser.add_argument(
        "--patience", type=float, default=420, help="walk: seconds that a background compilation may take"
    )
    parser.add_argument("--compile", choices=COMPILE_CHOICES, default="auto", help="walk: where graphs are compiled")
    parser.add_argument("--replayed-only", action="store_true", help="times: only ours, replayed as CUDA graphs")
    parser.add_argument("--not-launched", action="store_true", help="times: leave out graphs launched kernel by kernel")
    parser.add_argument("--wait-for", help="host: after compiling, wait for this file before anything is timed")
    parser.add_argument("--output", help="JSON file to write")
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
        print(f"[{self.options.model} {self.options.what}]", *words, flush=True)

    def run(self) -> dict[str, Any]:
        work = {"walk": self.first_images_and_walk, "prepare": self.prepare, "times": self.times, "host": self.host}
        report = {"model": self.options.model, "environment": environment(self.device)}
        return {**report, **work[self.options.what]()}

    @property
    def shapes(self) -> list[tuple[int, int, int]]:
        return self.options.shapes or list(SHAPES[self.options.model])

    def first_images_and_walk(self) -> dict[str, Any]:
        fast = self.accelerated(compile=self.options.compile)
        if self.options.compile != "wait":
            return {"background": self.background(fast), "walk": self.walk(fast)}
        start = time.perf_counter()
        self.sample(fast, self.shapes[0], 3)
        return {"first_image_s": time.perf_counter() - start, "walk": self.walk(fast)}

    def prepare(self) -> dict[str, Any]:
        from onediff_comfy.buckets import BucketSet
        from onediff_comfy.host.adapters.model import preparing

        seconds = {}
        for width, height, batch in self.shapes:
            fast = self.accelerated(buckets=BucketSet.parse(f"{width}x{height} b{batch}"))
            start = time.perf_counter()
            self.sample(preparing(fast, exact=True), (width, height, batch), 1)
            seconds[f"{width}x{height}b{batch}"] = time.perf_counter() - start
            self.say(seconds)
        return {"prepared_s": seconds}

    def times(self) -> dict[str, Any]:
        """Milliseconds per step. Whether a general or an exact graph served is read off the graph."""
        from onediff_comfy.host.adapters.model import find_dispatcher
        from onediff_comfy.host.process.process import library, set_budget

        library().background = None  # nothing is to be compiled beside what is timed
        table = {}
        for shape in self.shapes:
            fast = self.accelerated()
            row: dict[str, Any] = {"CUDA graph": self.step(fast, shape)}
            if not self.options.replayed_only:
                row["eager"] = self.step(self.model, shape)
            if not (self.options.replayed_only or self.options.not_launched):
                set_budget(1)  # no room for recordings
                row["launched"] = self.step(fast, shape)
                set_budget(0)
            dispatcher = find_dispatcher(fast)
            assert dispatcher is not None
            row["graphs"] = kinds_of_graphs(dispatcher.graph_keys())
            expected, actual = self.sample(self.model, shape, 3), self.sample(fast, shape, 3)
            row["error"] = float((actual - expected).norm() / expected.norm())
            table[str(shape)] = row
            self.say(shape, row, self.memory())
        return {"ms_per_step": table}

    def host(self) -> dict[str, Any]:
        (shape,) = self.options.shapes
        model = variant(self.model, "torch_compile")
        start = time.perf_counter()
        self.sample(model, shape, 3)
        first = time.perf_counter() - start
        self.say("first image", first)
        while self.options.wait_for and not Path(self.options.wait_for).exists():
            time.sleep(0.2)
        step = self.step(model, shape)
        self.say(shape, step)
        return {"first_image_s": first, "ms_per_step": {str(shape): {"host's node": step}}}

    def accelerated(self, **options: Any) -> Any:
        from onediff_comfy.host.adapters.model import accelerate

        return accelerate(self.model, "inductor", None, **options)

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
        begun = time.perf_counter()
        for turn in range(_MOST_ROUNDS):  # the faster the more: a hundredth of a second is much of a few short steps
            if turn >= _LEAST_ROUNDS and time.perf_counter() - begun > _ENOUGH_S:
                break
            for steps, taken in times.items():
                start = time.perf_counter()
                self.sample(model, shape, steps)
                taken.append(time.perf_counter() - start)
        return (min(times[_LONG]) - min(times[_SHORT])) / (_LONG - _SHORT) * 1e3

    def background(self, fast: Any) -> dict[str, Any]:
        """Images while another process compiles, against eager ones before."""
        from onediff_comfy.host.process.process import metrics

        shape, steps = self.shapes[0], 20
        seconds: dict[str, list[float]] = {"eager": [], "meanwhile": []}
        self.sample(self.model, shape, 3)
        for _ in range(5):
            start = time.perf_counter()
            self.sample(self.model, shape, steps)
            seconds["eager"].append(time.perf_counter() - start)
        began = time.perf_counter()
        while not metrics().snapshot()["served"] and time.perf_counter() - began < self.options.patience:
            start = time.perf_counter()
            self.sample(fast, shape, steps)
            seconds["meanwhile"].append(time.perf_counter() - start)
        taken = time.perf_counter() - began
        start = time.perf_counter()
        self.sample(fast, shape, steps)
        snapshot = metrics().snapshot()
        result = {
            "first_image_s": seconds["meanwhile"][0],
            "second_image_s": seconds["meanwhile"][1],
            "eager_image_s": statistics.median(seconds["eager"]),
            # From the second, which waits for nothing of ours, to the one in which the graph takes over.
            "image_meanwhile_s": statistics.median(seconds["meanwhile"][1:-1] or seconds["meanwhile"]),
            "image_of_takeover_s": seconds["meanwhile"][-1],
            "images_meanwhile": len(seconds["meanwhile"]),
            "until_served_s": taken,
            "image_afterwards_s": time.perf_counter() - start,
            "fallbacks": snapshot["fallbacks"],
            "all_s": seconds,
        }
        self.say(result)
        return result

    def walk(self, fast: Any) -> dict[str, Any]:
        """Random changes, each compared with eager."""
        from onediff_comfy.host.process.process import metrics

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
        return {"changes": rows, "counted": counted, "worst_error": max(errors, default=0.0)}

    def memory(self) -> dict[str, int]:
        import torch

        from onediff_comfy.host.process.process import library

        held = {"rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10}
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info()
            held["allocated_mb"] = torch.cuda.memory_allocated() >> 20
            held["reserved_mb"] = torch.cuda.memory_reserved() >> 20
            held["device_used_mb"] = (total - free) >> 20
            held["recordings_mb"] = library().recordings.nbytes >> 20
        return held


if __name__ == "__main__":
    sys.exit(main())
