"""The memory that CUDA graph recordings share: one pool for each device, under one budget.

Recordings of a device are replayed one after another and hand out copies, so each may overwrite what the others left.
A pool is as large as the largest of them needs, and its memory comes back when the last recording is gone.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from .device_memory import HostMemory, memory_is_short, trim_graph_memory
from .recording_turns import RecordingTurns

log = logging.getLogger(__name__)

_ALIGNED = 512  # bytes, as what PyTorch allocates
_MOST_BLOCKS = 64  # of a model, about


class Recorder(Protocol):
    """A graph that makes recordings."""

    def forget_recordings(self) -> None:
        """Throw the recordings away; they are made again when their sizes come again."""

    def reconsider(self) -> None:
        """Forget which sizes were too large to record."""


class Copied:
    """What the last calls whose weights move would have copied. In a step of a model each block has such a call."""

    def __init__(self) -> None:
        self._nbytes = deque[int](maxlen=_MOST_BLOCKS)

    def note(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Note a call that would have copied these."""
        self._nbytes.append(sum(map(_aligned, tensors)))

    @property
    def most(self) -> int:
        """Return the bytes that the largest of the calls would have copied."""
        return max(self._nbytes, default=0)


@dataclass
class DevicePool:
    """The recordings of one device.

    Attributes:
        device: which.
        stream: that all of them are made on: PyTorch reuses memory per stream only.
        handle: of their memory, for PyTorch; None before the first.
        nbytes: that they hold.
        alive: those that are there.
        copied: what calls whose weights move would have copied, had they been replayed.
    """

    device: torch.device
    stream: torch.cuda.Stream
    handle: Any = None
    nbytes: int = 0
    alive: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    copied: Copied = field(default_factory=Copied)
    _turn: threading.RLock = field(default_factory=threading.RLock)
    _replayed_on: torch.cuda.Stream | None = None

    @contextlib.contextmanager
    def replaying(self) -> Iterator[None]:
        """Have one replay launched inside, from its inputs' copies to its outputs'. Other threads and streams wait.

        Recordings share inputs, outputs and memory with one another: those of two threads, or of two streams of one
        thread, would write into each other's pictures.
        """
        with self._turn:
            stream = torch.cuda.current_stream(self.device)
            if self._replayed_on is not None and self._replayed_on != stream:
                stream.wait_stream(self._replayed_on)
            self._replayed_on = stream
            yield

    def buffers(
        self, likes: Sequence[torch.Tensor | None], least: int = 0
    ) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """Return bytes, and in them tensors like these, for what a recording is given and gives.

        All recordings share them, and hold them: each replay fills them anew, and what it gives is copied.

        Args:
            least: bytes to take at least, if any are. What a larger recording takes later is beside them.
        """
        # Threads of other GPUs, which replay too, are in no inference mode as the one that runs prompts is.
        with torch.inference_mode(False):
            dense = [None if like is None else torch.empty_like(like, device="meta") for like in likes]
            sizes = list(map(_aligned, dense))
            held = [recording.shared for recording in self.alive if recording.shared.nbytes >= sum(sizes)]
            shared = held[0] if held else torch.empty(max(least, sum(sizes)), dtype=torch.uint8, device=self.device)
            parts = shared[: sum(sizes)].split(sizes)
            return shared, [
                None if like is None else part[: like.nbytes].view(like.dtype).as_strided(like.shape, like.stride())
                for like, part in zip(dense, parts, strict=True)
            ]

    def renew(self, handle: Any) -> None:
        """Begin anew, with another pool of PyTorch's or none."""
        self.handle, self.nbytes, self.alive = handle, 0, weakref.WeakSet()


def _aligned(tensor: torch.Tensor | None) -> int:
    """Return how many bytes a tensor takes without its gaps, up to where the next one may begin."""
    return 0 if tensor is None else -(-tensor.nbytes // _ALIGNED) * _ALIGNED


class RecordingPool:
    """Owns the memory of all recordings, and how much it may be.

    Args:
        budget: bytes that all devices' pools together may hold right now.
        host: has to find memory for what is allocated.

    Attributes:
        turns: which thread records.
        host: likewise.
    """

    def __init__(self, budget: Callable[[], int], host: HostMemory | None = None) -> None:
        self.turns = RecordingTurns()
        self._lock = threading.RLock()  # one recording at a time
        self._budget, self.host = budget, host or HostMemory()
        self._recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()
        self._owners: weakref.WeakSet[Any] = weakref.WeakSet()
        self._devices: dict[torch.device, DevicePool] = {}
        self._recording = False
        self._owes_release = False
        self._told = -1  # the largest budget that was said to be too small

    @property
    def nbytes(self) -> int:
        """Return the bytes of device memory that recordings hold."""
        return sum(pool.nbytes for pool in list(self._devices.values()))

    def join(self, recorder: Recorder) -> None:
        """Let ``recorder`` record here."""
        with self._lock:  # a graph is loaded on one thread while another releases what all of them hold
            self._recorders.add(recorder)

    def on_device(self, device: torch.device) -> DevicePool:
        """Return what the next recording of ``device`` is made in.

        PyTorch ends a pool with its last graph, and refuses to record into one that has ended. So there is a new one
        where no recording is left in the old one.
        """
        pool = self._of(device)
        if pool.handle is None or not pool.alive:
            pool.renew(torch.cuda.graph_pool_handle())
        return pool

    def copied(self, device: torch.device) -> Copied:
        """Return what calls whose weights move would have copied on ``device``, had they been replayed."""
        return self._of(device).copied

    def _of(self, device: torch.device) -> DevicePool:
        pool = self._devices.get(device)
        return pool or self._devices.setdefault(device, DevicePool(device, torch.cuda.Stream(device)))

    def add(self, recording: object, device: torch.device, nbytes: int) -> bool:
        """Count a new recording, which took so many bytes more. Return False if that was too much and all are gone."""
        pool = self._devices[device]
        pool.alive.add(recording)
        pool.nbytes += nbytes
        return self.keep_to_budget()

    def budget_changed(self) -> None:
        """Hold to a budget that is another now; what was too large for the old one may be recorded again."""
        self.host.copy_again()
        with self._lock:
            for recorder in list(self._recorders):
                recorder.reconsider()
        self.keep_to_budget()

    def tell_too_large(self, nbytes: int) -> None:
        """Say, once for a budget, that not all recordings are made, which would take ``nbytes`` together."""
        budget = self._budget()
        if budget > self._told:
            self._told = budget
            log.warning(
                "OneDiff: CUDA graph recordings would take %d MB and may take %d MB: some calls are launched kernel by "
                "kernel from now on, which can be slower. To have them replayed, set cache_budget_mb on OneDiff Model "
                "Speedup to a larger number; at 0 it is an eighth of the device's memory",
                nbytes >> 20,
                budget >> 20,
            )

    def keep_to_budget(self) -> bool:
        """Throw everything away if it is more than may be held. Return True if all could stay."""
        if self.nbytes <= self._budget():
            return True
        log.info("OneDiff: CUDA graph recordings held %d MB, more than their budget; recording anew", self.nbytes >> 20)
        with self._lock:
            self._release()
        return False

    def release_if_short(self) -> None:
        """Throw all recordings away where the device has little memory left for whatever comes next."""
        for device, pool in list(self._devices.items()):
            if pool.handle is None or self.host.has_room_beside(device, pool.nbytes):
                continue
            if memory_is_short(device, pool.nbytes):
                log.info("OneDiff: released %d MB of CUDA graph recordings, memory is short", self.release() >> 20)

    def release_with(self, owner: object) -> None:
        """Throw all recordings away when ``owner``, whose weights some of them read, is no more."""
        if owner not in self._owners:
            self._owners.add(owner)
            weakref.finalize(owner, self.release).atexit = False

    @contextlib.contextmanager
    def recording(self, device: torch.device) -> Iterator[None]:
        """Have one recording made and replayed inside, by this thread.

        Whatever asks for a release meanwhile, as a model that dies in a garbage collection, has it afterwards. A model
        may die in a thread that replays: it has its device's turn, and waits for the lock. So who records takes both
        in that order.
        """
        with self._of(device).replaying(), self._lock:
            self._recording = True
            try:
                yield
            finally:
                self._recording = False
                if self._owes_release:
                    self._owes_release = False
                    self._release()

    def release(self, ran_out: bool = False) -> int:
        """Throw all recordings away and give their memory back to the device. Return the bytes that they held.

        Args:
            ran_out: because there was too little memory for a call while they were there. If some of them have copies
                of weights that move, which need the memory themselves, no more of these are made for a while.
        """
        with self._lock:
            pools = list(self._devices.values())
            if ran_out and any(recording.weights_move for pool in pools for recording in pool.alive):
                self.host.stop_copying()
            if self._recording:
                self._owes_release = True
                return 0
            return self._release()

    def _release(self) -> int:
        released = self.nbytes
        self.turns.forget()
        for recorder in list(self._recorders):
            recorder.forget_recordings()
        used = [(device, pool) for device, pool in self._devices.items() if pool.handle is not None]
        for _, pool in used:
            pool.renew(None)
        if released:  # PyTorch keeps a pool that nobody uses until it is told to, and so does the driver
            torch.cuda.empty_cache()
            for device, _ in used:
                trim_graph_memory(device)
        return released
