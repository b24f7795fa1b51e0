"""Recording what a thread launches as a CUDA graph, so that PyTorch is as before where the recording fails.

Under ``cudaMallocAsync`` it must not fail by a wait for the device: CUDA then refuses to free what was allocated in the
recording, which PyTorch does in a destructor, and the process ends. So whatever waits is known before (see
``capture.tracing.operator_traits``).
"""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections.abc import Iterator
from typing import Any

import torch

from .device_memory import memory_errors
from .recording_pool import DevicePool


@contextlib.contextmanager
def recorded_on(pool: DevicePool) -> Iterator[torch.cuda.CUDAGraph]:
    """Yield a CUDA graph, and record in it what this thread launches inside. It can be replayed after the context.

    Args:
        pool: whose device, stream and memory the recording has.
    """
    device = pool.device
    random_state = torch.cuda.get_rng_state(device)
    torch._C._cuda_clearCublasWorkspaces()  # those of cuBLAS so far, which are not the recording's
    graph = torch.cuda.CUDAGraph()
    pool.stream.wait_stream(torch.cuda.current_stream(device))
    try:
        with memory_errors(), torch.cuda.stream(pool.stream), _without_collections():
            # thread_local: what other threads do (a graph being loaded, an image being encoded) must not end this
            # recording, nor this recording them.
            graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
            try:
                yield graph
            except BaseException as error:
                traceback.clear_frames(error.__traceback__)  # they hold tensors
                raise
            finally:
                # cuBLAS would keep what it allocated while recording, 32 MB, beyond the pool's end.
                torch._C._cuda_clearCublasWorkspaces()
                graph.capture_end()
    except BaseException:
        _tell_allocator(pool)
        _renew_generator(device, random_state)
        raise
    torch.cuda.current_stream(device).wait_stream(pool.stream)
    _renew_workspace(device)


def _tell_allocator(pool: DevicePool) -> None:
    """Tell PyTorch's allocator that a recording which has failed is over.

    PyTorch itself does where CUDA ended it well. The allocator would wait for the end for ever, and ``empty_cache``
    gives nothing back meanwhile.
    """
    with contextlib.suppress(RuntimeError):  # it was told
        torch._C._cuda_endAllocateToPool(pool.device.index or 0, pool.handle)
        torch._C._cuda_releasePool(pool.device.index or 0, pool.handle)


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Have no garbage collected inside: another library's CUDA graph that dies in a recording ends that recording."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _renew_workspace(device: torch.device) -> None:
    """Have cuBLAS take its workspace again now, and not in a forward of the host's, whose allocations it may plan."""
    some = torch.empty((2, 2), device=device)
    torch.addmm(some[0], some, some)


def _renew_generator(device: torch.device, state: Any) -> None:
    """Give the device's random generator a fresh state with the same numbers to come.

    A recording that fails leaves PyTorch's generator believing that it is still being recorded, and
    the next random number that anybody wants there is an error.
    """
    fresh = torch.Generator(device)
    fresh.set_state(state)
    torch.cuda.default_generators[device.index or 0].graphsafe_set_state(fresh)
