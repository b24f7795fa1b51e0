"""Measure a fleet on one machine: one ComfyUI for each GPU, a gateway, a store that they share.

    python -m benchmarks.fleet [--replicas N] [--parts cold,leader,throughput,kills,split] [--output FILE]
    python -m benchmarks.fleet --cpu --replicas 2 --seconds 10          on a CPU, with tiny models

cold          all start with nothing and want SDXL at real size: how many compile, when the last has its first image
leader        the one that compiles another model is killed: how many graphs are published
throughput    images per second through the gateway with 1, 2, 4, 8 workers
kills         a worker is killed with prompts open, then the gateway: how many answers are missing
split         one image over two GPUs, ComfyUI's MultiGPU CFG Split: ms a step, against one GPU

Workers and gateway are those of ``fleet serve``, started without Ray: it only places and restarts them, and its wheels
are more than some machines can be given. What Ray does when a worker dies is in tests/fleet.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dev.host import HostError
from tools.workflows import Workflow, text_to_image

from .files import file_name, results_folder, write
from .fleet_machines import GatewayProcess, Machine, furnish, until

_SEEDS = itertools.count(1)
_RESULT_S = 180.0


@dataclass(frozen=True)
class Model:
    """What is sampled.

    Attributes:
        family: in benchmarks/models.py, and the name of its file in models/diffusion_models.
        conditioning: inputs of TinyConditioning.
        cfg: the guidance scale.
        size: of an image's sides, in pixels.
    """

    family: str
    conditioning: Mapping[str, int]
    cfg: float
    size: int

    @property
    def file(self) -> str:
        """Return the name of the file with its weights."""
        return f"{self.family}.safetensors"

    def workflow(self, seed: int, steps: int, engine: str | None = "inductor", gpus: int = 1) -> Workflow:
        """Text to image without its picture: the latent is saved."""
        made = text_to_image(
            self.file,
            width=self.size,
            height=self.size,
            steps=steps,
            cfg=self.cfg,
            seed=seed,
            engine=engine,
            conditioning=self.conditioning,
            save_latent=True,
        )
        del made["decode"], made["save"]
        made["loader"] = {
            "class_type": "UNETLoader",
            "inputs": {"unet_name": self.file, "weight_dtype": "default"},
        }
        if gpus > 1:
            source = made["sampler"]["inputs"]["model"]
            made["split"] = {"class_type": "MultiGPU_WorkUnits", "inputs": {"model": source, "max_gpus": gpus}}
            made["sampler"]["inputs"]["model"] = ["split", 0]
        return made


_REAL = {
    "sdxl": Model("sdxl", {"tokens": 77, "dim": 2048, "pooled_dim": 1280}, 7.0, 1024),
    "sd15": Model("sd15", {"tokens": 77, "dim": 768, "pooled_dim": 0}, 7.0, 512),
}
_TINY = {
    "sdxl": Model("tiny_unet", {"tokens": 77, "dim": 768, "pooled_dim": 0}, 7.0, 128),
    "sd15": Model("tiny", {"tokens": 16, "dim": 64, "pooled_dim": 32}, 1.0, 128),
}

# Weights are made by a process of its own: it uses a GPU, and is gone when the workers come.
_WEIGHTS = """
import sys
from pathlib import Path
folder, *names = sys.argv[1:]  # the host takes them away
from benchmarks.host import start_host
start_host()
import torch
from safetensors.torch import save_file
from benchmarks.models import FAMILIES, random_weights
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
for name in names:
    weights = {key: weight.cpu() for key, weight in random_weights(FAMILIES[name], device)}
    save_file(weights, Path(folder) / f"{name}.safetensors", metadata={"format": "pt"})
"""
_ENVIRONMENT = """
import json
from benchmarks.host import start_host
start_host()
import torch
from benchmarks.sampling import environment
found = environment(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
print(json.dumps(found | {"gpus": torch.cuda.device_count()}))
"""


@dataclass
class Fleet:
    """What the parts measure.

    Attributes:
        options: of the command line.
        folder: everything that is written.
        models: ``sdxl`` and ``sd15``, or tiny ones in their place.
        machines: the workers.
        gateway: in front of them.
        report: what was found, by part.
    """

    options: argparse.Namespace
    folder: Path
    models: Mapping[str, Model]
    machines: list[Machine]
    gateway: GatewayProcess
    threads: ThreadPoolExecutor
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def store(self) -> Path:
        """Return the folder that all share graphs in."""
        return self.folder / "store"

    def workflow(self, model: str, steps: int | None = None, **more: Any) -> Workflow:
        """Return a workflow with a seed that no other has."""
        return self.models[model].workflow(next(_SEEDS), steps or self.options.steps, **more)

    def published(self) -> list[float]:
        """Return when each graph was published, as seconds since 1970."""
        folder = self.store / "v1" / "graphs"
        return sorted(path.stat().st_mtime for path in folder.iterdir()) if folder.is_dir() else []

    def counts(self) -> dict[str, float]:
        """Return what all machines counted of the store."""
        reports = [machine.report()["fleet"] for machine in self.machines]
        return {name: sum(report[name] for report in reports) for name in reports[0]}


# -- the parts -------------------------------------------------------------------------------------


def cold(fleet: Fleet) -> dict[str, Any]:
    """All workers want a graph that nobody has."""

    def first_image(machine: Machine) -> float:
        assert machine.server.run(fleet.workflow("sdxl"), timeout=1200).status == "success"
        return time.time()

    begun = time.time()
    done = list(fleet.threads.map(first_image, fleet.machines))
    counts, (published, *more) = fleet.counts(), fleet.published()
    second = [machine.server.run(fleet.workflow("sdxl")).seconds for machine in fleet.machines]
    return {
        "workers": len(fleet.machines),
        "compiles": counts["compiles"],
        "published": 1 + len(more),
        "alone": counts["alone"],
        "fetched_mb": counts["fetched_bytes"] / 2**20,
        "publication_s": published - begun,
        "first_images_s": sorted(moment - begun for moment in done),
        "last_after_publication_s": max(done) - published,
        "second_images_s": second,
        "slowest_load_s": max(
            graph["seconds"]
            for machine in fleet.machines
            for graph in machine.report()["graphs"]
            if graph["how"] == "loaded"
        )
        if len(fleet.machines) > 1
        else None,
    }


def leader(fleet: Fleet) -> dict[str, Any]:
    """Whoever compiles is killed."""
    before, leases = len(fleet.published()), fleet.store / "v1" / "leases"
    known = set(leases.iterdir()) if leases.is_dir() else set()
    counted = fleet.counts()

    def run(machine: Machine) -> str:
        with contextlib.suppress(HostError, OSError):
            return machine.server.run(fleet.workflow("sd15"), timeout=1200).status
        return "killed"

    runs = [fleet.threads.submit(run, machine) for machine in fleet.machines]
    until(lambda: leases.is_dir() and set(leases.iterdir()) - known, "somebody compiles", 300)
    (lease,) = set(leases.iterdir()) - known
    owner = json.loads(lease.read_bytes().split(b"\n", 3)[3])["owner"]
    (victim,) = (machine for machine in fleet.machines if machine.pid == int(owner.partition("@")[0]))
    time.sleep(3)  # it is at it
    counted_by_victim = victim.report()["fleet"]
    victim.kill()
    killed = time.time()
    statuses = sorted(each.result() for each in runs)
    published = fleet.published()
    victim.start()
    victim.wait()
    after = fleet.counts()
    return {
        "statuses": statuses,
        "published": len(published) - before,
        "published_after_the_kill_s": max(published) - killed,
        **{
            name: after[name] - counted[name] + counted_by_victim[name]
            for name in ("compiles", "takeovers", "alone", "fetched")
        },
    }


def throughput(fleet: Fleet) -> list[dict[str, Any]]:
    """Images per second, with as many prompts on their way as keep all workers busy."""
    rows: list[dict[str, Any]] = []
    for workers in (number for number in (1, 2, 4, 8) if number <= len(fleet.machines)):
        fleet.gateway.serve_by(fleet.machines[:workers])
        _images_per_second(fleet, workers, fleet.options.seconds / 8)  # models are loaded and recorded
        rate, count = _images_per_second(fleet, workers, fleet.options.seconds)
        rows.append({"workers": workers, "images": count, "images_per_s": rate})
        rows[-1]["of_linear"] = rate / (workers * rows[0]["images_per_s"]) if rows[0]["images_per_s"] else None
        print(json.dumps(rows[-1]), flush=True)  # in case the machine's time is over before the part is
    return rows


def _images_per_second(fleet: Fleet, workers: int, seconds: float) -> tuple[float, int]:
    """Return the rate, and the number of images that it is of: from one image to another, so that no image is cut."""
    moments, end = [], time.monotonic() + seconds

    def keep_going() -> None:
        while time.monotonic() < end:
            result = fleet.gateway.server.run(fleet.workflow("sdxl"))
            assert result.status == "success", result.error
            moments.append(time.monotonic())

    with ThreadPoolExecutor(3 * workers) as clients:
        for client in [clients.submit(keep_going) for _ in range(3 * workers)]:
            client.result()
    counted = sorted(moment for moment in moments if moment <= end)
    if len(counted) < 2:
        return 0.0, len(counted)
    return (len(counted) - 1) / (counted[-1] - counted[0]), len(counted)


def kills(fleet: Fleet) -> dict[str, Any]:
    """A worker dies with prompts open, then the gateway."""
    server, found = fleet.gateway.server, {}
    fleet.gateway.serve_by(fleet.machines)
    ends: dict[str, Callable[[], None]] = {"worker": fleet.machines[-1].kill, "gateway": fleet.gateway.kill}
    for name, end in ends.items():
        prompts = [server.hand_in(fleet.workflow("sdxl")) for _ in range(2 * len(fleet.machines))]
        until(lambda: fleet.gateway.status()["queue"]["running"] > 0, "a prompt runs")
        end()
        begun = time.monotonic()
        if name == "gateway":
            fleet.gateway.start()
        entries = [server.result(prompt, _RESULT_S) for prompt in prompts]
        answered = sum(entry["status"]["status_str"] == "success" for entry in entries)
        found[name] = {"prompts": len(prompts), "answered": answered, "seconds": time.monotonic() - begun}
        if name == "worker":
            fleet.machines[-1].start()
            fleet.machines[-1].wait()
            fleet.gateway.serve_by(fleet.machines)
    lost = sum(row["prompts"] - row["answered"] for row in found.values())
    return {**found, "recovered": fleet.gateway.status()["counts"]["recovered"], "lost": lost}


def split(fleet: Fleet) -> dict[str, Any]:
    """One image over two GPUs, by a worker that sees both while the others are idle."""
    if fleet.options.cpu or fleet.options.gpus < 2:
        return {"skipped": "it needs two GPUs"}
    store = fleet.store.as_uri()
    machine = Machine(fleet.folder, len(fleet.machines), (0, 1), store, fleet.threads)
    machine.wait()
    try:
        found: dict[str, Any] = {}
        eager = machine.server.run(fleet.models["sdxl"].workflow(1, 10, engine=None), timeout=1200)
        for name, gpus in (("one", 1), ("two", 2)):
            first = machine.server.run(fleet.models["sdxl"].workflow(1, 10, gpus=gpus), timeout=1200)
            row = {"first_image_s": first.seconds, "error": _difference(first.latents[0][1], eager.latents[0][1])}
            row["ms_a_step"] = _ms_a_step(fleet, machine, gpus)
            row["recorded"] = machine.report()["recorded"]
            found[name] = row
        found["fallbacks"] = machine.report()["fallbacks"]
        return found
    finally:
        machine.stop()


def _ms_a_step(fleet: Fleet, machine: Machine, gpus: int) -> float:
    """Return the milliseconds of a step: long runs less short ones, each the middle one of three."""
    seconds = {
        steps: statistics.median(machine.server.run(fleet.workflow("sdxl", steps, gpus=gpus)).seconds for _ in range(3))
        for steps in (10, 50)
    }
    return 1000 * (seconds[50] - seconds[10]) / 40


def _difference(made: bytes, expected: bytes) -> float:
    from safetensors.torch import load

    one, other = (load(content)["latent_tensor"].float() for content in (made, expected))
    return float((one - other).norm() / other.norm())


PARTS: Mapping[str, Callable[[Fleet], Any]] = {
    "cold": cold,
    "leader": leader,
    "throughput": throughput,
    "kills": kills,
    "split": split,
}


# -- the command -----------------------------------------------------------------------------------


def main() -> int:
    """Measure the parts; write JSON. Return 1 if a part failed: the others' figures are kept."""
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # whose time is over ends what it started
    environment = json.loads(_python(_ENVIRONMENT).splitlines()[-1])
    options.gpus = 0 if options.cpu else environment["gpus"]
    options.replicas = options.replicas or options.gpus or 2
    options.steps = options.steps or (3 if options.cpu else 20)
    begun = time.monotonic()
    what = {name: value for name, value in vars(options).items() if name != "output"}
    report: dict[str, Any] = {"what": what, "environment": environment, "ray": False}
    with tempfile.TemporaryDirectory(prefix="fleet-") as name, ThreadPoolExecutor(64) as threads:
        folder = Path(name)
        furnish(folder)
        models = _TINY if options.cpu else _REAL
        families = [model.family for model in models.values()]
        _python(_WEIGHTS, str(folder / "base" / "models" / "diffusion_models"), *families)
        store = (folder / "store").as_uri()
        machines = []
        gateway = GatewayProcess(folder)
        try:
            for number in range(options.replicas):
                gpus = () if options.cpu else (number % options.gpus,)
                machines.append(Machine(folder, number, gpus, store, threads))
            for machine in machines:
                machine.wait()
            fleet = Fleet(options, folder, models, machines, gateway, threads)
            report["started_s"] = time.monotonic() - begun
            for part in options.parts:
                since = time.monotonic()
                try:
                    report[part] = PARTS[part](fleet)
                except Exception as error:
                    report[part] = {"failed": f"{type(error).__name__}: {error}"}
                report.setdefault("seconds", {})[part] = time.monotonic() - since
                print(json.dumps({part: report[part]}), flush=True)
                write(report, options.output)  # what there is, should the time be over
        finally:
            gateway.kill()
            for machine in machines:
                machine.stop()
    report["total_s"] = time.monotonic() - begun
    output = options.output or results_folder() / file_name(report, "fleet")
    write(report, output)
    print(f"{output}, {report['total_s']:.0f} s")
    return int(any("failed" in report[part] for part in options.parts))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=0, help="workers; one for each GPU unless given")
    parser.add_argument("--cpu", action="store_true", help="tiny models on the CPU, to see that it runs")
    parser.add_argument("--seconds", type=float, default=40.0, help="of each number of workers in throughput")
    parser.add_argument("--steps", type=int, default=0, help="of an image; 20, or 3 on the CPU, unless given")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS), help=",".join(PARTS))
    parser.add_argument("--output", help="JSON file to write; DATE-GPU-fleet.json in benchmarks/results unless given")
    options = parser.parse_args()
    if unknown := set(options.parts) - PARTS.keys():
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return options


def _python(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
