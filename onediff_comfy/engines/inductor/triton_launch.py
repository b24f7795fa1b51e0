"""Triton kernels launched by address, without which Inductor's code cannot be recorded in ComfyUI's server."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

_ONE_RECORDING = threading.RLock()  # or one that ends would bring back what another has put there


@contextlib.contextmanager
def by_address() -> Iterator[None]:
    """While this thread is inside, it launches Triton kernels with addresses in the place of tensors.

    Whoever launches a Triton kernel, PyTorch or Triton, first asks the driver what lies at each tensor's address. What
    ``cudaMallocAsync`` allocates in a recording lies nowhere until the recording is replayed, and the launch fails with
    "CUDA driver error: invalid argument" or "Pointer argument cannot be accessed from Triton" (state-spaces/mamba#699).
    About an address that is given as a number nobody asks; all launchers take one, and that of PyTorch 2.13 no longer
    asks at all. Each kernel must have been launched before: the first launch chooses among variants, and needs tensors.

    PyTorch's own allocator has nothing of this, and nothing is done.
    """
    if torch.cuda.get_allocator_backend() != "cudaMallocAsync":
        yield
        return
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    recording_thread = threading.get_ident()
    with _ONE_RECORDING:
        launch = CachingAutotuner.run

        def run(kernel: Any, *arguments: Any, **options: Any) -> Any:
            if threading.get_ident() == recording_thread:
                arguments = tuple(_address(argument) for argument in arguments)
            return launch(kernel, *arguments, **options)

        CachingAutotuner.run = run  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            CachingAutotuner.run = launch  # type: ignore[method-assign]


def _address(argument: Any) -> Any:
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument
