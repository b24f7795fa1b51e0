"""How long calls of compiled graphs take on their device, measured without waiting for it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ..capture.call import Signature

EAGER = "eager"
"""In place of a graph key: the host's own forward, which a new graph is compared with."""


@dataclass
class _Calls:
    """Seconds of calls of one kind."""

    count: int = 0
    total: float = 0.0
    fastest: float = float("inf")
    slowest: float = 0.0
    last: float = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.total += seconds
        self.last = seconds
        self.fastest, self.slowest = min(self.fastest, seconds), max(self.slowest, seconds)


class CallTimes:
    """Seconds that calls took, by graph key, and the fastest of each kind of call. Thread-safe.

    On a GPU a call returns long before its kernels end, so events are put before and behind them and
    read once they have passed.

    Args:
        clock: seconds that only grow; times what does not run on a GPU.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}
        self._calls: dict[tuple[str, Signature], _Calls] = {}
        self._under_way: deque[tuple[str, Signature | None, torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextlib.contextmanager
    def measured(self, key: str, signature: Signature | None, device: torch.device) -> Iterator[None]:
        """Count what runs inside, on ``device``: a call with ``signature`` of the graph ``key``. Not what raises.

        Without a signature it counts for the graph's ``seconds`` alone: a call that leaves out most of the work says
        nothing of how long others take.
        """
        if device.type != "cuda":
            begun = self._clock()
            yield
            with self._lock:
                self._add(key, signature, self._clock() - begun)
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
            calls = self._calls.get((key, signature), _Calls())
            return calls.fastest, calls.count

    def last(self, key: str, signature: Signature) -> float | None:
        """Seconds of the last call with ``signature`` of the graph ``key`` that has ended; None of none."""
        with self._lock:
            self._read_passed()
            calls = self._calls.get((key, signature))
            return None if calls is None else calls.last

    def usual(self, key: str, signature: Signature) -> float | None:
        """Seconds that calls with ``signature`` of the graph ``key`` take on average; None of none.

        Without the slowest, as long as there are others: the first call loads kernels.
        """
        with self._lock:
            self._read_passed()
            calls = self._calls.get((key, signature))
            if calls is None:
                return None
            return calls.total if calls.count == 1 else (calls.total - calls.slowest) / (calls.count - 1)

    def _read_passed(self) -> None:
        while self._under_way and self._under_way[0][3].query():
            key, signature, before, behind = self._under_way.popleft()
            self._add(key, signature, before.elapsed_time(behind) / 1000)

    def _add(self, key: str, signature: Signature | None, seconds: float) -> None:
        self._seconds[key] = self._seconds.get(key, 0.0) + seconds
        if signature is not None:
            self._calls.setdefault((key, signature), _Calls()).add(seconds)
