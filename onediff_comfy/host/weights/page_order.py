"""The order in which Dynamic VRAM keeps a model's weights: of each block of layers as many bytes have to be brought.

comfy-aimdo gives a model a range of addresses, and takes the weights at its end off the device first. The host puts the
largest layers at its beginning. Of a model that does not fit, some blocks then have hardly any weights there, and
others nearly all. While the first are called the GPU waits for copies, and while the others are called the bus waits
for the GPU, which makes a step as long as both together. Blocks take about as long to compute. So where as many bytes
are brought for each, those of the next block come while one is computed, and what they come to is as small as can be.

This changes where weights are put, and nothing of what they are. The host notes for each layer at which addresses its
weights are (``_v``), and of what it brought there (``_v_signature``): None is the host's own word for nothing.
"""

from __future__ import annotations

import functools
import heapq
import logging
import math
import sys
import types
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch

from ..compatibility import PLACES_WEIGHTS

log = logging.getLogger(__name__)

_ALIGNED = 512  # bytes, as comfy-aimdo's own places
_ALL = 1 << 60  # bytes
_GOLDEN = (math.sqrt(5) - 1) / 2
_CLOSE = 0.3  # of what a part has on average: what is as close is close enough


class _Place(NamedTuple):
    """Where the weights of a layer are, as the host notes it, but that the host's are plain tuples.

    Attributes:
        vbar: the range, an object of comfy-aimdo's.
        start: the first address.
        size: in bytes.
    """

    vbar: Any
    start: int
    size: int


@functools.cache
def can_place() -> bool:
    """Return True if this host has what says where weights are in Dynamic VRAM, as we use it."""
    return all(use.problem() is None for use in PLACES_WEIGHTS)


def places_of(layers: Sequence[Any]) -> range:
    """Return addresses in Dynamic VRAM's range for a model, among them all places of these layers.

    None for no layers, and where a host notes places in another way.
    """
    if not layers or not all(map(_is_place, (layer._v for layer in layers))):
        return range(0)
    return range(min(map(_start, layers)), max(_start(layer) + _size(layer) for layer in layers))


def spread_over_blocks(model: torch.nn.Module, blocks: Iterable[torch.nn.Module]) -> bool:
    """Give the layers of a model in Dynamic VRAM places by which about as many bytes are brought for each block.

    What is there already is taken off the device, to be brought to its new place when it is needed. This is done once
    for a range: a layer that the host places later, behind all others, stays there.

    Args:
        model: the host's model object (a BaseModel), loaded and not being called.
        blocks: of its layers, in the order in which they are called. Layers in none of them come first.

    Returns:
        True if places were given anew.
    """
    layers = _in_range(model)
    if not _may_move(model, layers):
        return False
    parts = _parts(blocks)
    if len(parts) < 2:
        return False
    if _are_held_elsewhere(layers):
        log.info(
            "OneDiff: a model's weights keep ComfyUI's order in Dynamic VRAM, for something else holds on to where they"
            " are. Where they do not all fit, its steps take longer"
        )
        return False
    (vbar,) = {layer._v[0] for layer in layers}
    ordered, places, start = _ordered(layers, parts), list[_Place](), min(map(_start, layers))
    for layer in ordered:
        places.append(_Place(vbar, start, _size(layer)))
        start += _aligned(_size(layer))
    if vbar.loaded_size():
        vbar.free_memory(_ALL)
        vbar.prioritize()
    for layer, place in zip(ordered, places, strict=True):
        layer._v_signature, layer._v = None, place
    log.debug("%d layers of %d blocks have other places in Dynamic VRAM", len(ordered), len(parts))
    return True


def _may_move(model: Any, layers: Sequence[Any]) -> bool:
    """Return True if all layers are in one range as the host has placed them, and nothing holds on to where they are.

    Hosts that record blocks as CUDA graphs keep a block's layers side by side, and note where.
    """
    if not all(type(layer._v) is tuple and _is_place(layer._v) for layer in layers):
        return False  # ours, or a newer host's
    ranges = {id(layer._v[0]) for layer in layers}
    if len(ranges) != 1 or any("_v_block" in vars(each) for each in model.modules()):
        return False
    vbar = layers[0]._v[0]
    if _aligned(vbar.offset) != sum(_aligned(_size(layer)) for layer in layers):
        return False  # the rest is of layers that are elsewhere now, and may come back
    in_use = any(getattr(layer, "_prefetch", None) is not None for layer in layers)
    return not in_use and not any(page & 2 for page in vbar.get_residency())


def _are_held_elsewhere(layers: Iterable[Any]) -> bool:
    """Return True if more than these layers have the notes of where their weights are: a copy of one, which has its.

    Its weights would be brought to where others' are by then. Whoever has it, and wherever Python's collector keeps it
    or does not, Python counts who holds a note.
    """
    held_once = _references(types.SimpleNamespace(_v=(object(),)))  # on releases of Python that count otherwise, too
    return any(_references(layer) > held_once for layer in layers)


def _references(holder: Any) -> int:
    return sys.getrefcount(vars(holder)["_v"])


def _ordered(layers: Sequence[Any], parts: Sequence[Sequence[Any]]) -> list[Any]:
    """Return layers so that wherever the list is cut, the parts have about as many bytes behind the cut.

    Those in no part come first. Then a layer of the part that has the most bytes left, and so on: the smallest without
    which it has about as many left as a part has on average. To bring a layer takes the host about as long whatever it
    weighs, so few large ones are left to be brought. Of parts that are alike, those that are called one after the other
    are far apart.
    """
    found = list(set(layers).difference(chain.from_iterable(parts)))
    found.sort(key=_start)
    left = [(-sum(map(_size, part)), index * _GOLDEN % 1, list(part)) for index, part in enumerate(parts)]
    total = -sum(behind for behind, _, _ in left)
    heapq.heapify(left)
    while left:
        behind, turn, part = heapq.heappop(left)
        layer = _leaves_average(part, -behind, total, len(left) + 1)
        part.remove(layer)
        found.append(layer)
        total -= _size(layer)
        if part:
            heapq.heappush(left, (behind + _size(layer), turn, part))
    return found


def _leaves_average(part: Sequence[Any], own: int, total: int, parts: int) -> Any:
    """Return the layer without which a part is closest to the average; of those that are close enough, the smallest.

    Args:
        own: bytes that it has left.
        total: likewise all parts.
        parts: how many have some left.
    """

    def far(layer: Any) -> tuple[float, int]:
        size = _size(layer)
        average = (total - size) / parts
        return max(0.0, abs(own - size - average) - _CLOSE * average), size

    return min(part, key=far)


def _parts(blocks: Iterable[torch.nn.Module]) -> list[list[Any]]:
    """Return the layers of each block that has some. One that blocks share is the first's."""
    parts, seen = list[list[Any]](), set[Any]()
    for block in blocks:
        part = [layer for layer in _in_range(block) if layer not in seen]
        seen.update(part)
        if part:
            parts.append(part)
    return parts


def _in_range(block: torch.nn.Module) -> list[Any]:
    return [layer for layer in block.modules() if "_v" in vars(layer)]


def _is_place(note: Any) -> bool:
    """Return True for what a layer's ``_v`` is on the hosts that are known: a range, an address, and bytes."""
    return isinstance(note, tuple) and list(map(type, note[1:])) == [int, int]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _start(layer: Any) -> int:
    return int(layer._v[1])


def _size(layer: Any) -> int:
    return int(layer._v[2])
