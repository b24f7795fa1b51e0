"""Which calls of a graph are bound by launching: a GPU waits for a CPU that starts their kernels one by one.

Replaying those through a CUDA graph saves the waiting. A replay of the others saves little and still keeps memory.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

import torch

_NOT_MEASURED = 1  # calls: the first loads kernels
_MEASURED = 3  # calls, of which the fastest counts: a thread that had to wait says nothing of launching
# Of the time on the GPU, for a call that is bound at least in part: most kernels of a decoder are in its first, small
# layers, where the GPU waits for each, and most of its work is in the last. SDXL's, on an H200: 11.5 ms at 512 x 512,
# where a quarter of the work of 1024 x 1024 takes 8.
_BOUND = 1 / 3


@dataclass
class _Times:
    calls: int = 0
    measured: int = 0
    launch: float = float("inf")  # seconds, of the fastest
    run: float = float("inf")

    def add(self, launch: float, run: float) -> None:
        self.measured += 1
        self.launch, self.run = min(self.launch, launch), min(self.run, run)


@dataclass
class Launching:
    """Measures calls without waiting for them. Calls of one kind are alike: of one size, on one device."""

    _times: dict[Hashable, _Times] = field(default_factory=dict)
    _under_way: list[tuple[_Times, float, torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    def bound(self, kind: Hashable) -> bool:
        """Whether calls of this kind are, at least in part; False as long as that is not known."""
        self._read_passed()
        times = self._times.get(kind, _Times())
        return times.measured >= _MEASURED and times.launch > _BOUND * times.run

    @contextlib.contextmanager
    def measured(self, kind: Hashable, device: torch.device) -> Iterator[None]:
        """What runs inside is a call of this kind that launches kernels on a GPU."""
        times = self._times.setdefault(kind, _Times())
        times.calls += 1
        if times.calls <= _NOT_MEASURED or times.calls > _NOT_MEASURED + _MEASURED:
            yield
            return
        stream = torch.cuda.current_stream(device)
        before, behind = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record(stream)
        begun = time.perf_counter()
        yield
        launch = time.perf_counter() - begun
        behind.record(stream)
        self._under_way.append((times, launch, before, behind))

    def _read_passed(self) -> None:
        while self._under_way and self._under_way[0][3].query():
            times, launch, before, behind = self._under_way.pop(0)
            times.add(launch, before.elapsed_time(behind) / 1000)
