"""The workers and the gateway of benchmarks.fleet: a ComfyUI for each GPU, with folders of its own as a machine has."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dev.environment import comfyui_path, repository
from dev.host import PACK_NAME, HostError
from dev.running_server import RunningServer
from onediff_comfy.fleet.fleet_options import FleetOptions
from onediff_comfy.fleet.worker import Worker
from onediff_comfy.store.signing.key_ring import KeyRing

_SOON_S = 120.0


class Machine:
    """A worker's ComfyUI, which can be killed and started again.

    Args:
        folder: of the whole benchmark.
        number: counts the machines.
        gpus: that it sees, by number; none on the CPU.
        store: the URL of the graphs that all share.
        threads: start processes. A process ends with the thread that started it, so they stay.
    """

    def __init__(self, folder: Path, number: int, gpus: Sequence[int], store: str, threads: ThreadPoolExecutor) -> None:
        self.name, self._threads = f"machine-{number}", threads
        own = folder / self.name
        config = own / "config"
        config.mkdir(parents=True)
        for name in ("store_keys.json", "store_builder.key"):
            shutil.copy2(folder / "keys" / name, config / name)
        environment = {"ONEDIFF_CACHE_DIR": str(own / "cache"), "ONEDIFF_CONFIG_DIR": str(config)}
        environment |= {
            "TORCHINDUCTOR_CACHE_DIR": str(own / "inductor"),
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        }
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
        self._options = FleetOptions(
            str(comfyui_path()),
            sys.executable,
            base=str(folder / "base"),
            folder=str(own),
            shared=str(folder / "shared"),
            store=store,
            store_role="builder",
            cpu=not gpus,
            comfyui_args="--disable-api-nodes",
            environment=environment,
        )
        self._folder = own
        self.start()

    def start(self) -> None:
        """Start it; the first time, or after it was killed."""
        self._worker = Worker(self._options, "127.0.0.1")
        self.server = RunningServer(self._worker.port, self._folder)
        self._starting = self._threads.submit(self._worker.start)

    def wait(self) -> None:
        """Wait until it answers."""
        self._starting.result()

    @property
    def facts(self) -> dict[str, str]:
        """Return what the gateway is told."""
        return {"name": self.name, "run": self._worker.run, "url": self._worker.url}

    @property
    def pid(self) -> int:
        """Return its process."""
        assert self._worker.pid is not None
        return self._worker.pid

    def kill(self) -> None:
        """End it at once."""
        os.kill(self.pid, signal.SIGKILL)
        self._worker.stop()

    def stop(self) -> None:
        """End it."""
        self._worker.stop()

    def report(self) -> dict[str, Any]:
        """Return what it counted."""
        return dict(self.server.get_json("/onediff/report"))


class GatewayProcess:
    """A gateway in a process of its own, which can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.server = RunningServer(port, folder)
        self._workers, self._log = folder / "workers.json", folder / "gateway.log"
        journal = (folder / "journal").as_uri()
        self._command = [sys.executable, "-m", "benchmarks.fleet_gateway", journal, str(port), str(self._workers)]
        self._process: subprocess.Popen[bytes] | None = None

    def serve_by(self, machines: Sequence[Machine]) -> None:
        """Have these machines do the prompts, and no others."""
        beside = self._workers.with_suffix(".new")
        beside.write_text(json.dumps([machine.facts for machine in machines]))
        beside.replace(self._workers)
        if self._process is None:
            self.start()
        wanted = {machine.facts["run"] for machine in machines}
        until(lambda: {worker["run"] for worker in self.status()["workers"]} == wanted, "the gateway knows the workers")

    def start(self) -> None:
        """Start it; the first time, or after it was killed."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, cwd=repository(), stdout=log, stderr=log)

    def status(self) -> Mapping[str, Any]:
        """Return what ``/fleet/status`` says."""
        return dict(self.server.get_json("/fleet/status"))

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def until(condition: Any, what: str, seconds: float = _SOON_S) -> None:
    """Wait until something is so.

    Raises:
        TimeoutError: it did not become so.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if condition():
                return
        except (OSError, HostError):  # it is not there yet
            pass
        time.sleep(0.05)
    raise TimeoutError(f"not in {seconds:.0f} s: {what}")


def furnish(folder: Path) -> None:
    """Make what all machines share: the pack, the node that stands for text encoders, the store's keys."""
    packs = folder / "base" / "custom_nodes"
    packs.mkdir(parents=True)
    for name, path in ((PACK_NAME, repository()), ("tiny_nodes", repository() / "tests" / "host" / "tiny_nodes")):
        (packs / name).symlink_to(path, target_is_directory=True)
    (folder / "base" / "models" / "diffusion_models").mkdir(parents=True)
    KeyRing(folder / "keys").make("the benchmark's")
