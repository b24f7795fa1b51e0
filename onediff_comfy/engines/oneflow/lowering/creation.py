"""Tensors made out of numbers, and tensors looked up by index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import oneflow as flow
import oneflow.nn.functional as functional
import torch

from ....messages import message
from .table import Table, axis, device_of, dtype_of

aten = torch.ops.aten
TABLE = Table()


@TABLE.lowers(aten.full.default)
def full(
    shape: Sequence[int], value: float, dtype: torch.dtype | None = None, device: Any = None, **_layout: Any
) -> Any:
    default = torch.bool if isinstance(value, bool) else torch.int64 if isinstance(value, int) else torch.float32
    wanted = dtype_of(dtype, default)
    # There is no fill of bool, and none of 0 axes in a graph.
    fillable = flow.int32 if wanted == flow.bool else wanted
    filled = flow.full(tuple(shape) or (1,), value, dtype=fillable, device=device_of(device)).to(wanted)
    return filled if shape else flow.reshape(filled, ())


@TABLE.lowers(aten.zeros.default)
def zeros(shape: Sequence[int], dtype: torch.dtype | None = None, device: Any = None, **_layout: Any) -> Any:
    return full(shape, 0.0, dtype or torch.float32, device)


@TABLE.lowers(aten.ones.default)
def ones(shape: Sequence[int], dtype: torch.dtype | None = None, device: Any = None, **_layout: Any) -> Any:
    return full(shape, 1.0, dtype or torch.float32, device)


@TABLE.lowers(aten.full_like.default)
def full_like(x: Any, value: float, dtype: torch.dtype | None = None, **_options: Any) -> Any:
    return flow.zeros_like(x if dtype is None else x.to(dtype_of(dtype))) + value


@TABLE.lowers(aten.fill.Tensor, aten.fill.Scalar)
def fill(x: Any, value: Any) -> Any:
    return flow.zeros_like(x) + value


@TABLE.lowers(aten.zeros_like.default)
def zeros_like(x: Any, dtype: torch.dtype | None = None, **_options: Any) -> Any:
    return flow.zeros_like(x if dtype is None else x.to(dtype_of(dtype)))


@TABLE.lowers(aten.ones_like.default)
def ones_like(x: Any, dtype: torch.dtype | None = None, **_options: Any) -> Any:
    return flow.ones_like(x if dtype is None else x.to(dtype_of(dtype)))


@TABLE.lowers(aten.new_zeros.default)
def new_zeros(x: Any, shape: Sequence[int], dtype: torch.dtype | None = None, **_options: Any) -> Any:
    return flow.zeros(tuple(shape), dtype=x.dtype if dtype is None else dtype_of(dtype), device=x.device)


@TABLE.lowers(aten.new_ones.default)
def new_ones(x: Any, shape: Sequence[int], dtype: torch.dtype | None = None, **_options: Any) -> Any:
    return flow.ones(tuple(shape), dtype=x.dtype if dtype is None else dtype_of(dtype), device=x.device)


@TABLE.lowers(aten.scalar_tensor.default)
def scalar_tensor(value: float, dtype: torch.dtype | None = None, device: Any = None, **_layout: Any) -> Any:
    return full((), value, dtype, device)


@TABLE.lowers(aten.arange.default)
def arange(end: float, dtype: torch.dtype | None = None, device: Any = None, **_layout: Any) -> Any:
    return arange_step(0, end, 1, dtype, device)


@TABLE.lowers(aten.arange.start)
def arange_start(start: float, end: float, dtype: torch.dtype | None = None, device: Any = None, **_layout: Any) -> Any:
    return arange_step(start, end, 1, dtype, device)


@TABLE.lowers(aten.arange.start_step)
def arange_step(
    start: float, end: float, step: float = 1, dtype: torch.dtype | None = None, device: Any = None, **_layout: Any
) -> Any:
    whole = all(isinstance(number, int) for number in (start, end, step))
    return flow.arange(
        start, end, step, dtype=dtype_of(dtype, torch.int64 if whole else torch.float32), device=device_of(device)
    )


@TABLE.lowers(aten.linspace.default)
def linspace(
    start: float, end: float, steps: int, dtype: torch.dtype | None = None, device: Any = None, **_layout: Any
) -> Any:
    """Counted from both ends towards the middle, as torch does, so that both ends are exact."""
    wanted = dtype_of(dtype)
    if steps == 1:
        return full((1,), float(start), dtype or torch.float32, device)
    step = (end - start) / (steps - 1)
    counted = flow.arange(0, steps, 1, dtype=flow.float32, device=device_of(device))
    upwards, downwards = start + counted * step, end - (steps - 1 - counted) * step
    return flow.where(counted < steps // 2, upwards, downwards).to(wanted)


@TABLE.lowers(aten.embedding.default)
def embedding(weight: Any, indices: Any, *_training: Any) -> Any:
    return functional.embedding(indices, weight)


@TABLE.lowers(aten.index_select.default)
def index_select(x: Any, dim: int, index: Any) -> Any:
    return flow.index_select(x, axis(dim, x), index)


@TABLE.lowers(aten.gather.default)
def gather(x: Any, dim: int, index: Any, sparse_grad: bool = False) -> Any:
    return flow.gather(x, axis(dim, x), index)


@TABLE.lowers(aten.index.Tensor)
def index(x: Any, indices: Sequence[Any]) -> Any:
    named = [(a, index) for a, index in enumerate(indices) if index is not None]
    if len(named) != 1 or named[0][1].dtype == flow.bool:
        raise NotImplementedError(message("indexing by a mask or by more than one tensor"))
    at, wanted = named[0]
    picked = flow.index_select(x, at, flow.reshape(wanted, (-1,)))
    return flow.reshape(picked, (*x.shape[:at], *wanted.shape, *x.shape[at + 1 :]))


@TABLE.lowers(aten.tril.default)
def tril(x: Any, diagonal: int = 0) -> Any:
    return flow.tril(x, diagonal)


@TABLE.lowers(aten.triu.default)
def triu(x: Any, diagonal: int = 0) -> Any:
    return flow.triu(x, diagonal)


@TABLE.lowers(aten.meshgrid.indexing)
def meshgrid(tensors: Sequence[Any], indexing: str = "ij") -> Any:
    if indexing != "ij":
        raise NotImplementedError(message("a grid indexed {indexing}", indexing=indexing))
    sizes = [x.shape[0] for x in tensors]
    ones = [1] * len(sizes)
    return [flow.reshape(x, (*ones[:a], sizes[a], *ones[a + 1 :])).expand(*sizes) for a, x in enumerate(tensors)]
