"""Model how long steps take where weights are brought block by block, by the order in which they have their places.

    python -m benchmarks.block_order --output FILE

No GPU, no host's code: two streams bring weights over one bus, each into a buffer of its own, which it fills again once
the block that reads it is computed. So the next block's weights come while one is computed, and no more. A block with
more to bring than one takes to compute holds the device up, and one with less leaves the bus idle.

For each model and each share of its weights that stay, a step is compared with the larger of computing and copying, at
several speeds of computing. What OneDiff does is asked of ``page_order.py``; the smallest or the largest layers of each
block first are what it did before.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .files import Report, write

Blocks = Sequence[Sequence[int]]
"""Of each block the bytes of its layers."""

_BUS = 55e9  # bytes a second, an H200's
_STREAMS = 2  # the host's
_STEPS = 3  # of which the last counts
_SHARES = [0.30 + 0.02 * step for step in range(35)]  # of the weights that stay
_COMPUTING = (0.15, 0.25, 0.35, 0.5)  # of the time to bring all weights
_LATE = 1.03


def _flux(doubles: int, singles: int, bits: int, modulated: bool = True) -> Blocks:
    """Return blocks of Flux' widths; what modulates has 16 bits a weight, and Chroma's blocks have none."""
    unit, many = 3072 * 3072, bits // 8
    stream = [6 * unit * 2] * modulated + [part * unit * many for part in (3, 1, 4, 4)]
    single = [7 * unit * many, 5 * unit * many, *[3 * unit * 2] * modulated]
    return [[*stream, *stream]] * doubles + [single] * singles


MODELS: dict[str, Blocks] = {
    "flux-fp8": _flux(19, 38, 8),
    "flux-bf16": _flux(19, 38, 16),
    "hunyuan-bf16": _flux(20, 40, 16),
    "chroma-fp8": _flux(19, 38, 8, modulated=False),
    "sd3-bf16": [[part * 2432**2 * 2 for part in (6, 3, 1, 4, 4)] * 2] * 38,
    "wan-fp8": [[5120 * 5120] * 8 + [5120 * 13824] * 2] * 40,
}


def main() -> int:
    """Print a line for each model and order, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", help="JSON file to write")
    options = parser.parse_args()
    report: Report = {"bytes_per_second": _BUS, "shares": _SHARES, "computing": _COMPUTING, "models": {}}
    for model, blocks in MODELS.items():
        for name, order in ORDERS.items():
            found = compared(blocks, order(blocks))
            report["models"].setdefault(model, {})[name] = found
            print(f"{model:13} {name:15}", *(f"{what} {value:7.3f}" for what, value in found.items()), flush=True)
    write(report, options.output)
    return 0


Order = Sequence[tuple[int, int]]
"""Of each layer its block and its bytes: the first stays the longest."""


def compared(blocks: Blocks, order: Order) -> dict[str, float]:
    """Return how much longer steps are than the larger of computing and copying, and how many layers are brought."""
    total, over, layers = sum(map(sum, blocks)), list[float](), list[int]()
    for share in _SHARES:
        missing, brought = left_out(order, len(blocks), share * total)
        layers.append(brought)
        for part in _COMPUTING:
            computing = part * total / _BUS
            over.append(step_seconds(missing, computing / len(blocks)) / max(computing, sum(missing) / _BUS) - 1)
    return {
        "mean_over": statistics.fmean(over),
        "most_over": max(over),
        "late": sum(each > _LATE - 1 for each in over) / len(over),
        "layers": statistics.fmean(layers),
    }


def left_out(order: Order, blocks: int, kept: float) -> tuple[list[int], int]:
    """Return the bytes of each block that are not among an order's first ``kept``, and of how many layers they are."""
    missing, brought, end = [0] * blocks, 0, 0
    for block, size in order:
        end += size
        if end > kept:
            missing[block] += size
            brought += 1
    return missing, brought


def step_seconds(missing: Sequence[int], computing: float) -> float:
    """Return how long a step takes in the long run.

    Args:
        missing: bytes that are brought for each block.
        computing: seconds for each block.
    """
    ends, copied = [0.0] * _STREAMS, 0.0  # when each block is computed, and the last copy is made
    for nbytes in itertools.chain.from_iterable([missing] * _STEPS):
        copied = max(copied, ends[-_STREAMS]) + nbytes / _BUS
        ends.append(max(ends[-1], copied if nbytes else 0.0) + computing)
    return ends[-1] - ends[-1 - len(missing)]


def ours(blocks: Blocks) -> Order:
    """Return the order that ``page_order.py`` gives."""
    from onediff_comfy.host.weights.page_order import spread_over_blocks

    model = _Model(blocks)
    assert spread_over_blocks(model, model.blocks)
    places = [(layer._v[1], index, layer._v[2]) for index, block in enumerate(model.layers) for layer in block]
    return [(block, size) for _, block, size in sorted(places)]


def _by_size(largest_first: bool) -> Callable[[Blocks], Order]:
    def order(blocks: Blocks) -> Order:
        """Return layers so that the block with most left gives one, its smallest or its largest."""
        turns = [index * 0.618034 % 1 for index in range(len(blocks))]
        parts = [sorted(block, reverse=not largest_first) for block in blocks]
        left = [(-sum(part), turn, index) for index, (part, turn) in enumerate(zip(parts, turns, strict=True))]
        heapq.heapify(left)
        found = []
        while left:
            behind, turn, index = heapq.heappop(left)
            size = parts[index].pop()
            found.append((index, size))
            if parts[index]:
                heapq.heappush(left, (behind + size, turn, index))
        return found

    return order


ORDERS = {"ours": ours, "smallest-first": _by_size(False), "largest-first": _by_size(True)}


class _Range:
    """Stands for comfy-aimdo's range of addresses: nothing is there."""

    offset = 0

    def loaded_size(self) -> int:
        return 0

    def get_residency(self) -> list[int]:
        return []


class _Model(torch.nn.Module):
    """Blocks of layers that have no weights, with places one behind the other."""

    def __init__(self, blocks: Blocks) -> None:
        super().__init__()
        self.range, start = _Range(), 0
        self.layers = [[_layer() for _ in block] for block in blocks]
        self.blocks = torch.nn.ModuleList(map(torch.nn.ModuleList, self.layers))
        for layer, size in zip(itertools.chain(*self.layers), itertools.chain(*blocks), strict=True):
            layer._v, start = (self.range, start, size), start + _aligned(size)
        self.range.offset = start


def _layer() -> Any:
    return torch.nn.Identity()


def _aligned(size: int) -> int:
    return -(-size // 512) * 512


if __name__ == "__main__":
    sys.exit(main())
