"""How much memory a GPU has left, what the driver says when there is none, and how it gives memory back."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
from collections.abc import Iterator

import torch

log = logging.getLogger(__name__)

# Less free memory than this share of a device's, after an image, and recordings go: decoding comes next.
_SPARE_SHARE = 0.15


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


@contextlib.contextmanager
def memory_errors() -> Iterator[None]:
    """Raise the driver's own error for want of memory, which a replay may meet too, as PyTorch's."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if "out of memory" in str(error):
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
