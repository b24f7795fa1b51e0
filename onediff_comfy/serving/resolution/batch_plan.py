"""Serving a batch with graphs that exist for other batch sizes: pad and cut, split, join. Lossless.

Samples of a batch do not see each other in a diffusion model, so a batch may be computed in parts,
and a part may be filled up with copies whose results are thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

CALL_OVERHEAD = 0.25
"""What one more call costs, in samples: launching and copying, against one sample's share of the work."""


@dataclass(frozen=True)
class BatchPart:
    """One call: samples ``start`` to ``start + taken`` of the whole, filled up to ``size``."""

    start: int
    taken: int
    size: int


def cost_of_call(size: int) -> float:
    """Return the cost of one call of a graph for ``size`` samples, in samples."""
    return size + CALL_OVERHEAD


def plan(batch: int, sizes: Collection[int], cost: Callable[[int], float] = cost_of_call) -> list[BatchPart]:
    """Return the cheapest calls that together serve a batch; of equally cheap ones, the fewest.

    Args:
        batch: samples to serve.
        sizes: the batch sizes that there are graphs for.
        cost: of one call by its size; not negative.

    Returns:
        Parts in order, largest first; only the last may be filled up.

    Raises:
        ValueError: there are no sizes, or one of the numbers is not positive.
    """
    if batch < 1 or not sizes or min(sizes) < 1:
        raise ValueError(f"no plan for a batch of {batch} from sizes {sorted(sizes)}: all must be at least 1")
    # The best way to serve the last n samples, for each n: cost, number of calls, their sizes.
    best: list[tuple[float, int, tuple[int, ...]]] = [(0.0, 0, ())]
    for left in range(1, batch + 1):
        ways = []
        for size in sorted(sizes, reverse=True):
            rest_cost, calls, rest = best[max(0, left - size)]
            ways.append((cost(size) + rest_cost, calls + 1, (size, *rest)))
        best.append(min(ways, key=lambda way: way[:2]))
    parts: list[BatchPart] = []
    start = 0
    for size in sorted(best[batch][2], reverse=True):
        taken = min(size, batch - start)
        parts.append(BatchPart(start, taken, size))
        start += taken
    return parts


def split_batch(tensors: Sequence[torch.Tensor], batch: int, parts: Sequence[BatchPart]) -> list[list[torch.Tensor]]:
    """Return the tensors of each call.

    Args:
        tensors: each with the batch as axis 0, ``[batch, ...]``. What all samples share does not belong here.
        batch: samples.
        parts: from ``plan``.

    Returns:
        For each part, each tensor's samples, ``[part.size, ...]``; those that fill it up are copies of
        its last sample, values that the model can take for sure.

    Raises:
        ValueError: a tensor's axis 0 is not the batch.
    """
    for tensor in tensors:
        if tensor.ndim == 0 or tensor.shape[0] != batch:
            raise ValueError(f"a tensor of shape {list(tensor.shape)} has no batch of {batch} in axis 0")
    return [[_samples(tensor, part) for tensor in tensors] for part in parts]


def join(outputs: Sequence[Sequence[torch.Tensor]], parts: Sequence[BatchPart]) -> list[torch.Tensor]:
    """Return the whole batch's outputs, without what filled the parts up.

    Args:
        outputs: for each part its output tensors, each ``[part.size, ...]``.
        parts: from ``plan``.

    Returns:
        Each output, ``[batch, ...]``. Of a single part they are views of its outputs.

    Raises:
        ValueError: an output's axis 0 is not its part's size.
    """
    for part, tensors in zip(parts, outputs, strict=True):
        for tensor in tensors:
            if tensor.ndim == 0 or tensor.shape[0] != part.size:
                raise ValueError(f"an output of shape {list(tensor.shape)} is not of a batch of {part.size}")
    cut = [[tensor[: part.taken] for tensor in tensors] for part, tensors in zip(parts, outputs, strict=True)]
    if len(cut) == 1:
        return cut[0]
    return [torch.cat(pieces) for pieces in zip(*cut, strict=True)]


def _samples(tensor: torch.Tensor, part: BatchPart) -> torch.Tensor:
    own = tensor[part.start : part.start + part.taken]
    if part.size == part.taken:
        return own
    return torch.cat([own, own[-1:].expand(part.size - part.taken, *own.shape[1:])])
