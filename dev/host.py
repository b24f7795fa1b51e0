"""A real ComfyUI server with the pack installed, for the demo, the host tests and the benchmarks.

with ComfyServer(comfyui_path(), Path("/tmp/base"), cpu=True) as server:
    result = server.run(text_to_image("sd15_min.safetensors", ...))
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlencode

import aiohttp

from .environment import repository

PACK_NAME = "onediff-comfy"
"""The folder of the pack under custom_nodes, the name that ComfyUI Manager gives it too."""

_LOOPBACK = "127.0.0.1"
_FOLDERS = ("custom_nodes", "models/checkpoints", "input", "output", "temp", "user")
_TEXT_MESSAGE = 3  # BinaryEventTypes.TEXT in ComfyUI's protocol.py
_FILE_LISTS = ("images", "latents")  # the keys under which the host's save nodes list their files
_STOP_SECONDS = 10
_PORTS_TRIED = 3  # the port that is free when a server is started may be somebody's when it binds it, seconds later
_PORT_IN_USE = "already in use"  # of a port, or of an address


class HostError(RuntimeError):
    """The server did not start, died, or stopped answering."""


class _PortTaken(HostError):
    """The server died because somebody else has its port."""


class PromptRejected(HostError):
    """The host's validation refused a workflow.

    Attributes:
        body: the host's JSON answer: ``error`` and ``node_errors``.
    """

    def __init__(self, body: dict[str, Any]) -> None:
        super().__init__(f"ComfyUI rejected the workflow: {json.dumps(body)}")
        self.body = body


@dataclass
class RunResult:
    """What one workflow did.

    Attributes:
        seconds: from handing the workflow in to the host being done with it.
        status: ``success`` or ``error`` as in the host's history; an interrupted run is an ``error``.
        images: (file name, PNG bytes) of each saved image, in the order of the outputs.
        latents: (file name, bytes) of each saved latent (safetensors, tensor ``latent_tensor``).
        outputs: the host's history outputs, by node id.
        events: (type, data) of each JSON message, in order of arrival.
        texts: (node id, text) of each status text shown on a node.
        error: the data of ``execution_error``, if there was one.
        interrupted: whether somebody stopped the run.
    """

    seconds: float = 0.0
    status: str = ""
    images: list[tuple[str, bytes]] = field(default_factory=list)
    latents: list[tuple[str, bytes]] = field(default_factory=list)
    outputs: dict[str, Any] = field(default_factory=dict)
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    texts: list[tuple[str, str]] = field(default_factory=list)
    error: dict[str, Any] | None = None
    interrupted: bool = False


class ComfyServer:
    """ComfyUI's ``main.py`` as a child process on a free loopback port; a context manager.

    Its methods may be called from several threads at once, so that one can interrupt what another runs.

    Args:
        comfy_dir: the folder with ComfyUI's main.py.
        base_dir: models, outputs and custom nodes live here; made if missing, kept afterwards.
        cpu: run on the CPU even where there is a GPU.
        packs: (folder name, path) of further custom-node packs to install.
        args: further command-line arguments for ComfyUI.
        env: environment variables to set on top of this process's; the folders of compiled graphs
            and of the signing key are below ``base_dir`` unless set here.
        log_file: where the server's output goes; ``base_dir/server.log`` unless given.
        python: the interpreter; it must have ComfyUI's requirements.
        install_pack: whether onediff-comfy itself is installed.
    """

    def __init__(
        self,
        comfy_dir: Path,
        base_dir: Path,
        *,
        cpu: bool,
        packs: Sequence[tuple[str, Path]] = (),
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        log_file: Path | None = None,
        python: str = sys.executable,
        install_pack: bool = True,
    ) -> None:
        self.base_dir = base_dir.resolve()
        self.log_file = log_file or self.base_dir / "server.log"
        self.port = 0
        self._comfy_dir = comfy_dir.resolve()
        self._packs = [*([(PACK_NAME, repository())] if install_pack else []), *packs]
        # The host's default attention on the CPU reads free memory, which nothing can capture and
        # which makes results depend on what else runs on the machine.
        self._args = [*(("--cpu", "--use-pytorch-cross-attention") if cpu else ()), *args]
        # Compiled graphs of tests and demos stay apart from those of the person who runs them.
        self._env = {
            "ONEDIFF_CACHE_DIR": str(self.base_dir / "onediff-cache"),
            "ONEDIFF_CONFIG_DIR": str(self.base_dir / "onediff-config"),
            **(env or {}),
        }
        self._python = python
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def checkpoints(self) -> Path:
        """The folder that CheckpointLoaderSimple reads."""
        return self.base_dir / "models" / "checkpoints"

    @property
    def url(self) -> str:
        """``http://host:port`` of the running server."""
        return f"http://{_LOOPBACK}:{self.port}"

    def __enter__(self) -> ComfyServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # -- the process ---------------------------------------------------------------------------

    def start(self, timeout: float = 180) -> None:
        """Start the server and wait until it answers.

        Raises:
            HostError: it died or did not answer in ``timeout`` seconds; has the end of its log.
        """
        for folder in _FOLDERS:
            (self.base_dir / folder).mkdir(parents=True, exist_ok=True)
        for name, path in self._packs:
            _link(self.base_dir / "custom_nodes" / name, path)
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        for tried in range(1, _PORTS_TRIED + 1):
            try:
                self._start_on_a_free_port(timeout)
                return
            except _PortTaken:
                if tried == _PORTS_TRIED:
                    raise

    def _start_on_a_free_port(self, timeout: float) -> None:
        self.port = _free_port()
        command = [self._python, str(self._comfy_dir / "main.py"), "--listen", _LOOPBACK, "--port", str(self.port)]
        command += ["--base-directory", str(self.base_dir), "--database-url", "sqlite:///:memory:"]
        command += ["--disable-api-nodes", *self._args]
        with self.log_file.open("wb") as log:
            self._process = self._spawn(command, log)
        try:
            self._wait_until_it_answers(timeout)
        except BaseException:
            self.stop()
            raise

    def _spawn(self, command: Sequence[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            cwd=self.base_dir,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **self._env},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a process group of its own: compilers it starts go when it goes
        )

    def _wait_until_it_answers(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            self._raise_if_dead()
            try:
                self.get_json("/system_stats")
            except (OSError, http.client.HTTPException, HostError):
                time.sleep(0.2)
            else:
                return
        raise HostError(f"ComfyUI did not answer within {timeout:.0f} s; the end of {self.log_file}:\n{self._tail()}")

    def stop(self) -> None:
        """End the server and everything it started; harmless when it is not running."""
        process, self._process = self._process, None
        if process is None:
            return
        _signal_group(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_SECONDS)
        _signal_group(process, signal.SIGKILL)  # also what outlived its parent in the group
        process.wait()

    def log_text(self) -> str:
        """Everything that the server wrote so far."""
        return self.log_file.read_text(errors="replace")

    def _tail(self, lines: int = 30) -> str:
        return "\n".join(self.log_text().splitlines()[-lines:])

    def _raise_if_dead(self) -> None:
        code = self._process.poll() if self._process else None
        if self._process is None or code is not None:
            kind = _PortTaken if _PORT_IN_USE in self.log_text().lower() else HostError
            raise kind(f"ComfyUI ended (exit status {code}); the end of {self.log_file}:\n{self._tail()}")

    # -- HTTP ----------------------------------------------------------------------------------

    def free(self) -> None:
        """Have the host unload all models and forget all results, before the next prompt runs.

        It does so between two prompts. One that waits already would still be answered from its results, so
        another that needs nothing goes first.
        """
        self.post("/free", {"unload_models": True, "free_memory": True})
        self.run(
            {
                "text": {"class_type": "PrimitiveString", "inputs": {"value": ""}},
                "shown": {"class_type": "PreviewAny", "inputs": {"source": ["text", 0]}},
            }
        )

    def get_json(self, path: str) -> Any:
        """The JSON that ``GET path`` answers.

        Raises:
            HostError: another status than 200.
        """
        return json.loads(self._request("GET", path))

    def post(self, path: str, body: Any = None) -> Any:
        """POST ``body`` as JSON; the JSON of the answer, or None where the answer is empty or is not JSON.

        Raises:
            HostError: another status than 200.
        """
        answer = self._request("POST", path, {} if body is None else body)
        try:
            return json.loads(answer)
        except ValueError:
            return None

    def _request(self, method: str, path: str, body: Any = None) -> bytes:
        # http.client and not aiohttp: usable inside a run's on_event too, where an event loop runs already.
        connection = http.client.HTTPConnection(_LOOPBACK, self.port, timeout=60)
        try:
            sent = None if body is None else json.dumps(body)
            connection.request(method, path, sent, {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = response.read()
        finally:
            connection.close()
        if response.status != 200:
            raise HostError(f"{method} {path} answered {response.status}: {answer[:500]!r}")
        return answer

    # -- workflows -----------------------------------------------------------------------------

    def run(
        self,
        prompt: Mapping[str, Any],
        timeout: float = 600,
        on_event: Callable[[str, dict[str, Any]], None] | None = None,
    ) -> RunResult:
        """Run a workflow (API format) and wait for its end, however it ends.

        Args:
            prompt: the workflow.
            timeout: seconds without any message after which the server counts as hung.
            on_event: called with the type and data of each JSON message as it arrives; may call ``post``.

        Raises:
            PromptRejected: the host's validation refused the workflow.
            HostError: the server died or hung.
        """
        return asyncio.run(self._run(prompt, timeout, on_event))

    async def _run(
        self,
        prompt: Mapping[str, Any],
        timeout: float,
        on_event: Callable[[str, dict[str, Any]], None] | None,
    ) -> RunResult:
        client = uuid.uuid4().hex
        result = RunResult()
        # Listen before handing in, or the first messages are missed.
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(f"{self.url}/ws?clientId={client}", max_msg_size=0) as socket_,
        ):
            start = time.monotonic()
            async with session.post(f"{self.url}/prompt", json={"prompt": prompt, "client_id": client}) as response:
                body = await response.json()
                if response.status != 200:
                    raise PromptRejected(body)
            prompt_id = body["prompt_id"]
            # The last message about a prompt, after failures too. execution_success comes before
            # the history is written; asking for it then is a race.
            while not await self._next_is_last(socket_, prompt_id, timeout, result, on_event):
                pass
            result.seconds = time.monotonic() - start
            async with session.get(f"{self.url}/history/{prompt_id}") as response:
                history = (await response.json())[prompt_id]
        result.status = history["status"]["status_str"]
        result.outputs = history["outputs"]
        for output in result.outputs.values():
            for kind in _FILE_LISTS:
                for saved in output.get(kind, ()):
                    data = self._request("GET", f"/view?{urlencode(saved)}")
                    getattr(result, kind).append((saved["filename"], data))
        return result

    async def _next_is_last(
        self,
        socket_: Any,  # aiohttp.ClientWebSocketResponse, generic or not depending on aiohttp's version
        prompt_id: str,
        timeout: float,
        result: RunResult,
        on_event: Callable[[str, dict[str, Any]], None] | None,
    ) -> bool:
        """Take in one message; True when it says that the host is done with the prompt."""
        try:
            message = await asyncio.wait_for(socket_.receive(), timeout)
        except asyncio.TimeoutError as error:
            raise HostError(f"no message from ComfyUI for {timeout:.0f} s; its last words:\n{self._tail()}") from error
        if message.type == aiohttp.WSMsgType.BINARY:
            text = _progress_text(message.data)
            if text is not None:
                result.texts.append(text)
            return False
        if message.type != aiohttp.WSMsgType.TEXT:
            # The connection goes a moment before the process does.
            if self._process is not None:
                await asyncio.sleep(0.5)
            self._raise_if_dead()
            raise HostError(f"ComfyUI closed the connection; the end of {self.log_file}:\n{self._tail()}")
        event = json.loads(message.data)
        kind, data = event["type"], event["data"]
        result.events.append((kind, data))
        if on_event is not None:
            on_event(kind, data)
        if data.get("prompt_id") != prompt_id:
            return False
        if kind == "execution_error":
            result.error = data
        elif kind == "execution_interrupted":
            result.interrupted = True
        return bool(kind == "executing" and data.get("node") is None)


def _progress_text(data: bytes) -> tuple[str, str] | None:
    """(node id, text) of a binary message, or None if it is of another type.

    The layout is ComfyUI's (server.py, send_progress_text): type, length of the node id, both 4
    bytes big-endian, then the node id and the text.
    """
    kind, length = struct.unpack_from(">II", data)
    if kind != _TEXT_MESSAGE:
        return None
    return data[8 : 8 + length].decode(), data[8 + length :].decode()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_LOOPBACK, 0))
        return int(probe.getsockname()[1])


def _link(link: Path, target: Path) -> None:
    """Make ``link`` a symbolic link to ``target``, replacing an older link."""
    if link.is_symlink():
        link.unlink()
    link.symlink_to(target.resolve(), target_is_directory=True)


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # gone already
        os.killpg(process.pid, number)
