"""Models served inside the host's own compiler: whether anything ends, leaks, or is computed otherwise.

    COMFYUI_PATH=... python -m benchmarks.inside_host_compiler --output FILE
    ... python -m benchmarks.inside_host_compiler --model tiny,tiny-wan --steps 3       on a CPU, to see that it runs

Newer hosts plan what a model's forward allocates (comfy-aimdo from 0.5 on) and open the plan before wrappers of the
diffusion model are called, so ours runs inside. That is how it is here, by ``allocation_plans``, around every forward
of a model of real size with random weights. Pictures of three sizes are made, then with one LoRA, with another, and
without; each first by the host alone, inside a plan as well, and then by ours. Each model has a process of its own, so
one that is ended is seen.

The command ends with 1 where a bound is broken: a process that ended otherwise than it should; a plan that failed or
was given up; a call that was not served; more allocations that outlive their forward than the host's own forward has; a
plan broken more often than calls were compared or timed with eager; memory that grows once all sizes were seen; a
picture that is off by more than rounding explains.

What a machine with a GPU and no network needs beside torch, as wheels (cp312, or abi3, manylinux):
comfy-aimdo==0.6.0, comfy-kitchen==0.2.26 (what ComfyUI 0.30.0 asks for), and what ComfyUI 0.30.0 itself imports. With
``--without-pause`` our pause is left out: what then comes of it is no failure of the command's, but what it is for.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .host import reported, start_host
from .sampling import Sampler, counters, environment

SIZES = {
    "sdxl": ("1024x1024", "832x1216", "1152x896"),
    "flux": ("1024x1024", "832x1216", "768x768"),
    "wan": ("832x480", "480x832", "640x640"),
    "tiny": ("128x128", "192x128", "128x192"),
    "tiny-wan": ("128x128", "192x128", "128x192"),
}
ENGINES = {"sdxl": "inductor", "flux": "inductor", "wan": "cudagraph", "tiny": "eager", "tiny-wan": "eager"}
"""For each model. Wan is served by kernels of its own, recorded: compiling it would take longer than all the rest."""

_TIMES_A_CALLS_ERROR = 5  # a run of twenty steps may be off by more than one call; as the tests of pictures allow
_MAY_GROW_MIB = 64
_ALL_SEEN = 10  # runs, after which each size and each LoRA was there


def main() -> int:
    """Run each model in a process of its own, write JSON. Ends with 1 if a bound is broken."""
    options = _arguments()
    if options.one:
        return _one(options)
    with ThreadPoolExecutor(len(options.model) if options.side_by_side else 1) as threads:
        found = threads.map(functools.partial(_in_a_process, options=options), options.model)
        models = dict(zip(options.model, found, strict=True))
    broken = [f"{name}: {line}" for name, found in models.items() for line in found["broken"]]
    report = {"models": models, "broken": broken, "without_pause": options.without_pause}
    if options.output:
        Path(options.output).write_text(json.dumps(report, indent=1) + "\n")
    print("\n".join(broken) or "no bound is broken")
    return int(bool(broken))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=lambda text: text.split(","), default="sdxl,flux,wan", help=", ".join(SIZES))
    parser.add_argument("--engine", help="in place of each model's own")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--side-by-side", action="store_true", help="all models at once, if the GPU has room for them")
    parser.add_argument("--without-pause", action="store_true", help="plan what is ours too")
    parser.add_argument("--output", help="JSON file to write")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)  # this process runs the one model
    return parser.parse_args()


def _in_a_process(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return what came of one model, also if its process was ended."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "found.json")
        command = [sys.executable, "-m", f"{__package__}.inside_host_compiler", "--one", "--model", name]
        command += ["--steps", str(options.steps), "--output", str(output)]
        command += ["--engine", options.engine] if options.engine else []
        command += ["--without-pause"] if options.without_pause else []
        start = time.perf_counter()
        returned = subprocess.run(command, check=False).returncode
        found: dict[str, Any] = json.loads(output.read_text()) if output.exists() else {"runs": [], "broken": []}
    found["seconds"] = round(time.perf_counter() - start, 1)
    found["returned"] = returned
    if returned:
        found["broken"].append(f"its process ended with {returned} after {len(found['runs'])} runs")
    return found


def _used_mib(device: Any) -> int:
    """Return MiB that this process has on the device, or all processes where the driver does not tell them apart."""
    import torch

    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    used = {pid: mib for pid, mib in (line.split(", ") for line in lines if line.count(", ") == 1) if mib.isdigit()}
    if str(os.getpid()) in used:
        return int(used[str(os.getpid())])
    free, total = torch.cuda.mem_get_info(device)
    return (total - free) >> 20


def _one(options: argparse.Namespace) -> int:
    start_host()
    reported(lambda: _Inside(options).run(), options.output)
    return 0


class _Inside:
    """One model, served inside the host's compiler."""

    def __init__(self, options: argparse.Namespace) -> None:
        import comfy.model_management

        from onediff_comfy.host.process.process import library

        from . import allocation_plans as plans
        from .models import FAMILIES, load

        (self.name,) = options.model
        self.options = options
        self.engine = options.engine or ENGINES[self.name]
        self.device = comfy.model_management.get_torch_device()
        self.on_gpu = self.device.type == "cuda"
        if self.on_gpu:
            plans.start_aimdo(self.device)
        record = plans.of_aimdo if self.on_gpu else lambda _device: plans.CountingPlan()
        self.opened = plans.install(record)
        self.watched = contextlib.nullcontext() if self.on_gpu else plans.watched(self.opened)
        if options.without_pause:
            import comfy.model_prefetch

            # As where nobody is at work: the host's own pauses, of which there are none here, would do nothing either.
            comfy.model_prefetch.MALLOC_GRAPHS = {}
        library().background = None  # what comes often gets a graph of its own, which is not what is looked at here
        self.family = FAMILIES[self.name]
        self.model = load(self.family, self.device)
        plans.open_in_forward(type(self.model.model.diffusion_model))
        self.runs: list[dict[str, Any]] = []

    def run(self) -> dict[str, Any]:
        import comfy.sd

        from onediff_comfy.host.adapters.model import accelerate

        from .models import random_lora

        plain, sizes = self.model, SIZES[self.name]
        loras = [random_lora(plain, seed) for seed in (1, 2)]
        changed = [comfy.sd.load_lora_for_models(plain, None, lora, 0.8, 0)[0] for lora in loras]
        pictures = [("", plain, size) for size in sizes]
        pictures += [("with a LoRA", changed[0], sizes[0]), ("with another LoRA", changed[1], sizes[1])]
        pictures += [("without it", plain, sizes[0]), ("without it", plain, sizes[2])]
        with self.watched:
            for what, model, size in pictures:
                eager = self.picture(f"eager, {size} {what}", model, size)
                self.picture(f"ours, {size} {what}", accelerate(model, self.engine), size, eager)
        return {
            "engine": self.engine,
            "steps": self.options.steps,
            "environment": environment(self.device),
            "runs": self.runs,
            "broken": self.broken(),
        }

    def picture(self, what: str, model: Any, size: str, expected: Any = None) -> Any:
        """Make a picture, and note what it took. ``expected`` is what the host alone makes of it."""
        import torch

        from .measures import relative_error

        sampler = Sampler(self.name, size, 1, self.options.steps)
        before, start = counters(), time.perf_counter()
        latent = sampler(model, seed=1)
        if self.on_gpu:
            torch.cuda.synchronize()
        row: dict[str, Any] = {"what": what, "s": round(time.perf_counter() - start, 3), **self.of_plan()}
        self.opened.clean_up()  # as the host does behind the node
        row |= self.opened.counted() | self.memory()
        if expected is not None:
            after = counters()
            row |= {name: after[name] - before[name] for name in after}
            row["relative_error"] = relative_error(latent, expected)
        self.runs.append(row)
        print(row, flush=True)
        return latent

    def of_plan(self) -> dict[str, int]:
        """Return what the plan of the run knows of itself."""
        found = {}
        for plan in self.opened.plans.values():
            for name in ("physical_bytes", "peak_used", "planned", "freed_in_pause"):
                if hasattr(plan, name):
                    found[name] = int(getattr(plan, name))
        return found

    def memory(self) -> dict[str, int]:
        """Return MiB that PyTorch has reserved, and that this process has on the device."""
        import torch

        if not self.on_gpu:
            return {"reserved_mib": 0, "used_mib": 0}
        return {"reserved_mib": torch.cuda.memory_reserved(self.device) >> 20, "used_mib": _used_mib(self.device)}

    def broken(self) -> list[str]:
        """Return which bounds are broken, of the runs so far."""
        from onediff_comfy.serving.verification import numerics

        allowed = _TIMES_A_CALLS_ERROR * numerics.limit({self.family.dtype}, self.device)
        found = []
        for eager, ours in zip(self.runs[::2], self.runs[1::2], strict=True):
            checks = {
                "plans were given up": ours["aborts"],
                "plans failed": ours["errors"],
                "allocations were freed in a pause": ours.get("freed_in_pause", 0),
                "calls ran eager": ours["fallbacks"],
                "calls were not served": ours["forwards"] - ours["served"],
                "more allocations than eager's outlived their forward": max(0, ours["rogues"] - eager["rogues"]),
                # One forward is planned with eager beside it, and the next without.
                "more breaks than eager's and two": max(0, ours["breaks"] - eager["breaks"] - 2),
                f"relative error of over {allowed:.2g}": not ours["relative_error"] <= allowed,
            }
            found += [f"{ours['what']}: {text} ({int(count)})" for text, count in checks.items() if count]
        *before, last = self.runs
        grown = last["used_mib"] - max(run["used_mib"] for run in before[:_ALL_SEEN])
        if grown > _MAY_GROW_MIB:
            found.append(f"{grown} MiB more are in use after all sizes were seen")
        return found


if __name__ == "__main__":
    sys.exit(main())
