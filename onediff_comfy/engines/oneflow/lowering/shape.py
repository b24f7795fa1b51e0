"""Views, and operators that only move elements."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import oneflow as flow
import oneflow.nn.functional as functional
import torch

from ....messages import message
from .table import Table, axis

aten = torch.ops.aten
TABLE = Table()


@TABLE.lowers(
    aten.alias.default,
    aten.detach.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.lift_fresh_copy.default,
    aten.dropout.default,
)
def same(x: Any, *_anything: Any, **_options: Any) -> Any:
    """Nothing to do: graphs are functional, layouts are OneFlow's own, and there is no training."""
    return x


@TABLE.lowers(aten.view.default, aten.reshape.default, aten._unsafe_view.default)
def reshape(x: Any, shape: Sequence[int]) -> Any:
    return flow.reshape(x, tuple(shape))


@TABLE.lowers(aten.flatten.using_ints)
def flatten(x: Any, start: int = 0, end: int = -1) -> Any:
    if x.ndim == 0:
        return flow.reshape(x, (1,))
    first, last = axis(start, x), axis(end, x)
    return flow.reshape(x, (*x.shape[:first], -1, *x.shape[last + 1 :]))


@TABLE.lowers(aten.unflatten.int)
def unflatten(x: Any, dim: int, sizes: Sequence[int]) -> Any:
    at = axis(dim, x)
    return flow.reshape(x, (*x.shape[:at], *sizes, *x.shape[at + 1 :]))


@TABLE.lowers(aten.permute.default)
def permute(x: Any, axes: Sequence[int]) -> Any:
    return flow.permute(x, tuple(axis(a, x) for a in axes))


@TABLE.lowers(aten.transpose.int)
def transpose(x: Any, a: int, b: int) -> Any:
    return flow.transpose(x, axis(a, x), axis(b, x))


@TABLE.lowers(aten.t.default)
def t(x: Any) -> Any:
    return flow.permute(x, (1, 0)) if x.ndim == 2 else x


@TABLE.lowers(aten.movedim.int)
def movedim(x: Any, source: int, destination: int) -> Any:
    order = [a for a in range(x.ndim) if a != axis(source, x)]
    order.insert(axis(destination, x), axis(source, x))
    return flow.permute(x, tuple(order))


@TABLE.lowers(aten.expand.default)
def expand(x: Any, sizes: Sequence[int], implicit: bool = False) -> Any:
    return x.expand(*sizes)


@TABLE.lowers(aten.unsqueeze.default)
def unsqueeze(x: Any, dim: int) -> Any:
    return flow.unsqueeze(x, dim % (x.ndim + 1))


@TABLE.lowers(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def squeeze(x: Any, axes: Any = None) -> Any:
    named = range(x.ndim) if axes is None else [axis(a, x) for a in ([axes] if isinstance(axes, int) else axes)]
    return flow.reshape(x, tuple(size for a, size in enumerate(x.shape) if a not in named or size != 1))


@TABLE.lowers(aten.cat.default)
def cat(tensors: Sequence[Any], dim: int = 0) -> Any:
    return flow.cat(list(tensors), axis(dim, tensors[0]))


@TABLE.lowers(aten.stack.default)
def stack(tensors: Sequence[Any], dim: int = 0) -> Any:
    return flow.stack(list(tensors), dim % (tensors[0].ndim + 1))


@TABLE.lowers(aten.split.Tensor)
def split(x: Any, size: int, dim: int = 0) -> Any:
    return flow.split(x, size, axis(dim, x))


@TABLE.lowers(aten.split_with_sizes.default)
def split_with_sizes(x: Any, sizes: Sequence[int], dim: int = 0) -> Any:
    return flow.split(x, list(sizes), axis(dim, x))


@TABLE.lowers(aten.chunk.default)
def chunk(x: Any, count: int, dim: int = 0) -> Any:
    length = x.shape[axis(dim, x)]
    return flow.split(x, -(-length // count), axis(dim, x))


@TABLE.lowers(aten.unbind.int)
def unbind(x: Any, dim: int = 0) -> Any:
    return tuple(select(x, dim, index) for index in range(x.shape[axis(dim, x)]))


@TABLE.lowers(operator.getitem)
def getitem(values: Any, index: int) -> Any:
    return values[index]


@TABLE.lowers(aten.select.int)
def select(x: Any, dim: int, index: int) -> Any:
    at = axis(dim, x)
    index %= x.shape[at]
    part = slice_(x, at, index, index + 1)
    return flow.reshape(part, (*x.shape[:at], *x.shape[at + 1 :]))


@TABLE.lowers(aten.slice.Tensor)
def slice_(x: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    at = axis(dim, x)
    first, last, _ = slice(start, end).indices(x.shape[at])
    if (first, last, step) == (0, x.shape[at], 1):
        return x
    return flow.slice(x, [[None, None, None]] * at + [[first, last, step]])


@TABLE.lowers(aten.narrow.default)
def narrow(x: Any, dim: int, start: int, length: int) -> Any:
    return slice_(x, dim, start, start + length)


@TABLE.lowers(aten.copy.default)
def copy(x: Any, source: Any, non_blocking: bool = False) -> Any:
    """``source`` in the place of ``x``: its shape and dtype stay."""
    source = source.to(x.dtype)
    return source if source.shape == x.shape else source.expand(*x.shape)


@TABLE.lowers(aten.slice_scatter.default)
def slice_scatter(
    x: Any, source: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    if step != 1:
        raise NotImplementedError(message("writing to every other element"))
    at = axis(dim, x)
    length = x.shape[at]
    first, last, _ = slice(start, end).indices(length)
    pieces = [slice_(x, at, 0, first)] if first else []
    pieces.append(source.to(x.dtype))
    pieces += [slice_(x, at, last, length)] if last < length else []
    return flow.cat(pieces, at) if len(pieces) > 1 else pieces[0]


@TABLE.lowers(aten.select_scatter.default)
def select_scatter(x: Any, source: Any, dim: int, index: int) -> Any:
    at = axis(dim, x)
    index %= x.shape[at]
    return slice_scatter(x, flow.unsqueeze(source, at), at, index, index + 1)


@TABLE.lowers(aten.repeat.default)
def repeat(x: Any, times: Sequence[int]) -> Any:
    return x.repeat(*times)


@TABLE.lowers(aten.repeat_interleave.self_int)
def repeat_interleave(x: Any, times: int, dim: int | None = None, output_size: int | None = None) -> Any:
    if dim is None:
        x, dim = flow.reshape(x, (-1,)), 0
    at = axis(dim, x)
    wide = flow.unsqueeze(x, at + 1).expand(*x.shape[: at + 1], times, *x.shape[at + 1 :])
    return flow.reshape(wide, (*x.shape[:at], x.shape[at] * times, *x.shape[at + 1 :]))


@TABLE.lowers(aten.flip.default)
def flip(x: Any, axes: Sequence[int]) -> Any:
    return flow.flip(x, [axis(a, x) for a in axes])


@TABLE.lowers(aten.roll.default)
def roll(x: Any, shifts: Sequence[int], axes: Sequence[int] = ()) -> Any:
    if not axes:
        return flow.reshape(roll(flow.reshape(x, (-1,)), shifts, [0]), x.shape)
    for shift, a in zip(shifts, axes, strict=True):
        at = axis(a, x)
        length = x.shape[at]
        cut = (length - shift) % length
        if cut:
            x = flow.cat([slice_(x, at, cut, length), slice_(x, at, 0, cut)], at)
    return x


@TABLE.lowers(aten.constant_pad_nd.default)
def constant_pad(x: Any, amounts: Sequence[int], value: float = 0) -> Any:
    return functional.pad(x, tuple(amounts), mode="constant", value=value)


@TABLE.lowers(aten.pad.default)
def pad(x: Any, amounts: Sequence[int], mode: str = "constant", value: float | None = None) -> Any:
    if mode == "circular":
        return _circular_pad(x, amounts)
    if mode == "constant" and not any(amounts):
        return x
    return functional.pad(x, tuple(amounts), mode=mode, value=value or 0)


def _circular_pad(x: Any, amounts: Sequence[int]) -> Any:
    for position, (before, after) in enumerate(zip(amounts[::2], amounts[1::2], strict=True)):
        at = x.ndim - 1 - position
        length = x.shape[at]
        pieces = [slice_(x, at, length - before, length)] if before else []
        pieces.append(x)
        pieces += [slice_(x, at, 0, after)] if after else []
        x = flow.cat(pieces, at) if len(pieces) > 1 else x
    return x
