"""Which calls of a graph are bound by launching: a GPU waits for a CPU that starts their kernels one by one.

Replaying those through a CUDA graph saves the waiting. A replay of the others saves little and still keeps memory.
"""

from __future__ import annotations

import contextlib
import enum
import time
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

_NOT_MEASURED = 1  # calls: the first loads kernels
_MEASURED = 3  # calls, of which the fastest counts: a thread that had to wait says nothing of launching
# Of the time on the GPU, for a call that is bound at least in part: most kernels of a decoder are in its first, small
# layers, where the GPU waits for each, and most of its work is in the last. SDXL's, on an H200: 11.5 ms at 512 x 512,
# where a quarter of the work of 1024 x 1024 takes 8.
_BOUND = 1 / 3

MOST_COPIED = 256 << 20
"""Bytes that the buffers of a recording may take, if only calls that are bound by launching are recorded. What they
gain is a part of their time: a video's piece is given a gigabyte, and gives one."""

_NOT_NOTED = 32  # calls of weights that move: the host reads a file in the first, and pins memory
_NOTED = 96  # calls, the last at most: what else the machine does may hold a CPU up for a step or two
_ENOUGH = 48  # calls
_KEPT = 32  # calls, the last of those before recordings went, so that an image need not show everything anew
_WAITED = 3 / 4  # of those noted
# Of the time since the call before, for a launch that is worth making shorter. Elsewhere the device waits for something
# else: for a file that the host reads in the first step, which is seconds.
_LAUNCHING = 1 / 5
_BEHIND = 2  # calls: while a call is launched the weights of the one before are on their way in any case
_NOTED_OF_ALL = 192  # calls, the last of all blocks: three steps of most models
_PART = 64  # calls of those, about a step
_MOST = 3 / 4  # of a part: where a preview waits for the device behind each step, the CPU is not ahead for some calls
_MOST_MET = 256  # names: of each block with its weights at different places


class RecordWhen(enum.Enum):
    """Which calls are recorded, of those that can be."""

    ALWAYS = enum.auto()
    LAUNCH_BOUND = enum.auto()
    """Those that are bound by launching, at least in part."""


class Backlog:
    """Notes for how many calls the device was behind the CPU, whichever blocks of a model they are of.

    A CPU that is ahead loses nothing by launching slowly: the device is what is waited for, or the bus that brings its
    weights. Neither can be asked by itself. Copies for one call that are still under way when the next one begins say
    nothing of the time that the bus has between them, for it takes the CPU a part of a call to ask for the next.
    """

    def __init__(self) -> None:
        self._begun = deque[torch.Event](maxlen=_BEHIND)  # of the last calls
        self._was_behind = deque[bool](maxlen=_NOTED_OF_ALL)

    def called(self, stream: torch.Stream | None) -> None:
        """Note a call that begins on a stream; None is that of a CPU, which is never behind."""
        self._was_behind.append(len(self._begun) == _BEHIND and not self._begun[0].query())
        if stream is not None:
            self._begun.append(stream.record_event())

    @property
    def is_long(self) -> bool:
        """Return True if the device was behind in most calls of one of the last steps; False as long as they are few.

        In one, and not in all: what holds a CPU up for a step is no reason to record.
        """
        behind = list(self._was_behind)
        parts = [behind[first : first + _PART] for first in range(0, len(behind), _PART)]
        return any(len(part) >= _ENOUGH and sum(part) > _MOST * len(part) for part in parts)


@dataclass(frozen=True)
class MovingWeights:
    """Where a call's weights are, which may be elsewhere in the next, as those of a block of a model that does not fit.

    Attributes:
        kept: addresses that the host has set apart for weights. Each weight that is there has a place of its own, and
            is there in every call for which it need not be copied. Others are wherever there was room.
        device_is_behind: whether the CPU is ahead of the device all the time; see ``Backlog``.
    """

    kept: range = range(0)
    device_is_behind: bool = False

    def fixed(self, addresses: Sequence[int]) -> list[int]:
        """Return addresses of weights, with 0 for each that is not at its own place."""
        return [address if address in self.kept else 0 for address in addresses]


When = RecordWhen | MovingWeights
"""Where weights move, those calls are recorded that the device waits for; see ``Idling``."""


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


@dataclass
class Idling:
    """Notes whether calls wait for the CPU to launch them, where weights move.

    Then launching is a good part of the time between two calls, and the device is not behind. Elsewhere launching
    faster would gain nothing, and what a recording takes of the memory would have to be brought as well.
    """

    _calls: dict[Hashable, int] = field(default_factory=dict)
    _begun: dict[Hashable, float] = field(default_factory=dict)  # of time.perf_counter
    _last: dict[Hashable, deque[bool]] = field(default_factory=dict)

    def waits(self, kind: Hashable) -> bool:
        """Return True if the device waited in most of the last calls of this kind; False as long as they are few."""
        last = self._last.get(kind, ())
        return len(last) >= _ENOUGH and sum(last) >= _WAITED * len(last)

    def start_over(self) -> None:
        """Forget most of what was noted: recordings have gone, and since they were made there may be less memory."""
        self._last = {kind: deque(list(last)[-_KEPT:], maxlen=_NOTED) for kind, last in self._last.items()}

    @contextlib.contextmanager
    def noted(self, kind: Hashable, moving: MovingWeights) -> Iterator[None]:
        """What runs inside is a call of this kind that launches kernels on a GPU."""
        begun = time.perf_counter()
        yield
        launching, since = time.perf_counter() - begun, begun - self._begun.get(kind, begun)
        self._begun[kind] = begun
        calls = self._calls[kind] = self._calls.get(kind, 0) + 1
        if calls > _NOT_NOTED:
            waits = not moving.device_is_behind and launching >= _LAUNCHING * since
            self._last.setdefault(kind, deque(maxlen=_NOTED)).append(waits)


class Worth:
    """Knows whether recordings of a graph's calls are worth their memory, from how calls were launched before."""

    def __init__(self) -> None:
        self._launching, self._idling = Launching(), Idling()
        self._met: OrderedDict[Hashable, None] = OrderedDict()  # the last

    def is_met(self, name: Hashable) -> bool:
        """Return True if this was asked of a name before.

        When an image begins, weights that had made way come back, and for a step they are not where they stay.
        """
        is_met = name in self._met
        self._met[name] = None
        self._met.move_to_end(name)
        while len(self._met) > _MOST_MET:
            self._met.popitem(last=False)
        return is_met

    def recording(self, when: When, kind: Hashable, copied_bytes: int) -> bool:
        """Return True if calls of a kind are to be recorded.

        Args:
            when: which are, of those that can be.
            copied_bytes: of what a replay copies.
        """
        if when is RecordWhen.ALWAYS:
            return True
        if isinstance(when, MovingWeights):
            return self._idling.waits(kind) and not when.device_is_behind
        return copied_bytes <= MOST_COPIED and self._launching.bound(kind)

    def start_over(self) -> None:
        """Have it decided anew whether the device waits: recordings have gone."""
        self._idling.start_over()

    def noted(self, when: When, kind: Hashable, device: torch.device) -> AbstractContextManager[None]:
        """Return a context for a call of this kind that launches kernels on a GPU."""
        if isinstance(when, MovingWeights):
            return self._idling.noted(kind, when)
        return self._launching.measured(kind, device)
