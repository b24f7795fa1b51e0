"""One CUDA graph of one call: what it was recorded for, its own copies of what it is given, and its replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..engines.base import CompiledGraph, Outputs
from .device_memory import memory_errors
from .recording_pool import DevicePool

_COPIED_AT_ONCE = frozenset(
    (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool)
)
"""PyTorch has such a kernel for these; not for all that there are, as scales of mxfp8."""
_COPIED_ALONE = 1 << 20  # bytes of a tensor; the device's own copying is faster than a kernel for many

Sizes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class RecordedCall:
    """A call that is to be recorded.

    Attributes:
        sizes: of the tensors that are no weights.
        addresses: of the weights that are read where they are.
        weights: these.
        tensors: the other inputs, which each replay copies.
        likes: what the outputs are like, without memory.
        moving: the first so many tensors are weights, too.
    """

    sizes: Sizes
    addresses: list[int]
    weights: Sequence[torch.Tensor]
    tensors: Sequence[torch.Tensor]
    likes: Outputs = ()
    moving: int = 0

    @property
    def device(self) -> torch.device:
        return self.tensors[-1].device

    @property
    def copied_bytes(self) -> int:
        """Return how many bytes the copies of inputs and outputs take."""
        return nbytes((*self.tensors, *self.likes))

    def run(self, inner: CompiledGraph, tensors: Sequence[torch.Tensor]) -> Outputs:
        """Return what ``inner`` gives for ``tensors``, in place of the call's own."""
        return inner([*self.weights, *tensors[: self.moving]], tensors[self.moving :])


@dataclass(eq=False)
class Recording:
    """A call's CUDA graph.

    Attributes:
        graph: as PyTorch has it.
        addresses: of the weights that it reads where they were.
        tensors: where it reads the other inputs.
        outputs: where it leaves its own.
        shared: the bytes that these are in, and other recordings' too.
        pool: where its memory is from.
        copies_weights: among these are weights, which move.
        replays: how often it was replayed.
    """

    graph: torch.cuda.CUDAGraph
    addresses: list[int]
    tensors: list[torch.Tensor]
    outputs: Outputs
    shared: torch.Tensor
    pool: DevicePool
    copies_weights: bool = False
    replays: int = 0

    def replay(self, tensors: Sequence[torch.Tensor], confirmed: Callable[[], bool] | None = None) -> Outputs | None:
        """Return the outputs for ``tensors``; None if ``confirmed``, asked once these are in place, says no."""
        with self.pool.replaying():
            copy(tensors, self.tensors)
            if confirmed is not None and not confirmed():
                return None
            self.replays += 1
            with memory_errors():
                self.graph.replay()
            # The next replay overwrites them, and a caller may keep what it is given.
            return [None if output is None else output.clone() for output in self.outputs]


def nbytes(tensors: Outputs) -> int:
    """Return how many bytes tensors have together."""
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def copy(source: Outputs, destination: Outputs) -> None:
    """Copy tensors, small ones of one dtype at once: seventy functions hold 140, each of which would be a launch.

    A text encoder gives None for a layer that nobody asked for.
    """
    alike: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for given, own in zip(source, destination, strict=True):
        if given is None or own is None:
            assert given is own  # what is None is so in each call
            continue
        if own.dtype not in _COPIED_AT_ONCE or own.nbytes >= _COPIED_ALONE:
            own.copy_(given)
            continue
        into, of = alike.setdefault(own.dtype, ([], []))
        into.append(own)
        of.append(given)
    for into, of in alike.values():
        torch._foreach_copy_(into, of)
