"""Rounding to 8 bits where values are computed, and what to do where a compiler has no 8-bit kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from ....capture.rewrites.scaled_fp8 import quantize_operator, saturate_operator
from ....capture.shape_range import always_contiguous
from ....once import once
from .rewriting import Copied, Replacement, replace_nodes

aten = torch.ops.aten
_FP8 = {torch.float8_e4m3fn, torch.float8_e5m2}
_CASTS = (aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten._to_copy.default, aten.type_as.default)


def quantize_where_computed(graph: GraphModule) -> GraphModule:
    """Return ``graph`` with values rounded to 8 bits before they are flattened or put together, not after.

    A library rounds the rows that it multiplies: [batch · tokens, channels]. A kernel that computes a tensor of [batch,
    tokens, channels] as such rows divides by tokens for every element, in 64 bits where tokens are a sum of symbols.
    And a kernel that rounds what is put together of several parts computes all parts for every element, and drops all
    but one: Flux' activation beside its attention took 179 microseconds, for which its bytes take 50 (H200).
    In either order the values and their memory are the same, for the scale is one number.
    """
    return replace_nodes(graph, _rounding_moved)


def _rounding_moved(node: Node) -> Replacement | None:
    if node.op != "call_function" or node.target is not quantize_operator().default:
        return None
    flat, scale, dtype = node.args
    assert isinstance(flat, Node) and isinstance(scale, Node) and isinstance(dtype, torch.dtype)
    one = _is_one(scale)
    viewed = flat.target in (aten.view.default, aten.reshape.default)
    source = flat.args[0] if viewed else flat
    if not isinstance(source, Node) or not always_contiguous(source.meta["val"]):
        return None
    parts = source.args[0] if source.target is aten.cat.default and len(source.users) == 1 else None
    if not viewed and parts is None and not one:
        return None

    def replacement(new: Graph, copied: Copied) -> Node:
        def rounded(value: Node) -> Node:
            if one:
                quantised = new.call_function(saturate_operator().default, (copied(value), dtype))
            else:
                quantised = new.call_function(quantize_operator().default, (copied(value), copied(scale), dtype))
            quantised.meta = {"val": torch.empty_like(value.meta["val"], dtype=dtype)}
            return quantised

        if isinstance(parts, (list, tuple)):
            together = new.call_function(aten.cat.default, ([rounded(part) for part in parts], *source.args[1:]))
            together.meta = {"val": torch.empty_like(source.meta["val"], dtype=dtype)}
        else:
            together = rounded(source)
        if not viewed:
            return together
        assert callable(flat.target)
        return new.call_function(flat.target, (together, *map_arg(flat.args[1:], copied)))

    return replacement


def _is_one(scale: Node) -> bool:
    """Return True if a scale is one number, and that is 1, whatever a model's weights are."""
    return scale.target is aten.ones.default and scale.meta["val"].numel() == 1


def share_ones(graph: GraphModule) -> GraphModule:
    """Return ``graph`` with equal tensors of a single 1 made once.

    A product of 8-bit numbers wants its scales in memory. Where a checkpoint has none for what is rounded, each
    layer makes its own: 228 kernels in a step of Flux.
    """
    first: dict[str, Node] = {}

    def find(node: Node) -> Replacement | None:
        if node.target is not aten.ones.default or not _is_one(node):
            return None
        shared = first.setdefault(f"{node.args} {node.kwargs}", node)
        return None if shared is node else lambda _new, copied: copied(shared)

    return replace_nodes(graph, find)


def saturate_by_conversion(graph: GraphModule) -> GraphModule:
    """Return ``graph`` with values rounded to 8 bits without a comparison with the largest number before.

    For devices where ``conversion_saturates``. The comparison, which has to let through what is not a number, took a
    third of the kernel that rounds Flux' activation (H200: 139 microseconds with it, 101 without).
    """
    return replace_nodes(graph, _converted)


def _converted(node: Node) -> Replacement | None:
    divides = node.target is quantize_operator().default
    if not divides and node.target is not saturate_operator().default:
        return None
    values, *scale, dtype = node.args
    assert isinstance(values, Node)

    def replacement(new: Graph, copied: Copied) -> Node:
        exact = new.call_function(aten.to.dtype, (copied(values), torch.float32))
        exact.meta = {"val": torch.empty_like(values.meta["val"], dtype=torch.float32)}
        if divides:
            exact = new.call_function(aten.div.Tensor, (exact, *map_arg(scale, copied)))
            exact.meta = {"val": torch.empty_like(values.meta["val"], dtype=torch.float32)}
        return new.call_function(
            aten._to_copy.default, (exact,), {"dtype": dtype}
        )  # no view, so it may be put in memory

    return replacement


def leave_fp8_to_eager(graph: GraphModule) -> GraphModule:
    """Return ``graph`` with 8-bit numbers read by operators that a compiler has no kernels for.

    Before compute capability 8.9 Triton compiles nothing that reads or writes them, and PyTorch's own kernels do both.
    """
    return replace_nodes(graph, _read_by_eager)


def _read_by_eager(node: Node) -> Replacement | None:
    found = _eager_form(node)
    if found is None:
        return None
    read, args = found
    return lambda new, copied: new.call_function(read, map_arg(args, copied))


def _eager_form(node: Node) -> tuple[Callable[..., torch.Tensor], Any] | None:
    """Return the operator that does what a node does that reads 8-bit numbers, and its arguments."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
        return None
    value, given = node.meta.get("val"), node.args[0].meta.get("val")
    if not (isinstance(value, torch.Tensor) and isinstance(given, torch.Tensor)):
        return None
    if node.target in _CASTS and value.dtype != given.dtype and _FP8 & {value.dtype, given.dtype}:
        return cast_fp8(), (node.args[0], value.dtype)
    if node.target is aten.embedding.default and given.dtype in _FP8:
        return rows_of_fp8(), node.args[:2]
    return None


@once
def cast_fp8() -> Callable[..., torch.Tensor]:
    """The operator ``onediff_comfy::cast_fp8``: a tensor in another dtype, in new memory that lies as the tensor's."""

    @torch.library.custom_op("onediff_comfy::cast_fp8", mutates_args=())
    def cast_fp8(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return values.to(dtype)

    @cast_fp8.register_fake
    def _(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_like(values, dtype=dtype)

    operator: Callable[..., torch.Tensor] = torch.ops.onediff_comfy.cast_fp8.default
    return operator


@once
def rows_of_fp8() -> Callable[..., torch.Tensor]:
    """The operator ``onediff_comfy::rows_of_fp8``: an embedding of 8-bit numbers."""

    @torch.library.custom_op("onediff_comfy::rows_of_fp8", mutates_args=())
    def rows_of_fp8(weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return F.embedding(rows, weight)

    @rows_of_fp8.register_fake
    def _(weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return weight.new_empty((*rows.shape, weight.shape[1]))

    operator: Callable[..., torch.Tensor] = torch.ops.onediff_comfy.rows_of_fp8.default
    return operator
