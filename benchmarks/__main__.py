"""What `make bench` runs: one script after another, each in a process of its own, then the plots and one table.

    python -m benchmarks [--results FOLDER] [--only WHAT,...]        on a GPU
    python -m benchmarks --plan tiny --results FOLDER                on a CPU, to see that it runs

Each script's report becomes DATE-GPU-WHAT.json. Graphs are compiled into an empty folder that all but `restart`
share. Ends with 1 if a script failed; the others' results are kept.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .files import file_name, read, results_folder
from .summary import table

_PATIENCE_S = 1800  # a script that takes longer hangs


@dataclass(frozen=True)
class Job:
    """A script to run: what its results are called, its module, its arguments."""

    what: str
    module: str
    arguments: str


_EASY = "easycache:0.1,easycache:0.2,easycache:0.4"
_STEPS = ",".join(f"onediff-inductor+steps:{threshold}" for threshold in ("0.05", "0.1", "0.2"))
_FP8 = "onediff-inductor+fp8,onediff-inductor+fp8+steps:0.1"
_LOSSY = f"{_FP8},{_STEPS},{_EASY},onediff-inductor+easycache:0.2"
_HOSTS = "eager,torch_compile"
# ComfyUI's cudagraphs backend last: what it leaves behind if it fails is in nobody's first image.
_SDXL = f"{_HOSTS},onediff-inductor,onediff-cudagraph,{_LOSSY},torch_compile-cudagraphs"
_SD15 = f"{_HOSTS},onediff-inductor,onediff-cudagraph,torch_compile-cudagraphs"
_FLUX = f"{_HOSTS},onediff-inductor,{_FP8},onediff-inductor+steps:0.1,easycache:0.2"
# That backend checks its memory pools (torch/_inductor/cudagraph_trees.py), for which it needs PyTorch's own allocator.
_OWN_ALLOCATOR = "--model sdxl --disable-cuda-malloc --variants eager,onediff-inductor,torch_compile-cudagraphs"
# One size after another, and each takes a minute or two: not all that `sizes` measures.
_COMPILED_BY_THE_HOST = (("sdxl", "1024x1024"), ("sdxl", "832x1216"), ("sdxl", "1536x1536"), ("sd15", "512x512"))
_TINY = "eager,onediff-eager,onediff-eager+steps:0.1,easycache:0.2"

PLANS = {
    "full": (
        Job("sampling-sdxl", "sampling", f"--model sdxl --variants {_SDXL}"),
        Job(
            "quality-sdxl",
            "quality",
            f"--model sdxl --variants torch_compile,onediff-inductor,onediff-cudagraph,{_LOSSY}",
        ),
        Job("sampling-sdxl-own-allocator", "sampling", _OWN_ALLOCATOR),
        Job("sampling-sd15", "sampling", f"--model sd15 --variants {_SD15}"),
        Job("sampling-flux", "sampling", f"--model flux --rounds 3 --variants {_FLUX}"),
        Job("vae", "vae", "--no-bucket"),
        Job("restart-sdxl", "restart", "--model sdxl"),
        Job("sizes-sdxl", "any_size", "times --model sdxl"),
        Job("sizes-sd15", "any_size", "times 512x512b1 --model sd15"),
        *(
            Job(f"sizes-{model}-host-{size}", "any_size", f"host {size}b1 --model {model}")
            for model, size in _COMPILED_BY_THE_HOST
        ),
        Job("changes-sdxl", "changes", "--control"),
        Job("cpu-sd15", "cpu", "--model sd15"),
        Job("kernels-sdxl", "kernels", "--model sdxl"),
        Job("kernels-flux", "kernels", "--model flux"),
        Job("kernels-vae", "kernels", "--model vae"),
    ),
    "tiny": (
        Job("sampling-tiny", "sampling", f"--model tiny --rounds 2 --variants {_TINY}"),
        Job("quality-tiny", "quality", f"--model tiny --seeds 1 --variants {_TINY}"),
        Job("restart-tiny", "restart", "--model tiny --variants eager,onediff-eager"),
        Job("kernels-tiny", "kernels", "--model tiny --variant onediff-eager"),
    ),
}
_PLOTS = {"full": "--speed sdxl,sd15,flux --quality sdxl", "tiny": "--speed tiny --quality tiny"}


def main() -> int:
    """Run the plan; 1 if something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", choices=list(PLANS), default="full")
    parser.add_argument("--results", type=Path, default=results_folder(), help="folder to write to")
    parser.add_argument("--only", help="what to run of the plan, separated by commas")
    options = parser.parse_args()
    jobs = [job for job in PLANS[options.plan] if options.only is None or job.what in options.only.split(",")]
    if not jobs:
        parser.error(f"--only names nothing of {', '.join(job.what for job in PLANS[options.plan])}")
    written, failed = run(jobs, options.results)
    plots = ["-m", "benchmarks.plots", "--results", str(options.results), *_PLOTS[options.plan].split()]
    if subprocess.run([sys.executable, *plots], check=False).returncode:
        failed.append("plots")
    print("", *table({what: read(path) for what, path in written.items()}), sep="\n")
    print("", *(f"{what}: {path}" for what, path in written.items()), sep="\n")
    if failed:
        print(f"failed: {', '.join(failed)}", flush=True)
    return 1 if failed else 0


def run(jobs: Sequence[Job], results: Path) -> tuple[dict[str, Path], list[str]]:
    """Run one after another.

    Returns:
        (The files that were written, by what they are about; what failed, though it may have written a file.)
    """
    results.mkdir(parents=True, exist_ok=True)
    written, failed = {}, []
    with tempfile.TemporaryDirectory(prefix="onediff-bench-") as folder:
        folders = {"ONEDIFF_CACHE_DIR": f"{folder}/store", "ONEDIFF_CONFIG_DIR": f"{folder}/config"}
        for job in jobs:
            output = Path(folder, f"{job.what}.json")
            command = [
                sys.executable,
                "-m",
                f"benchmarks.{job.module}",
                *job.arguments.split(),
                "--output",
                str(output),
            ]
            print(f"\n== {job.what}: {' '.join(command[1:-2])}", flush=True)
            start = time.monotonic()
            status = _status(command, {**os.environ, **folders})
            if output.exists():
                report = output.read_text()
                written[job.what] = results / file_name(read(output), job.what)
                written[job.what].write_text(report)
            if status or not output.exists():
                failed.append(job.what)
            print(f"== {job.what}: {time.monotonic() - start:.0f} s, ended with {status}", flush=True)
    return written, failed


def _status(command: Sequence[str], environment: dict[str, str]) -> int:
    """How a process ended; 124, as of the command `timeout`, if it took too long."""
    try:
        return subprocess.run(command, env=environment, check=False, timeout=_PATIENCE_S).returncode
    except subprocess.TimeoutExpired:
        return 124


if __name__ == "__main__":
    sys.exit(main())
