"""Compilation in another process, while images are made without it.

The other process gets a job: the module without weights, the call's signature, and what compiles it.
It captures, compiles and leaves the graph in the store, where this process finds it. Capturing here
would take the interpreter for seconds, and tracing swaps a module's weights while it is in use.

One process works at a time. It ends with this one, and a job that was cut off is simply begun again. A process that
dies by itself (memory was short, somebody ended it) is given one more try. If that dies too, its outcome says so: no
graph was refused, and the same job may succeed another time.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..capture.call import Call, Signature, TensorSpec
from ..environment import environment
from ..messages import Message, message

log = logging.getLogger(__name__)

_TRIES = 2


@dataclass(frozen=True)
class Job:
    """What another process needs to make one graph; plain data, whatever name this package has there.

    Attributes:
        module: the target without weights (``weightless_pickle.to_bytes``).
        forward: name of the method of the module's that is called.
        on_copies: it is called with copies of its tensors.
        fingerprint: of the target, to be sure that the other process sees the same code.
        signature: of the call, as nested plain values.
        compiler: what compiles it, with everything that decides about its code (``CompilerFingerprint`` as a dict).
        device: where the target computes.
        general: whether a graph for all sizes is wanted.
        settings: of the host and of torch, for the other process to take over.
    """

    module: bytes
    forward: str
    on_copies: bool
    fingerprint: str
    signature: Mapping[str, Any]
    compiler: Mapping[str, Any]
    device: str
    general: bool
    settings: Mapping[str, Any]

    def to_bytes(self) -> bytes:
        return pickle.dumps(asdict(self))

    @classmethod
    def from_bytes(cls, data: bytes) -> Job:
        """Read our own bytes; runs what is in them."""
        return cls(**pickle.loads(data))

    def call(self) -> Call:
        """Return a call of this signature, with tensors of arbitrary values."""
        fields = self.signature
        specs = tuple(
            TensorSpec(tuple(shape), dtype, torch.device(device)) for shape, dtype, device in fields["tensors"]
        )
        signature = Signature(fields["function"], fields["structure"], specs, fields["option_names"])
        return Call(signature, tuple(torch.empty(1, dtype=spec.dtype).expand(spec.shape) for spec in specs))


def signature_fields(signature: Signature) -> dict[str, Any]:
    """Return a signature as the plain values that ``Job.call`` reads."""
    return {
        "function": signature.function,
        "structure": signature.structure,
        "tensors": [(spec.shape, spec.dtype, str(spec.device)) for spec in signature.tensors],
        "option_names": signature.option_names,
    }


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Attributes:
        failure: why there is no graph; None if there is one, or none for all sizes.
        option: an option that the target turned out to read; the job is to be begun again with it.
        graph: the key of the graph that there is for the call; None if none for all sizes takes those of the call.
        died: the process ended before it could say anything of the graph: ``failure`` is about the process alone.
    """

    failure: str | None
    option: str | None = None
    graph: str | None = None
    died: bool = False


class Background:
    """Jobs in other processes, by call key.

    Args:
        module: what the other process runs: ``python -m module JOB RESULT``.
        path: entries for the other process's ``sys.path``.
    """

    def __init__(self, module: str, path: Callable[[], list[str]]) -> None:
        self._module = module
        self._path = path
        self._lock = threading.Lock()
        self._started: dict[str, float] = {}
        self._ended: dict[str, Outcome] = {}
        self._first_image: float | None = None  # when it began
        self._first_image_over = False

    def left_alone(self, seconds: float, reading: bool = False) -> bool:
        """Return True while nothing is to be begun: for the first ``seconds`` of this process's first image.

        The time runs from the first question, whoever asks. So it ends once, however many nodes come and go.

        Args:
            reading: weights are being read from a file. The time does not begin with such a question.
        """
        with self._lock:
            if self._first_image_over:
                return False
            if self._first_image is None:
                if reading:
                    return True
                self._first_image = time.monotonic()
            return time.monotonic() - self._first_image < seconds

    def end_first_image(self) -> None:
        """Leave nothing alone from now on."""
        self._first_image_over = True

    def busy(self) -> bool:
        """Return True if a job is under way."""
        return bool(self._started)

    def seconds(self, key: str) -> float | None:
        """Return for how many seconds the job ``key`` has been under way; None if it is not."""
        start = self._started.get(key)
        return None if start is None else time.monotonic() - start

    def outcome(self, key: str) -> Outcome | None:
        """Return how the job ``key`` ended, once; None if it is under way or was never begun."""
        return self._ended.pop(key, None)

    def start(self, key: str, job: Job) -> bool:
        """Begin a job, unless another is under way, or this one has ended since its outcome was asked for."""
        with self._lock:
            if self._started or key in self._ended:
                return False
            self._started[key] = time.monotonic()
        threading.Thread(target=self._run, args=(key, job), name="onediff-background", daemon=True).start()
        return True

    def _run(self, key: str, job: Job) -> None:
        try:
            outcome = self._outcome_of(job)
        except Exception as error:
            log.debug("background compilation failed", exc_info=True)
            outcome = Outcome(f"{type(error).__name__}: {error}")
        with self._lock:
            self._ended[key] = outcome
            del self._started[key]

    def _outcome_of(self, job: Job) -> Outcome:
        with tempfile.TemporaryDirectory(prefix="onediff-") as folder:
            work, result, errors = Path(folder, "job"), Path(folder, "result"), Path(folder, "errors")
            work.write_bytes(job.to_bytes())
            variables = {**environment().copy(), "PYTHONPATH": os.pathsep.join(self._path())}
            command = [sys.executable, "-m", self._module, str(work), str(result), str(os.getpid())]
            for tries_left in reversed(range(_TRIES)):
                with errors.open("wb") as output:
                    done = subprocess.run(
                        command, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False
                    )
                said = errors.read_text(errors="replace").strip()
                log.debug("background compilation said:\n%s", said)
                # What cannot be read was left by a process that died in the middle of it.
                with contextlib.suppress(OSError, ValueError, TypeError):
                    return Outcome(**json.loads(result.read_text()))
                failure = _how_it_ended(done.returncode, said)
                log.warning("OneDiff: %s%s", failure, "; it is started once more" if tries_left else "")
            return Outcome(failure, died=True)


def _how_it_ended(status: int, said: str) -> Message:
    """Return what became of a compiling process that left no result, for people.

    Args:
        status: as of ``subprocess``: negative where a signal ended it.
        said: all that it printed.
    """
    last = said.splitlines()[-1] if said else message("it said nothing")
    if status >= 0:
        return message("the compiling process ended with status {status} ({last})", status=status, last=last)
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = str(-status)
    if name == "SIGKILL":
        return message("the compiling process was killed, as happens when memory is short ({last})", last=last)
    return message("the compiling process was ended by signal {name} ({last})", name=name, last=last)
