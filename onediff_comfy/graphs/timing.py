"""How long calls of compiled graphs take on their device, measured without waiting for it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator

import torch


class RunTimes:
    """Seconds that calls took, by graph key. Thread-safe.

    On a GPU a call returns long before its kernels end, so events are put before and behind them and
    read once they have passed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}
        self._under_way: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextlib.contextmanager
    def measured(self, key: str, device: torch.device) -> Iterator[None]:
        """Count what runs inside, on ``device``, for the graph ``key``; not what raises."""
        if device.type != "cuda":
            begun = time.perf_counter()
            yield
            with self._lock:
                self._add(key, time.perf_counter() - begun)
            return
        stream = torch.cuda.current_stream(device)
        before, behind = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record(stream)
        yield
        behind.record(stream)
        with self._lock:
            self._under_way.append((key, before, behind))
            self._read_passed()

    def seconds(self) -> dict[str, float]:
        """What each graph's calls took so far; on a GPU, of the calls that have ended."""
        with self._lock:
            self._read_passed()
            return dict(self._seconds)

    def _read_passed(self) -> None:
        while self._under_way and self._under_way[0][2].query():
            key, before, behind = self._under_way.popleft()
            self._add(key, before.elapsed_time(behind) / 1000)

    def _add(self, key: str, seconds: float) -> None:
        self._seconds[key] = self._seconds.get(key, 0.0) + seconds
