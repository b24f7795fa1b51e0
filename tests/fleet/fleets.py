"""A real fleet, started as a person starts it: Ray, the gateway, and two ComfyUIs on the CPU."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from dev.environment import comfyui_path, repository, venv_python
from dev.fleet_environment import ensure
from dev.host import PACK_NAME, HostError
from dev.running_server import RunningServer
from tools.models.checkpoints import checkpoint_file, ensure_checkpoints
from tools.workflows import Workflow, text_to_image

TINY_NODES = repository() / "tests" / "host" / "tiny_nodes"
CHECKPOINTS = ("sd15_min", "sdxl_min")
_CONDITIONING = {
    "sd15_min": {"tokens": 77, "dim": 768, "pooled_dim": 0},
    "sdxl_min": {"tokens": 77, "dim": 2048, "pooled_dim": 1280},
}
_START_S = 600  # of a machine whose cores others use too; 60 alone


def picture(
    seed: int, checkpoint: str = "sd15_min", steps: int = 3, engine: str | None = None, buckets: str | None = None
) -> Workflow:
    """Text to image; without an engine without the pack's nodes: what a fleet does with a prompt is the same."""
    return text_to_image(
        checkpoint_file(checkpoint),
        width=64,
        height=64,
        steps=steps,
        cfg=7.0,
        seed=seed,
        engine=engine,
        buckets=buckets,
        conditioning=_CONDITIONING[checkpoint],
    )


def held(seed: int, go: Path) -> Workflow:
    """Text to image that lasts until a file is there."""
    workflow = picture(seed)
    workflow["held"] = {"class_type": "HeldModel", "inputs": {"model": ["loader", 0], "file": str(go)}}
    workflow["sampler"]["inputs"]["model"] = ["held", 0]
    return workflow


def nothing(text: str) -> Workflow:
    """The least that ComfyUI takes for a workflow."""
    return {
        "text": {"class_type": "PrimitiveString", "inputs": {"value": text}},
        "shown": {"class_type": "PreviewAny", "inputs": {"source": ["text", 0]}},
    }


class Fleet:
    """``python -m onediff_comfy fleet serve`` as a child process; a context manager.

    Attributes:
        folder: what it writes.
        gateway: its address, as a client sees it.
    """

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self.python = ensure()
        self.log = folder / "serve.log"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.gateway = RunningServer(probe.getsockname()[1], folder)
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Fleet:
        base = self.folder / "base"
        (base / "custom_nodes").mkdir(parents=True)
        (base / "models").mkdir()
        for name, path in ((PACK_NAME, repository()), ("tiny_nodes", TINY_NODES)):
            (base / "custom_nodes" / name).symlink_to(path, target_is_directory=True)
        checkpoints = repository() / ".cache" / "checkpoints"
        checkpoints.mkdir(parents=True, exist_ok=True)
        ensure_checkpoints(comfyui_path(), checkpoints, list(CHECKPOINTS))
        (base / "models" / "checkpoints").symlink_to(checkpoints, target_is_directory=True)
        self.start()
        return self

    def start(self) -> None:
        """Start it and wait until its workers are ready."""
        command = [str(self.python), "-m", "onediff_comfy", "fleet", "serve", "--cpu", "--replicas", "2"]
        command += ["--comfyui", str(comfyui_path()), "--python", str(venv_python())]
        command += ["--base", str(self.folder / "base"), "--folder", str(self.folder / "fleet")]
        command += ["--port", str(self.gateway.port), *self._arguments, "--", "--disable-api-nodes"]
        folders = {name: str(self.folder / name.lower()) for name in ("ONEDIFF_CACHE_DIR", "ONEDIFF_CONFIG_DIR")}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, cwd=repository(), env={**os.environ, **folders}, stdout=log, stderr=log
            )
        self.wait_for("two workers that are ready", lambda: len(self.ready()) == 2, _START_S)

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def status(self) -> dict[str, Any]:
        """What ``/fleet/status`` says."""
        return dict(self.gateway.get_json("/fleet/status"))

    def ready(self) -> list[dict[str, Any]]:
        """The workers that take prompts."""
        return [worker for worker in self.status()["workers"] if worker["state"] == "ready"]

    def worker(self, which: Mapping[str, Any]) -> RunningServer:
        """A worker's ComfyUI, without the gateway."""
        return RunningServer(int(which["url"].rpartition(":")[2]), self.folder)

    def kill(self, pid: int) -> None:
        """End one process at once."""
        os.kill(pid, signal.SIGKILL)

    def journal(self, kind: str) -> dict[str, dict[str, Any]]:
        """What the journal has, by prompt id: ``prompts`` or ``results``."""
        folder = self.folder / "fleet" / "journal" / "v1" / kind
        return {path.name: json.loads(path.read_text()) for path in folder.glob("*-*-*-*-*") if "#" not in path.name}

    def wait_for(self, what: str, condition: Callable[[], bool], timeout: float = 60) -> None:
        """Wait until something is so.

        Raises:
            AssertionError: it did not become so; with the end of what the fleet said.
        """
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, HostError):  # the gateway is not there yet, or not at the moment
                if condition():
                    return
            assert self._process is None or self._process.poll() is None, f"the fleet ended:\n{self._said()}"
            time.sleep(0.1)
        raise AssertionError(f"no {what} after {timeout:.0f} s:\n{self._said()}")

    def _said(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """The fleet that the tests of this folder share. Counters only grow, and workers come and go."""
    with Fleet(tmp_path_factory.mktemp("fleet")) as running:
        yield running


def new_id() -> str:
    """A prompt id as a client makes it."""
    return str(uuid.uuid4())
