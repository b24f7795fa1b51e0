"""What `make bench` runs: all graphs are compiled side by side, then each script measures alone; one file, one table.

    python -m benchmarks [--results FOLDER] [--only WHAT,...]        on a GPU
    python -m benchmarks --plan any-card                             models that do not fit, on smaller cards
    python -m benchmarks --plan tiny --results FOLDER                on a CPU, to see that it runs

The file is DATE-GPU-bench.json, or DATE-GPU-any-card.json, and is written anew after each script. Graphs are compiled
into an empty folder that all scripts share but those that begin with nothing. Where there are several GPUs, all
compile, and then each measures one script after another, alone, with its share of the processor's cores. First images
are measured with another PyTorch, too, where --other-torch names a folder that has it (made by `pip install --target`).
Ends with 1 if a script failed; the others' results are kept.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO

from .files import Report, file_name, read, results_folder, write
from .plan import PLANS, Job, Step, with_other_torch
from .processor import CoreTime
from .summary import table

_POLL_S = 0.5
_VISIBLE = "CUDA_VISIBLE_DEVICES"
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
    parser.add_argument("--gib", type=int, help="of each GPU, for processes that compile at once (default: nearly all)")
    parser.add_argument("--other-torch", type=Path, help="folder of packages with another PyTorch")
    options = parser.parse_args()
    jobs = [job for job in PLANS[options.plan] if options.only is None or job.what in options.only.split(",")]
    if not jobs:
        parser.error(f"--only names nothing of {', '.join(job.what for job in PLANS[options.plan])}")
    if options.other_torch is not None:
        jobs = list(with_other_torch(jobs, str(options.other_torch.resolve(strict=True))))
    missing = _missing()
    if missing is not None:
        parser.exit(1, f"no graph could be kept, so each would be compiled again where it is to be timed: {missing}\n")
    with _folder(options.store) as folder:
        bench = Bench(options.plan, folder, options.results, options.patience)
        gpus = dict.fromkeys(_gpus(), options.gib or _room())
        bench.compile([step for job in jobs for step in job.compiling()], options.processes, gpus)
        bench.measure(jobs, list(gpus))
    print("", *table(bench.report), "", bench.path, sep="\n", flush=True)
    return int(bench.failed)


def _missing() -> str | None:
    """Why this Python cannot read compiled graphs; None if it can."""
    try:
        importlib.import_module("onediff_comfy.store.schema")
    except ImportError as error:
        return str(error)
    return None


def _gpus() -> list[str]:
    """Return the GPUs that may be used, as CUDA_VISIBLE_DEVICES names them; an empty name where there is none."""
    allowed = os.environ.get(_VISIBLE)
    return [str(number) for number, _ in enumerate(_memories())] or [""] if allowed is None else allowed.split(",")


def _room() -> int:
    """Return the GiB of the first GPU's memory but for a tenth; as much as anybody asks for where there is none."""
    return int(0.9 * memories[0] / 1024) if (memories := _memories()) else sys.maxsize


def _memories() -> list[int]:
    """Return the MiB of each GPU's memory."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    return [int(line) for line in found.split()]


@dataclass(frozen=True)
class _Running:
    """A process that makes graphs.

    Attributes:
        process: itself.
        start: seconds of a clock.
        gpu: that it computes on.
    """

    process: subprocess.Popen[bytes]
    start: float
    gpu: str


@contextlib.contextmanager
def _folder(kept: Path | None) -> Iterator[Path]:
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        yield kept
        return
    with tempfile.TemporaryDirectory(prefix="onediff-bench-", ignore_cleanup_errors=True) as folder:
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
        self._writing = threading.Lock()
        self.report: Report = {"plan": plan, "environment": {}, "compiling": {}, "jobs": {}}

    @property
    def path(self) -> Path | None:
        """Where the file is; None as long as nothing was measured."""
        what = "any-card" if self.report["plan"] == "any-card" else "bench"
        return self._results / file_name(self.report, what) if self.report["environment"] else None

    @property
    def failed(self) -> bool:
        """Whether a process failed, or reported nothing."""
        ended = [*self.report["compiling"].values(), *self.report["jobs"].values()]
        return any(each["status"] for each in ended)

    def compile(self, steps: Sequence[Step], processes: int, gpus: Mapping[str, int]) -> None:
        """Run processes that make graphs, side by side.

        Args:
            processes: how many at once.
            gpus: how many GiB of each they may take together, by what CUDA_VISIBLE_DEVICES calls it.
        """
        waiting, running = list(steps), dict[Step, _Running]()
        threads = str(max(2, 2 * (os.cpu_count() or 1) // processes))  # of a process's compiler
        try:
            while waiting or running:
                for step in [step for step, each in running.items() if self._has_ended(each)]:
                    ended = running.pop(step)
                    self._compiled(step, ended.process.returncode, time.monotonic() - ended.start)
                for step in list(waiting):
                    taken = {gpu: sum(other.gib for other, its in running.items() if its.gpu == gpu) for gpu in gpus}
                    gpu = min(gpus, key=lambda gpu: taken[gpu])
                    if len(running) < processes and (not taken[gpu] or taken[gpu] + step.gib <= gpus[gpu]):
                        waiting.remove(step)
                        running[step] = self._started(step, gpu, {"TORCHINDUCTOR_COMPILE_THREADS": threads})
                time.sleep(_POLL_S)
        finally:  # somebody stopped it
            for each in running.values():
                _end(each.process)
        self.report["compiling_s"] = time.monotonic() - self._start

    def measure(self, jobs: Sequence[Job], gpus: Sequence[str]) -> None:
        """Run each script alone on one of the GPUs, and with its share of the processor's cores."""
        cores, free = _cores(), SimpleQueue[int]()
        share = len(cores) // len(gpus)
        self.report |= {"gpus": len(gpus), "cores_of_each": share}
        for place in range(len(gpus)):
            free.put(place)

        def work(job: Job) -> None:
            place = free.get()
            try:
                self._measure(job, gpus[place], cores[place * share : (place + 1) * share])
            finally:
                free.put(place)

        with ThreadPoolExecutor(len(gpus)) as pool:
            list(pool.map(work, jobs))

    def _measure(self, job: Job, gpu: str, cores: Sequence[int]) -> None:
        with _folder(None) if job.alone else contextlib.nullcontext(self._folder) as folder:
            step, start, before = job.measuring(), time.monotonic(), CoreTime.of(cores)
            output, log = (self._log(step).with_suffix(suffix) for suffix in (".json", ".log"))
            output.unlink(missing_ok=True)
            with log.open("wb") as said:
                environment = _environment(folder, gpu, job.packages)
                status = _status(self._command(step, output), environment, self._patience, cores, said)
            found: dict[str, Any] = {"s": time.monotonic() - start, "status": status, "module": step.module}
            if before is not None and (now := CoreTime.of(cores)) is not None:
                found["stolen"] = now.stolen_since(before)
            if output.exists():
                found["report"] = read(output)
            else:
                found["status"] = status or 1
        with self._writing:
            print(f"\n== {job.what}: {step.module} {' '.join(step.arguments)}", flush=True)
            print(log.read_text(errors="replace")[-_TAIL:], flush=True)
            print(f"== {job.what}: {found['s']:.0f} s, ended with {status}", flush=True)
            self._note(job, found)

    def _note(self, job: Job, found: dict[str, Any]) -> None:
        """Write down what came of a job."""
        self.report["jobs"][job.what] = found
        self.report["wall_s"] = time.monotonic() - self._start
        if "report" in found and not job.packages:
            self.report["environment"] = found["report"]["environment"]
        if self.path is not None:
            self._results.mkdir(parents=True, exist_ok=True)
            write(self.report, self.path)

    def _has_ended(self, running: _Running) -> bool:
        ended = running.process.poll() is not None
        if ended or time.monotonic() - running.start > self._patience:
            _end(running.process)
        return running.process.returncode is not None

    def _started(self, step: Step, gpu: str, settings: dict[str, str]) -> _Running:
        environment = _environment(self._folder, gpu) | settings
        with self._log(step).open("wb") as log:
            command = self._command(step, self._log(step).with_suffix(".json"))
            process = _begun(command, environment, log)
        return _Running(process, time.monotonic(), gpu)

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


def _environment(folder: Path, gpu: str, packages: str = "") -> dict[str, str]:
    own = {"ONEDIFF_CACHE_DIR": f"{folder}/store", "ONEDIFF_CONFIG_DIR": f"{folder}/config"}
    if packages:
        own["PYTHONPATH"] = os.pathsep.join(filter(None, [packages, os.environ.get("PYTHONPATH")]))
    return {**os.environ, **own, **({_VISIBLE: gpu} if gpu else {})}


def _cores() -> list[int]:
    """Return the numbers of the processor's cores; none where processes cannot be kept to some."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def _status(
    command: Sequence[str], environment: dict[str, str], patience: float, cores: Sequence[int], said: BinaryIO
) -> int:
    """Return how a process on some cores ended; 124, as of the command `timeout`, if it took too long."""
    process = _begun(command, environment, said)
    if cores:
        os.sched_setaffinity(process.pid, cores)
    try:
        return process.wait(patience)
    except subprocess.TimeoutExpired:
        return 124
    finally:
        _end(process)


def _begun(command: Sequence[str], environment: dict[str, str], said: BinaryIO) -> subprocess.Popen[bytes]:
    """Start a process whose own processes can be ended with it; see ``_end``."""
    return subprocess.Popen(command, env=environment, stdout=said, stderr=subprocess.STDOUT, start_new_session=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started: the next one is measured alone, and its folder is removed."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    sys.exit(main())
