"""What `make bench` runs: all graphs are compiled side by side, then each script measures alone; one file, one table.

    python -m benchmarks [--results FOLDER] [--only WHAT,...]        on a GPU
    python -m benchmarks --plan tiny --results FOLDER                on a CPU, to see that it runs

The file is DATE-GPU-bench.json, and is written anew after each script. Graphs are compiled into an empty folder that
all scripts share but those that begin with nothing. Ends with 1 if a script failed; the others' results are kept.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .files import Report, file_name, read, results_folder, write
from .plan import PLANS, Job, Step
from .summary import table

_POLL_S = 0.5
_TAIL = 3000  # characters of what a failed process printed
_KEEP_INDUCTORS_CACHE = ("sampling", "whole")  # scripts with that option: ComfyUI's compile node finds its code there


def main() -> int:
    """Run the plan; 1 if something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", choices=list(PLANS), default="full")
    parser.add_argument("--results", type=Path, default=results_folder(), help="folder to write to")
    parser.add_argument("--only", help="what to run of the plan, separated by commas")
    parser.add_argument("--store", type=Path, help="folder for graphs, kept (default: a new one, removed)")
    parser.add_argument(
        "--processes", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="that compile at once"
    )
    parser.add_argument("--patience", type=float, default=1800, help="seconds after which a process is ended")
    parser.add_argument("--gib", type=int, help="GPU memory for processes that compile at once (default: nearly all)")
    options = parser.parse_args()
    jobs = [job for job in PLANS[options.plan] if options.only is None or job.what in options.only.split(",")]
    if not jobs:
        parser.error(f"--only names nothing of {', '.join(job.what for job in PLANS[options.plan])}")
    missing = _missing()
    if missing is not None:
        parser.exit(1, f"no graph could be kept, so each would be compiled again where it is to be timed: {missing}\n")
    with _folder(options.store) as folder:
        bench = Bench(options.plan, folder, options.results, options.patience)
        bench.compile([step for job in jobs for step in job.compiling()], options.processes, options.gib or _room())
        for job in jobs:
            bench.measure(job)
    print("", *table(bench.report), "", bench.path, sep="\n", flush=True)
    return int(bench.failed)


def _missing() -> str | None:
    """Why this Python cannot read compiled graphs; None if it can."""
    try:
        importlib.import_module("onediff_comfy.store.schema")
    except ImportError as error:
        return str(error)
    return None


def _room() -> int:
    """GiB of the first GPU's memory but for a tenth; as much as anybody asks for where there is none."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return sys.maxsize
    return int(0.9 * int(found.split()[0]) / 1024)


@contextlib.contextmanager
def _folder(kept: Path | None) -> Iterator[Path]:
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        yield kept
        return
    with tempfile.TemporaryDirectory(prefix="onediff-bench-") as folder:
        yield Path(folder)


class Bench:
    """Runs a plan's processes and writes down what they report.

    Args:
        plan: its name.
        folder: for graphs, and for what processes leave.
        results: where the file is written.
        patience: seconds after which a process is ended.
    """

    def __init__(self, plan: str, folder: Path, results: Path, patience: float = 1800) -> None:
        self._folder = folder
        self._results = results
        self._patience = patience
        self._start = time.monotonic()
        self.report: Report = {"plan": plan, "environment": {}, "compiling": {}, "jobs": {}}

    @property
    def path(self) -> Path | None:
        """Where the file is; None as long as nothing was measured."""
        return self._results / file_name(self.report, "bench") if self.report["environment"] else None

    @property
    def failed(self) -> bool:
        """Whether a process failed, or reported nothing."""
        ended = [*self.report["compiling"].values(), *self.report["jobs"].values()]
        return any(each["status"] for each in ended)

    def compile(self, steps: Sequence[Step], processes: int, gib: int) -> None:
        """Run processes that make graphs, side by side: as many, and of as much GPU memory, as is said."""
        waiting, running = list(steps), dict[Step, tuple[subprocess.Popen[bytes], float]]()
        threads = str(max(2, 2 * (os.cpu_count() or 1) // processes))  # of a process's compiler
        while waiting or running:
            for step, (process, start) in list(running.items()):
                if time.monotonic() - start > self._patience:
                    process.kill()
                    process.wait()
                if process.poll() is not None:
                    del running[step]
                    self._compiled(step, process.returncode, time.monotonic() - start)
            for step in list(waiting):
                taken = sum(other.gib for other in running)
                if len(running) < processes and (not running or taken + step.gib <= gib):
                    waiting.remove(step)
                    running[step] = self._started(step, {"TORCHINDUCTOR_COMPILE_THREADS": threads})
            time.sleep(_POLL_S)
        self.report["compiling_s"] = time.monotonic() - self._start

    def measure(self, job: Job) -> None:
        """Run a script alone."""
        with _folder(None) if job.alone else contextlib.nullcontext(self._folder) as folder:
            step, start = job.measuring(), time.monotonic()
            output = folder / "report.json"
            output.unlink(missing_ok=True)
            print(f"\n== {job.what}: {step.module} {' '.join(step.arguments)}", flush=True)
            status = _status(self._command(step, output), _environment(folder), self._patience)
            found: dict[str, Any] = {"s": time.monotonic() - start, "status": status, "module": step.module}
            if output.exists():
                found["report"] = read(output)
                self.report["environment"] = found["report"]["environment"]
            else:
                found["status"] = status or 1
        self.report["jobs"][job.what] = found
        self.report["wall_s"] = time.monotonic() - self._start
        print(f"== {job.what}: {found['s']:.0f} s, ended with {status}", flush=True)
        if self.path is not None:
            self._results.mkdir(parents=True, exist_ok=True)
            write(self.report, self.path)

    def _started(self, step: Step, settings: dict[str, str]) -> tuple[subprocess.Popen[bytes], float]:
        environment = _environment(self._folder) | settings
        with self._log(step).open("wb") as log:
            command = self._command(step, self._log(step).with_suffix(".json"))
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        return process, time.monotonic()

    def _compiled(self, step: Step, status: int, seconds: float) -> None:
        self.report["compiling"][step.what] = {"s": seconds, "status": status}
        print(f"compiled {step.what}: {seconds:.0f} s, ended with {status}", flush=True)
        if status:
            print(self._log(step).read_text(errors="replace")[-_TAIL:], flush=True)

    def _log(self, step: Step) -> Path:
        return self._folder / f"{step.what.replace(' ', '_').replace('/', '_')}.log"

    def _command(self, step: Step, output: Path) -> list[str]:
        command = [sys.executable, "-m", f"benchmarks.{step.module}", *step.arguments, "--output", str(output)]
        if step.module in _KEEP_INDUCTORS_CACHE:
            command += ["--inductor-cache", str(self._folder / "inductor")]
        return command


def _environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "ONEDIFF_CACHE_DIR": f"{folder}/store", "ONEDIFF_CONFIG_DIR": f"{folder}/config"}


def _status(command: Sequence[str], environment: dict[str, str], patience: float) -> int:
    """How a process ended; 124, as of the command `timeout`, if it took too long."""
    try:
        return subprocess.run(command, env=environment, check=False, timeout=patience).returncode
    except subprocess.TimeoutExpired:
        return 124


if __name__ == "__main__":
    sys.exit(main())
