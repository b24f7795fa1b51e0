"""One CUDA graph of one call: what it was recorded for, its own copies of what it is given, and its replay."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import torch

from ..engines.base import CompiledGraph, Outputs
from .device_memory import memory_errors
from .recording_pool import DevicePool

_COPIED_AT_ONCE = frozenset(
    (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool)
)
"""PyTorch has such a kernel for these; not for all that there are, as scales of mxfp8."""
_COPIED_ALONE = 1 << 20  # bytes of a tensor; the device's own copying is faster than a kernel for many

Into = Mapping[int, torch.Tensor]
"""Tensors of the caller's that outputs are left in, by the number of the output."""
NOWHERE: Into = MappingProxyType({})
Sizes = tuple[tuple[int, ...], ...]
Name = tuple[Sizes, tuple[int, ...]]
"""The sizes of a call; where weights move, the addresses of those that are at their own places, too."""


@dataclass(frozen=True)
class RecordedCall:
    """A call that is to be recorded.

    Attributes:
        sizes: of the tensors that are no weights.
        addresses: of the weights; where they move, 0 of each that is copied.
        weights: all.
        tensors: what each replay copies: weights that move, then the other inputs.
        likes: what the outputs are like, without memory.
        moves: whether weights may be elsewhere in the next call.
    """

    sizes: Sizes
    addresses: list[int]
    weights: Sequence[torch.Tensor]
    tensors: Sequence[torch.Tensor]
    likes: Outputs = ()
    moves: bool = False

    def with_moving(self, addresses: list[int]) -> RecordedCall:
        """Return this call, of weights that move.

        Args:
            addresses: of them; 0 of each that is copied.
        """
        moving = [weight for weight, address in zip(self.weights, addresses, strict=True) if not address]
        return RecordedCall(self.sizes, addresses, self.weights, [*moving, *self.tensors], moves=True)

    @property
    def asked_at(self) -> list[int]:
        """Return where the weights have to be in another call that is like this one; nothing where they move."""
        return [] if self.moves else self.addresses

    @property
    def name(self) -> Name:
        """Return what a recording of it is found by."""
        return self.sizes, tuple(self.addresses) if self.moves else ()

    @property
    def device(self) -> torch.device:
        return self.tensors[-1].device

    @property
    def copied_bytes(self) -> int:
        """Return how many bytes the copies of inputs and outputs take."""
        return nbytes((*self.tensors, *self.likes))

    def run(self, inner: CompiledGraph, tensors: Sequence[torch.Tensor]) -> Outputs:
        """Return what ``inner`` gives for ``tensors``, in place of the call's own."""
        if not self.moves:
            return inner(self.weights, tensors)
        left = iter(tensors)
        weights = [
            weight if address else next(left) for weight, address in zip(self.weights, self.addresses, strict=True)
        ]
        return inner(weights, list(left))


@dataclass(eq=False)
class Recording:
    """A call's CUDA graph.

    Attributes:
        graph: as PyTorch has it.
        addresses: of the weights that it reads where they were; 0 of others.
        inputs: where it reads what is copied.
        outputs: where it leaves its own.
        shared: the bytes that these are in, and other recordings' too.
        pool: where its memory is from.
        weights_move: some of its weights may be elsewhere in the next call.
        replays: how often it was replayed.
    """

    graph: torch.cuda.CUDAGraph
    addresses: list[int]
    inputs: Copies
    outputs: Outputs
    shared: torch.Tensor
    pool: DevicePool
    weights_move: bool = False
    replays: int = 0

    def replay(
        self, tensors: Sequence[torch.Tensor], confirmed: Callable[[], bool] | None = None, into: Into = NOWHERE
    ) -> Outputs | None:
        """Return the outputs for ``tensors``; None if ``confirmed``, asked once these are in place, says no.

        Args:
            into: where to leave outputs; of others there are copies. If memory runs out nothing was left anywhere.
        """
        with self.pool.replaying():
            self.inputs.fill(tensors)
            if confirmed is not None and not confirmed():
                return None
            self.replays += 1
            with memory_errors():
                self.graph.replay()
            # The next replay overwrites them, and a caller may keep what it is given.
            copies = [None if index in into else _clone(output) for index, output in enumerate(self.outputs)]
            for index, tensor in into.items():  # last, for this cannot lack memory
                copies[index] = tensor.copy_(cast("torch.Tensor", self.outputs[index]))
            return copies


def _clone(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.clone()


def nbytes(tensors: Outputs) -> int:
    """Return how many bytes tensors have together."""
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


class Copies:
    """Tensors of ours that others are copied to, small ones of one dtype at once.

    Seventy functions hold 140 small tensors, each of which would be a launch. Which are copied how is found out once:
    fifty blocks are given ten tensors each, in every step.

    Args:
        tensors: of ours. A text encoder gives None for a layer that nobody asked for.
    """

    def __init__(self, tensors: Outputs) -> None:
        self.tensors = tensors
        self._nothing = [index for index, own in enumerate(tensors) if own is None]
        self._alone: list[tuple[int, torch.Tensor]] = []
        alike: dict[torch.dtype, list[int]] = {}
        for index, own in enumerate(tensors):
            if own is None:
                continue
            if own.dtype not in _COPIED_AT_ONCE or own.nbytes >= _COPIED_ALONE:
                self._alone.append((index, own))
            else:
                alike.setdefault(own.dtype, []).append(index)
        self._alike: list[tuple[list[int], list[Any]]] = [
            (each, [tensors[index] for index in each]) for each in alike.values()
        ]

    def fill(self, tensors: Sequence[Any]) -> None:
        """Copy these, one for each of ours. What is None is so in each call."""
        assert len(tensors) == len(self.tensors) and all(tensors[index] is None for index in self._nothing)
        for index, own in self._alone:
            own.copy_(tensors[index])
        for indices, into in self._alike:
            torch._foreach_copy_(into, [tensors[index] for index in indices])
