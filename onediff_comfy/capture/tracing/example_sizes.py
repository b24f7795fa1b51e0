"""Sizes to trace a call with, and which of them are symbols."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ..call import Signature, Structure, TensorSpec
from ..parameters import signature_of
from ..shape_range import IMAGE_AXES, MOST_AXES

_TIMES = (1, 2, 4, 8, 16, 32)  # an image may be as large as another
_SMALLEST_SIDE = 32  # of a latent that stands for all: its deepest level must not shrink to one pixel


def first_tensor(signature: Signature, forward: Callable[..., Any]) -> int | None:
    """Return the place of the first tensor in a forward's first argument: what a model makes an image of."""
    name = next(iter(signature_of(forward).parameters), None)
    return next((_first(child) for key, child in signature.structure[1] if key == name), None)


def _first(structure: Structure) -> int | None:
    kind, parts = structure[0], structure[1:]
    if kind == "tensor":
        return int(parts[0])
    children = [child for _, child in parts[0]] if kind == "dict" else parts[0] if kind in ("list", "tuple") else ()
    return next((found for child in children if (found := _first(child)) is not None), None)


def representative(
    specs: Sequence[TensorSpec], batch: int | None, multiple: int = 1, first: int | None = None
) -> list[tuple[int, ...]]:
    """Sizes to trace with, such that nothing specific to this call gets into the graph.

    A size of one reads as broadcasting, and two equal sides as one: so a batch of one becomes two, and
    square images half as wide again, or two or three times as wide. Small images are enlarged, for a
    side that shrinks to one pixel inside the model reads as broadcasting too. Tracing uses no memory for
    any of it.

    Args:
        specs: the call's tensors.
        batch: which of them has the batch as its first axis.
        multiple: what sides that are multiples of it must stay multiples of; 0 if no tensor is an image.
        first: which of them is the image that is made; None for the first that looks like one.
    """
    single = batch is not None and specs[batch].shape[0] == 1
    if not multiple:
        return [(2, *spec.shape[1:]) if single and _is_of_one(spec.shape) else spec.shape for spec in specs]
    images = _images(specs, first)
    sides = [size for shape in images.values() for size in shape[-2:]]
    scale = max(1, -(-_SMALLEST_SIDE // min(sides, default=_SMALLEST_SIDE)))
    # What is odd stays odd, and what is a multiple stays one: models pad by the remainder.
    if any(size % 2 for size in sides):
        scale, halves = scale | 1, 6
    else:
        halves = 3 if all(size * scale * 3 % (2 * multiple) == 0 for size in sides) else 4
    stretched = [_stretched(spec.shape, scale, halves) if i in images else spec.shape for i, spec in enumerate(specs)]
    return [(2, *sizes[1:]) if single and _is_of_one(sizes) else sizes for sizes in stretched]


def _stretched(sizes: tuple[int, ...], scale: int, halves: int) -> tuple[int, ...]:
    *others, height, width = sizes
    height, width = height * scale, width * scale
    return *others, height, width * halves // 2 if height == width else width


def _is_of_one(sizes: Sequence[int]) -> bool:
    return 0 < len(sizes) <= MOST_AXES and sizes[0] == 1


def _is_image(sizes: Sequence[int]) -> bool:
    return IMAGE_AXES <= len(sizes) <= MOST_AXES and min(sizes[-2:]) > 1


def _images(specs: Sequence[TensorSpec], first: int | None) -> dict[int, tuple[int, ...]]:
    """Return the shapes of a call's images, by their place: of the first, and of all that grow as it does.

    These are what has as many channels, and what is larger or smaller by one factor in both directions. Other tensors
    of as many axes are none: sound is [batch, channels, moments, frequencies], and a prompt of several layers of a text
    encoder [batch, layers, tokens, width]. A model insists on some of their sizes.
    """
    found = {index: tuple(spec.shape) for index, spec in enumerate(specs) if _is_image(spec.shape)}
    if not found:
        return {}
    made = found[first] if first in found else next(iter(found.values()))
    return {i: shape for i, shape in found.items() if shape[1] == made[1] or _is_resized(shape[-2:], made[-2:])}


def _is_resized(sides: Sequence[int], others: Sequence[int]) -> bool:
    """Return True if all sides are 1, 2, 4, ... times as long as others, or the other way round; rounded up."""
    smaller, larger = sorted((tuple(sides), tuple(others)))
    return any(tuple(-(-side // times) for side in larger) == smaller for times in _TIMES)


def foldable(shape: Sequence[int], factor: int) -> bool:
    """Whether a tensor of this shape is an image whose sides are multiples of ``factor``, and more than it."""
    return _is_image(shape) and all(size % factor == 0 and size > factor for size in shape[-2:])


def fold_factors(specs: Sequence[TensorSpec], multiple: int, first: int | None = None) -> dict[int, int]:
    """By what each image of a call is to be folded, if by anything.

    The largest is folded by ``multiple``. What belongs to its deeper levels (of a UNet: what a ControlNet made
    of them) is 2, 4, ... times smaller, and folded by that much less: then all have the same symbols. Otherwise
    one would be given as twice the other, which not every compiler can take. None is where ``multiple`` is 0.
    """
    if not multiple:
        return {}
    images = _images(specs, first)
    largest = max((shape[-2:] for shape in images.values()), key=math.prod, default=())
    factors = {}
    for index, shape in images.items():
        times = {whole // side if whole % side == 0 else 0 for whole, side in zip(largest, shape[-2:], strict=True)}
        level = times.pop() if len(times) == 1 else 0
        factor = multiple // level if level and multiple % level == 0 else multiple
        if factor > 1 and foldable(shape, factor):
            factors[index] = factor
    return factors


def symbolic_axes(ndim: int, folded: bool, images: bool = True) -> tuple[int, ...]:
    """Which axes of an example are to be symbols: all but an image's channels and what it was folded by.

    Of what has more axes than an image all but the last three: pairs of channels, and the rotation of each.
    """
    if ndim > MOST_AXES and not folded:
        return tuple(range(ndim - 3))
    fixed = {1} if images and ndim >= IMAGE_AXES else set()
    if folded:
        fixed |= {ndim - 3, ndim - 1}
    return tuple(axis for axis in range(ndim) if axis not in fixed)
