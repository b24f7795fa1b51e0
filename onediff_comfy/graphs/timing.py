"""How long calls of compiled graphs take on their device, measured without waiting for it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator

import torch

from ..capture.call import Signature

EAGER = "eager"
"""In place of a graph key: the host's own forward, which a new graph is compared with."""


class RunTimes:
    """Seconds that calls took, by graph key, and the fastest of each kind of call. Thread-safe.

    On a GPU a call returns long before its kernels end, so events are put before and behind them and
    read once they have passed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}
        self._fastest: dict[tuple[str, Signature], tuple[float, int]] = {}
        self._under_way: deque[tuple[str, Signature, torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextlib.contextmanager
    def measured(self, key: str, signature: Signature, device: torch.device) -> Iterator[None]:
        """Count what runs inside, on ``device``: a call with ``signature`` of the graph ``key``. Not what raises."""
        if device.type != "cuda":
            begun = time.perf_counter()
            yield
            with self._lock:
                self._add(key, signature, time.perf_counter() - begun)
            return
        stream = torch.cuda.current_stream(device)
        before, behind = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record(stream)
        yield
        behind.record(stream)
        with self._lock:
            self._under_way.append((key, signature, before, behind))
            self._read_passed()

    def seconds(self) -> dict[str, float]:
        """What each graph's calls took so far; on a GPU, of the calls that have ended."""
        with self._lock:
            self._read_passed()
            return {key: seconds for key, seconds in self._seconds.items() if key != EAGER}

    def fastest(self, key: str, signature: Signature) -> tuple[float, int]:
        """Seconds of the fastest call with ``signature`` of the graph ``key``, and of how many; infinite of none."""
        with self._lock:
            self._read_passed()
            return self._fastest.get((key, signature), (float("inf"), 0))

    def _read_passed(self) -> None:
        while self._under_way and self._under_way[0][3].query():
            key, signature, before, behind = self._under_way.popleft()
            self._add(key, signature, before.elapsed_time(behind) / 1000)

    def _add(self, key: str, signature: Signature, seconds: float) -> None:
        self._seconds[key] = self._seconds.get(key, 0.0) + seconds
        fastest, calls = self._fastest.get((key, signature), (float("inf"), 0))
        self._fastest[key, signature] = (min(fastest, seconds), calls + 1)
