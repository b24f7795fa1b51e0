"""Time whole sampling runs through ComfyUI's own sampler: eager, ComfyUI's compile and cache nodes, and ours.

    COMFYUI_PATH=... python -m benchmarks.sampling --model sdxl --size 1024x1024 --steps 20
    ... python -m benchmarks.sampling --model tiny --variants eager,onediff-eager        on a CPU, to see that it runs

Every variant gets an empty compile cache; ``benchmarks/variants.py`` lists the names. Our store of compiled graphs is
where ONEDIFF_CACHE_DIR says; point it to an empty folder to time a compilation. The first image of each is timed as a
person waits for it, compilation included; then all variants take turns, image by image, and the median is reported.
A variant that fails is reported with its error, and the others go on.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import os
import platform
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .checkpoints import FORMATTED, load
from .host import reported, start_host
from .processor import processor_facts
from .variants import names, variant

if TYPE_CHECKING:
    import torch

    from .models import Family

MODELS = ("sd15", "sdxl", "flux", "z-image", "qwen-image", "wan-5s", "tiny")
_FIRST_STEPS = 2
"""Of an image: with what is once an image."""
_COUNTED = ("served", "reused", "captured", "compiled", "loaded", "recorded", "fallbacks")


def main() -> int:
    """Run the benchmark; write JSON, print a table. Ends with 1 if one of our own variants failed or ran eager."""
    options = arguments(str(__doc__), MODELS, add_format)
    start_host(cuda_malloc=not options.disable_cuda_malloc)
    report = reported(lambda: Bench(options, functools.partial(load, form=options.format)).run(), options.output)
    print_table(report)
    return ours_failed(report)


def arguments(
    description: str, models: Sequence[str], add: Callable[[argparse.ArgumentParser], None] = lambda _parser: None
) -> argparse.Namespace:
    """The command line of a script that times variants of one of ``models``.

    Args:
        add: adds what only this script has.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=models, default="sdxl")
    parser.add_argument("--size", help="image width x height in pixels (default: what the model was made for)")
    parser.add_argument("--batch", type=int, default=1, help="images per run")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5, help="timed images per variant")
    parser.add_argument("--variants", type=names, default="eager,torch_compile,onediff-inductor")
    parser.add_argument("--output", help="JSON file to write")
    parser.add_argument("--inductor-cache", help="folder to keep Inductor's cache in (default: a new one each)")
    parser.add_argument(
        "--disable-cuda-malloc", action="store_true", help="PyTorch's own allocator, as ComfyUI's option of that name"
    )
    add(parser)
    return parser.parse_args()


def add_format(parser: argparse.ArgumentParser) -> None:
    """Add the choice of what a checkpoint's weights are."""
    parser.add_argument("--format", choices=FORMATTED, default="bf16", help="of the weights; bf16: the family's own")


class Sampler:
    """Makes latents of one model family from seeds, as KSampler does with euler.

    Args:
        model: one of ``MODELS``.
        size: width x height in pixels; None for the family's own.
        batch: images per run.
        steps: of each run.
        prompts: how many random conditionings there are.
    """

    def __init__(self, model: str, size: str | None, batch: int, steps: int, prompts: int = 1) -> None:
        import torch

        from .models import FAMILIES, conditioning

        self.family = FAMILIES[model]
        self.size = size or self.family.size
        self.steps = steps
        width, height = map(int, self.size.split("x"))
        frames = [self.family.frames] if self.family.frames else []
        self.latent = torch.zeros(batch, self.family.latent_channels, *frames, height // 8, width // 8)
        self.prompts: list[tuple[Any, Any]] = [
            (conditioning(self.family, 2 * prompt + 1), conditioning(self.family, 2 * prompt + 2))
            for prompt in range(prompts)
        ]

    def __call__(self, model: Any, seed: int, prompt: int = 0, callback: Callable[..., None] | None = None) -> Any:
        """The latent for one of the random conditionings; see ``of``."""
        return self.of(model, seed, *self.prompts[prompt], callback=callback)

    def of(
        self, model: Any, seed: int, positive: Any, negative: Any, callback: Callable[..., None] | None = None
    ) -> Any:
        """The latent, [batch, channels, height / 8, width / 8] in float32 on the CPU.

        Args:
            model: a MODEL.
            seed: of the noise.
            positive: conditioning.
            negative: conditioning.
            callback: of the sampler, after each step.
        """
        import comfy.sample

        noise = self.noise(seed)
        cfg, latent = self.family.cfg, self.latent
        steps, options = self.steps, {"seed": seed, "disable_pbar": True, "callback": callback}
        return comfy.sample.sample(model, noise, steps, cfg, "euler", "simple", positive, negative, latent, **options)

    def noise(self, seed: int) -> torch.Tensor:
        """What a latent begins as, on the CPU."""
        import torch

        return torch.randn(self.latent.shape, generator=torch.Generator().manual_seed(seed))


class Bench:
    """Times the variants of one model.

    Args:
        options: as the command line has them.
        load: makes the MODEL of a family on a device; with weights in the family's own dtype if it is None.
        family: one of ``benchmarks.models.FAMILIES``; the one called like the model if it is None.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        load: Callable[[Family, torch.device], Any] | None = None,
        family: str | None = None,
    ) -> None:
        import comfy.model_management

        from . import models

        self.options = options
        self.device = comfy.model_management.get_torch_device()
        self.sampler = Sampler(family or options.model, options.size, options.batch, options.steps)
        options.size = self.sampler.size
        start = time.perf_counter()
        self.model = (load or models.load)(self.sampler.family, self.device)
        print(f"{options.model}: weights made and loaded in {time.perf_counter() - start:.1f} s", flush=True)
        self.models: dict[str, Any] = {}  # of the variants that have not failed
        self.rows: dict[str, dict[str, Any]] = {}
        self.images: dict[str, list[dict[str, Any]]] = {name: [] for name in options.variants}
        self.expected: Any = None

    def run(self) -> dict[str, Any]:
        self.first_images()
        for _ in range(self.options.rounds):
            self.round()
        return self.report()

    def first_images(self, names: Sequence[str] | None = None) -> None:
        """Have variants, all unless it is said which, make an image that is not timed with the others."""
        from onediff_comfy.host.process.process import library

        # What comes often gets a graph of its own, in the background: not while the general one is timed.
        library().background = None
        for name in self.options.variants if names is None else names:
            self.rows[name] = {}
            self.attempt(name, self.first_image)

    def round(self, names: Sequence[str] | None = None) -> None:
        """Time an image of each variant, or of those that are said, if they have not failed."""
        for name in list(self.models) if names is None else names:
            if name in self.models:
                self.attempt(name, self.timed_image)

    def report(self) -> dict[str, Any]:
        from onediff_comfy.host.process.process import metrics

        for name in self.models:
            self.rows[name] |= self.summary(self.images[name])
        return {
            "what": {key: value for key, value in vars(self.options).items() if key != "output"},
            "environment": environment(self.device),
            "variants": self.rows,
            "onediff": metrics().snapshot(),
        }

    def summary(self, images: list[dict[str, Any]]) -> dict[str, Any]:
        """What a variant's timed images come to; its calls, of our graphs, are those of all these images together."""
        later = [1000 * image["later_s"] for image in images if "later_s" in image]
        return {
            "later_step_ms": statistics.median(later) if later else None,
            "later_step_ms_all": later,
            **spread("step_ms", [1000 * image["s"] / self.options.steps for image in images]),
            "image_s": statistics.median(image["s"] for image in images),
            "peak_mib": max((image["peak_mib"] for image in images if image["peak_mib"] is not None), default=None),
            "calls": sum(image["served"] for image in images),
            "calls_reused": sum(image["reused"] for image in images),
            "calls_eager": sum(image["fallbacks"] for image in images),
        }

    def attempt(self, name: str, work: Callable[[str], None]) -> None:
        """Do something for a variant; if it fails, that is its result, and it is not tried again."""
        try:
            work(name)
        except Exception as error:
            traceback.print_exc()
            self.rows[name]["failed"] = failure(error)
            self.models.pop(name, None)
            print(f"{name}: failed", flush=True)

    def first_image(self, name: str) -> None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = self.options.inductor_cache or tempfile.mkdtemp(prefix="onediff-bench-")
        self.models[name] = self.accelerated(name)
        before = _compiler_phases()
        latent, found = self.image(name, 0)
        self.rows[name] |= {f"first_image_{what}": value for what, value in found.items()}
        phases = {phase: seconds - before.get(phase, 0.0) for phase, seconds in _compiler_phases().items()}
        self.rows[name]["compiler_phases_s"] = {phase: round(s, 1) for phase, s in phases.items() if s >= 1}
        if name == "eager":  # itself it is compared with its own repetition
            self.expected, _ = self.make(name, 0)
        if self.expected is not None:
            self.rows[name] |= _difference(latent, self.expected)
        print(f"{name}: first image {found['s']:.2f} s", flush=True)

    def timed_image(self, name: str) -> None:
        self.images[name].append(self.image(name, seed=len(self.images[name]) + 1)[1])

    def accelerated(self, name: str) -> Any:
        """The model as a variant runs it."""
        return variant(self.model, name)

    def make(self, name: str, seed: int, callback: Callable[..., None] | None = None) -> tuple[Any, dict[str, float]]:
        """A variant's latent, and what is to be noted of it."""
        return self.sampler(self.models[name], seed, callback=callback), {}

    def image(self, name: str, seed: int) -> tuple[Any, dict[str, Any]]:
        """A latent; seconds, the most memory that was allocated in MiB, and what our counters counted.

        ``steps_s`` are the seconds of each step on the device; the first begins with the image. ``later_s`` are those
        of a step after the first two, which have what is once an image.
        """
        moments = list[Any]()

        def after_step(*_latents: Any) -> None:
            moments.append(_moment())

        reset_peak()
        before, start = counters(), when_done()
        moments.append(_moment())
        latent, noted = self.make(name, seed, after_step)
        end, after = when_done(), counters()
        steps = [_seconds(*each) for each in itertools.pairwise(moments)]
        found = {"s": end - start, "peak_mib": peak_mib(), "steps_s": [round(step, 5) for step in steps], **noted}
        if later := steps[_FIRST_STEPS:]:
            found["later_s"] = statistics.fmean(later)
        return latent, {**found, **{what: after[what] - before[what] for what in _COUNTED}}


def spread(what: str, values: list[float]) -> dict[str, Any]:
    """The median of what was measured, the least, the most, and all, under names that begin with ``what``."""
    least, most = min(values), max(values)
    return {what: statistics.median(values), f"{what}_min": least, f"{what}_max": most, f"{what}_all": values}


def counters() -> dict[str, int]:
    """What our counters stand at: graphs made, calls served, and ``fallbacks``, calls that ran eager instead."""
    from onediff_comfy.host.process.process import metrics

    found = metrics().snapshot()
    return {what: found[what] for what in _COUNTED if what != "fallbacks"} | {
        "fallbacks": sum(found["fallbacks"].values())
    }


def failure(error: Exception) -> str:
    """One line on what failed."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def ours_failed(report: dict[str, Any]) -> bool:
    """Whether one of our own variants failed, or had calls that ran eager, so that its figures are not ours."""
    ours = [row for name, row in report["variants"].items() if name.startswith("onediff")]
    return any("failed" in row or row["calls_eager"] for row in ours)


def _compiler_phases() -> dict[str, float]:
    """Seconds that PyTorch's compiler spent in each of its phases so far; one may be part of another."""
    from torch._dynamo.utils import compilation_time_metrics

    return {phase: sum(seconds) for phase, seconds in compilation_time_metrics.items()}


def _moment() -> Any:
    """Return what says when the device has done what it was given by now. Nobody waits for that: steps overlap."""
    import torch

    if not torch.cuda.is_available():
        return time.perf_counter()
    moment = torch.cuda.Event(enable_timing=True)
    moment.record()
    return moment


def _seconds(begin: Any, end: Any) -> float:
    """Return the seconds between two moments that have passed."""
    return float(end - begin if isinstance(end, float) else begin.elapsed_time(end) / 1000)


def when_done() -> float:
    """Seconds of a clock, once the device has done all that it was given."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def reset_peak() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak_mib() -> float | None:
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
        **processor_facts(),
        "device": str(device),
        "date": time.strftime("%Y-%m-%d"),
    }
    if torch.cuda.is_available():
        import subprocess

        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        name, driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split(",")[:2]
        found |= {"gpu": name.strip(), "driver": driver.strip().splitlines()[0], "cuda": torch.version.cuda}
        found["allocator"] = torch.cuda.get_allocator_backend()
    return found


def print_table(report: dict[str, Any]) -> None:
    what, rows = report["what"], report["variants"]
    eager = rows.get("eager", {}).get("step_ms")
    width = max(map(len, rows))
    print(f"\n{what['model']} {what['size']} batch {what['batch']}, {what['steps']} steps; {report['environment']}")
    print(
        f"{'variant':{width}} {'step ms':>8} {'min':>8} {'max':>8} {'later':>8} {'ratio':>6} {'first s':>8} "
        f"{'peak MiB':>9} {'rel. error':>10} {'reused':>9}"
    )
    for name, row in rows.items():
        if "failed" in row:
            print(f"{name:{width}} failed: {row['failed']}", flush=True)
            continue
        ratio = f"{eager / row['step_ms']:.2f}x" if eager else "-"
        peak = f"{row['peak_mib']:.0f}" if row["peak_mib"] else "-"
        error = f"{row['relative_error']:.1e}" if "relative_error" in row else "-"
        reused = f"{row['calls_reused']}/{row['calls']}" if row["calls"] else "-"
        reused += f"  {row['calls_eager']} calls ran eager" if row["calls_eager"] else ""
        spread = f"{row['step_ms']:8.1f} {row['step_ms_min']:8.1f} {row['step_ms_max']:8.1f}"
        first = f"{row['first_image_s']:8.2f}"
        later = f"{row['later_step_ms']:.1f}" if row.get("later_step_ms") else "-"
        print(f"{name:{width}} {spread} {later:>8} {ratio:>6} {first} {peak:>9} {error:>10} {reused:>9}", flush=True)
    print("onediff:", {k: v for k, v in report["onediff"].items() if k != "graphs"})
    for graph in report["onediff"]["graphs"]:
        print(f"  {graph['how']} {graph['what']} with {graph['engine']} in {graph['seconds']} s")


if __name__ == "__main__":
    sys.exit(main())
