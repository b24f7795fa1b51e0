"""How much memory a GPU has left, what the driver says when there is none, and how it gives memory back."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

log = logging.getLogger(__name__)

# Less free memory than this share of a device's, after an image, and recordings go: decoding comes next.
_SPARE_SHARE = 0.15
# Recordings stay where the host can take back so many times their bytes for whatever comes next.
_EVICTABLE_TIMES = 8
# Bytes that a recording may need beside what its call was seen to take: workspaces of cuBLAS, and what lies between.
_MORE = 96 << 20
# Room is asked for once in a thousand calls of each kind of block, which is about an image.
_FIRST_LEFT_OUT, _MOST_LEFT_OUT = 2, 64


@dataclass
class HostMemory:
    """What the host's memory management does where something is allocated.

    ComfyUI's Dynamic VRAM listens to ``cudaMallocAsync``. Where an allocation leaves less than it keeps free, it waits
    for the device, to take weights back. That ends a recording, and what is freed after it ends the process.

    Attributes:
        reserve: returns the bytes of a device that the host keeps free. None if it listens to no allocation.
        held: given a device, a context in which the host takes no weights back there; None if it always may.
        evictable: given a device, returns the bytes of weights there that the host takes back for what is allocated.
    """

    reserve: Callable[[], int | None] = lambda: None
    held: Callable[[torch.device], AbstractContextManager[None]] | None = None
    evictable: Callable[[torch.device], int] = lambda _device: 0
    _told: bool = False
    _stops: int = 0  # how often memory ran out with copies of weights that move
    _left_out: int = 0  # so many times no room is made for such copies

    def may_record(self, device: torch.device, needed: int) -> bool:
        """Return False if the host might have to find memory in the middle of a recording.

        What it goes by may be two seconds old, so it does not help to give back before what PyTorch keeps: there has to
        be enough besides.

        Args:
            needed: bytes that a call takes at most.
        """
        reserve = self.reserve()
        if reserve is None or torch.cuda.mem_get_info(device)[0] >= needed + reserve:
            return True
        return self._refused()

    def holding(self, device: torch.device) -> AbstractContextManager[None]:
        """Return a context in which the host takes no weights off a device, as far as it can be kept from it."""
        return contextlib.nullcontext() if self.held is None else self.held(device)

    def has_room_beside(self, device: torch.device, recorded: int) -> bool:
        """Return True if recordings take little beside what the host can take back there for whatever comes next.

        Args:
            recorded: bytes that they hold.
        """
        return recorded * _EVICTABLE_TIMES <= self.evictable(device)

    def make_room(self, device: torch.device, needed: int) -> bool:
        """Return True if there is memory for a recording of weights that move, so that some can make way for it.

        Args:
            needed: bytes that it takes at most; 0 where it takes what another has taken, and little besides.
        """
        if self._left_out:
            self._left_out -= 1
            return False
        listens = self.reserve() is not None
        if listens and self.held is None:
            return self.may_record(device, needed)
        if needed:
            torch.cuda.empty_cache()  # what calls have used is what recordings of them will use
        needed += _MORE
        if listens and torch.cuda.mem_get_info(device)[0] < needed:
            try:
                torch.empty(needed, dtype=torch.uint8, device=device)  # for which the host takes weights back
            except torch.OutOfMemoryError:
                return self._refused()
            torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(device)[0]
        log.debug("a recording of weights that move may need %d MB, %d MB are free", needed >> 20, free >> 20)
        return bool(free >= needed) or self._refused()

    def stop_copying(self) -> None:
        """Make no room for copies of weights that move for a while: memory ran out. It would soon do so again.

        On an H200 with 16 GiB left it did so ten times in an image. Another program may have taken the memory, and give
        it back. So room is made again after one or two images, and after twice as many each time that memory runs out.
        """
        self._left_out = min(_FIRST_LEFT_OUT << self._stops, _MOST_LEFT_OUT)
        self._stops += 1
        log.warning(
            "OneDiff: there was too little memory for CUDA graphs of blocks whose weights move: in the next images "
            "they are launched kernel by kernel, which can be slower. To have graphs tried again at once, set "
            "cache_budget_mb on OneDiff Model Speedup to another number"
        )

    def copy_again(self) -> None:
        """Make room for copies of weights that move as if memory had never run out."""
        self._stops = self._left_out = 0

    def _refused(self) -> bool:
        if not self._told:
            self._told = True
            log.warning("OneDiff: no CUDA graphs are recorded while memory is short, which can be slower")
        return False


def memory_is_short(device: torch.device, recorded: int = 0) -> bool:
    """Return True if ``device`` has little memory left for whatever comes next. Never of a CPU's.

    Args:
        recorded: bytes that recordings hold there.
    """
    if device.type != "cuda":
        return False
    free, total = torch.cuda.mem_get_info(device)
    # What PyTorch has reserved and not given out is free for the next tensor, the pool of recordings is not.
    return free + max(0, kept_free(device) - recorded) < total * _SPARE_SHARE


def kept_free(device: torch.device) -> int:
    """Return the bytes that PyTorch has of ``device`` and no tensor uses: at least what the last call has used."""
    return max(0, torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


_WANTS_MEMORY = ("out of memory", "alloc_failed", "grow failed")  # the driver; cuBLAS and cuDNN; comfy-aimdo


def wants_memory(error: Exception) -> bool:
    """Return True for an error for want of memory, of PyTorch's or of what is below it."""
    of_runtime = isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _WANTS_MEMORY)
    return of_runtime or isinstance(error, torch.OutOfMemoryError)


@contextlib.contextmanager
def memory_errors() -> Iterator[None]:
    """Raise what the driver and its libraries raise for want of memory as PyTorch's own error for that."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if wants_memory(error):
            raise torch.OutOfMemoryError(str(error)) from error
        raise


def trim_graph_memory(device: torch.device) -> None:
    """Have the driver give back what recordings that are gone have used; only ``cudaMallocAsync`` leaves it that."""
    if torch.cuda.get_allocator_backend() != "cudaMallocAsync":
        return
    try:
        driver = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
        handle = ctypes.c_int()
        error = driver.cuDeviceGet(ctypes.byref(handle), device.index or 0) or driver.cuDeviceGraphMemTrim(handle)
        if error:
            log.debug("the driver did not give back the memory of recordings (error %d)", error)
    except (OSError, AttributeError) as missing:
        log.debug("the driver cannot be asked to give back the memory of recordings: %s", missing)
