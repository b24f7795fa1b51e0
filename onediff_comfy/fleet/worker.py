"""One ComfyUI of a fleet: its folder, its process, its warm-up."""

from __future__ import annotations

import ctypes
import http.client
import json
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from ..warmup_command import NODE as WARM_UP_NODE
from ..warmup_command import WarmupError, read_workflow
from .fleet_options import FleetOptions

log = logging.getLogger(__name__)

_START_S = 600.0
_STOP_S = 10.0
_ASK_S = 30.0
_LOOK_EVERY_S = 0.25
_STANDS_S = 60.0
"""How long prompts may wait while none runs: then the thread that runs them has died, and the server answers on."""
_PARENT_DIED = 1  # PR_SET_PDEATHSIG
# Of the environment that Ray runs in, and not for ComfyUI's interpreter.
_NOT_INHERITED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "OMP_NUM_THREADS")


class WorkerError(RuntimeError):
    """A ComfyUI did not start or has died; the message has the end of its log."""


class Place:
    """A worker's folder, held for as long as this process lives. Whoever starts next takes the first that is free.

    Attributes:
        number: counts the places of a folder from 0.
        folder: ComfyUI's base directory.
    """

    def __init__(self, folder: Path) -> None:
        import fcntl

        folder.mkdir(parents=True, exist_ok=True)
        number = 0
        while True:
            place = folder / f"worker-{number}"
            place.mkdir(exist_ok=True)
            self._lock: IO[bytes] = (place / ".in-use").open("wb")
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # goes when the process does, however it ends
            except BlockingIOError:
                self._lock.close()
                number += 1
                continue
            self.number, self.folder = number, place
            return

    def release(self) -> None:
        """Let another have the place."""
        self._lock.close()


def furnish(place: Path, options: FleetOptions) -> None:
    """Make a worker's base directory: models, custom nodes, inputs and the user's files shared, the rest its own."""
    base = Path(options.base or options.comfyui)
    shared = Path(options.shared or Path(options.folder) / "shared")
    for name in ("input", "user"):
        (shared / name).mkdir(parents=True, exist_ok=True)
        _link(place / name, shared / name)
    for name in ("models", "custom_nodes"):
        _link(place / name, base / name)
    for name in ("output", "temp"):
        (place / name).mkdir(exist_ok=True)


def _link(link: Path, target: Path) -> None:
    if link.is_symlink():
        link.unlink()
    link.symlink_to(target.resolve(), target_is_directory=True)


class Worker:
    """A ComfyUI process.

    Args:
        host: the address that it listens on; the gateway must reach it.
    """

    def __init__(self, options: FleetOptions, host: str) -> None:
        self.place = Place(Path(options.folder) / "workers")
        self.run = uuid.uuid4().hex[:8]
        self.port = _free_port(host)
        self._options, self._host = options, host
        self._log = self.place.folder / "server.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting: list[str] = []
        self._waiting_since = time.monotonic()

    @property
    def url(self) -> str:
        """Return ``http://host:port``."""
        return f"http://{self._host}:{self.port}"

    @property
    def pid(self) -> int | None:
        """Return the process, if it was started."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start ComfyUI and wait until it answers. It is ended when the calling thread ends, however that happens.

        Raises:
            WorkerError: it did not.
        """
        options = self._options
        furnish(self.place.folder, options)
        command = [options.python, str(Path(options.comfyui) / "main.py"), "--listen", self._host]
        command += ["--port", str(self.port), "--base-directory", str(self.place.folder)]
        command += ["--database-url", "sqlite:///:memory:"]  # a file could be opened by one of them alone
        # ComfyUI's usual attention on the CPU reads free memory, which nothing can capture.
        command += ["--cpu", "--use-pytorch-cross-attention"] if options.cpu else []
        command += shlex.split(options.comfyui_args)
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                cwd=self.place.folder,
                env=environment(options, os.environ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            self.check()
            try:
                self._ask("/system_stats")
            except OSError:
                time.sleep(_LOOK_EVERY_S)
            else:
                return
        raise WorkerError(f"ComfyUI did not answer within {_START_S:.0f} s; the end of {self._log}:\n{self._tail()}")

    def check(self) -> None:
        """Make sure that ComfyUI runs.

        Raises:
            WorkerError: it does not.
        """
        status = self._process.poll() if self._process else None
        if self._process is None or status is not None:
            raise WorkerError(f"ComfyUI ended (exit status {status}); the end of {self._log}:\n{self._tail()}")

    def unfinished(self) -> int | None:
        """Return how many prompts run or wait; None if ComfyUI does not answer, or runs none of those that wait."""
        try:
            queue = self._ask("/queue")
            running, waiting = len(queue["queue_running"]), [item[1] for item in queue["queue_pending"]]
        except (OSError, ValueError, LookupError, TypeError):
            return None
        now = time.monotonic()
        if running or waiting != self._waiting or not waiting:
            self._waiting, self._waiting_since = waiting, now
        return None if now - self._waiting_since > _STANDS_S else running + len(waiting)

    def stop(self) -> None:
        """End ComfyUI and give up its place."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.place.release()

    def warm_up(self, say: Callable[[str], None]) -> list[str]:
        """Run each workflow of the warm-up folder: of those with OneDiff Warm Up nodes these, of others all.

        Args:
            say: called with the name of what runs.

        Returns:
            What went wrong, a line for each workflow. The worker serves all the same: what could not be prepared is
            made when it is needed.
        """
        problems = []
        for path in sorted(Path(self._options.warm_up).glob("*.json")) if self._options.warm_up else ():
            say(path.name)
            try:
                problem = self._run_workflow(read_workflow(path))
            except (OSError, WarmupError) as error:
                self.check()
                problem = str(error)
            except (AttributeError, LookupError, TypeError, ValueError) as error:
                self.check()
                problem = f"ComfyUI's answer was not understood ({type(error).__name__}: {error})"
            if problem is not None:
                problems.append(f"{path.name}: {problem}")
                log.warning("warm-up: %s", problems[-1])
        return problems

    def _run_workflow(self, workflow: Mapping[str, Any]) -> str | None:
        """Run a workflow in API form. Return what went wrong, or None."""
        targets = [name for name, node in workflow.items() if node["class_type"] == WARM_UP_NODE]
        body: dict[str, Any] = {"prompt": workflow, **({"partial_execution_targets": targets} if targets else {})}
        prompt_id = self._ask("/prompt", body)["prompt_id"]
        while True:
            self.check()
            entry = self._ask(f"/history/{prompt_id}").get(prompt_id)
            if entry is None:
                time.sleep(_LOOK_EVERY_S)
                continue
            if entry["status"]["status_str"] == "success":
                return None
            told = [data for name, data in entry["status"]["messages"] if name == "execution_error"]
            return str(told[0]["exception_message"]).strip() if told else "it was stopped"

    def _ask(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=_ASK_S) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            raise OSError(f"ComfyUI answered {error.code}: {error.read()[:500].decode(errors='replace')}") from error
        except (http.client.HTTPException, RecursionError) as error:
            raise OSError(f"ComfyUI's answer cannot be read ({error})") from error

    def _tail(self, lines: int = 20) -> str:
        try:
            return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])
        except OSError:
            return ""


def environment(options: FleetOptions, around: Mapping[str, str]) -> dict[str, str]:
    """Return a worker's environment variables.

    Args:
        around: those of the process that starts it. Ray names the GPU in them.
    """
    kept = {name: value for name, value in around.items() if name not in _NOT_INHERITED}
    stores = {"ONEDIFF_STORE_URL": options.store, "ONEDIFF_STORE_ROLE": options.store_role}
    return {**kept, "PYTHONUNBUFFERED": "1", **options.environment, **{k: v for k, v in stores.items() if v}}


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PARENT_DIED, signal.SIGKILL)


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
