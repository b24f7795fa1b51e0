"""Numbers of few bits with a scale, in operators that a compiler fuses with what is around them.

Libraries round to 8 bits and back by kernels of their own, to which a compiler has to hand everything in memory.
Written in plain operators, rounding is done by the kernel that computes what is rounded: a norm, an activation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, GraphModule, Node

from ..shape_range import always_contiguous
from .op_substitutions import composite

aten = torch.ops.aten
_ADA = (8, 9)  # Triton has 8-bit floating point from here on
_TENSORWISE = 0  # of torch.nn.functional.ScalingType
_NOT_GIVEN: Sequence[Any] = (
    None,
    None,
    (),
    False,
)  # what _scaled_mm_v2 takes for bias, dtype, contracted dimensions, accumulation


def fuses_fp8(device: torch.device) -> bool:
    """Return True if Inductor's kernels for ``device`` can read and write 8-bit floating point."""
    if device.type == "cuda" and torch.version.hip is None:
        return torch.cuda.get_device_capability(device) >= _ADA
    return device.type == "cpu"


def quantize_fp8(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``values / scale`` in 8 bits, computed in float32; beyond the largest number it is the largest.

    Args:
        values: of any shape.
        scale: one number in float32.
        dtype: float8_e4m3fn or float8_e5m2.
    """
    rounded: torch.Tensor = _quantize()(values, scale, dtype)
    return rounded


def dequantize_fp8(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``values * scale`` in ``dtype``, computed in float32; ``values`` are in 8 bits and ``scale`` is one number."""
    return (values.float() * scale).to(dtype)


def _quantize() -> Any:
    return composite("quantize_fp8(Tensor values, Tensor scale, ScalarType dtype) -> Tensor", _quantized)


def _quantized(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    largest = torch.finfo(dtype).max
    return (values.float() / scale).clamp(-largest, largest).to(dtype)


def scaled_mm(left: torch.Tensor, right: torch.Tensor, *scaling: Any) -> torch.Tensor:
    """``torch._scaled_mm_v2``; by the older function where each matrix has one scale, for Inductor knows that one.

    Args:
        left: [rows, inner] of few bits.
        right: [inner, columns] of few bits.
        scaling: the rest, as ``torch.nn.functional.scaled_mm`` hands it over: scales, recipes and swizzles of either
            matrix, bias, dtype of the output, contracted dimensions, and how sums are accumulated.
    """
    left_scales, left_recipes, left_swizzles, right_scales, right_recipes, right_swizzles, *rest = scaling
    given: list[Any] = [*rest, *_NOT_GIVEN[len(rest) :]]
    bias, dtype, contracted, fast = given
    whole = [_TENSORWISE] == list(left_recipes) == list(right_recipes)
    plain = not any(left_swizzles) and not any(right_swizzles) and not len(contracted)
    if not whole or not plain or dtype not in (torch.bfloat16, torch.float16):
        return torch._scaled_mm_v2(left, right, *scaling)
    return torch._scaled_mm(
        left,
        right,
        scale_a=left_scales[0],
        scale_b=right_scales[0],
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=fast,
    )


def quantize_before_flattening(graph: GraphModule) -> GraphModule:
    """``graph`` with values rounded as they lie, and flattened afterwards; itself where there are none.

    A library rounds the rows that it multiplies: [batch · tokens, channels]. A kernel that computes a tensor of [batch,
    tokens, channels] as such rows divides by tokens for every element, in 64 bits where tokens are a sum of symbols.
    In either order the values and their memory are the same.

    Args:
        graph: functional, with fake tensors under ``val`` as ``torch.export`` leaves them.
    """
    found = {node for node in graph.graph.nodes if _rounds_flattened(node)}
    if not found:
        return graph
    rewritten, copies = Graph(), dict[Node, Node]()
    for node in graph.graph.nodes:
        if node not in found:
            copies[node] = rewritten.node_copy(node, copies.__getitem__)
            continue
        flat, scale, dtype = node.args
        source = flat.args[0]
        rounded = rewritten.call_function(node.target, (copies[source], copies[scale], dtype))
        rounded.meta = {"val": torch.empty_like(source.meta["val"], dtype=dtype)}
        copies[node] = rewritten.call_function(flat.target, (rounded, *_copied(flat.args[1:], copies)))
        copies[node].meta = dict(node.meta)
    rewritten.eliminate_dead_code()
    rewritten.lint()
    return GraphModule(graph, rewritten)


def _rounds_flattened(node: Node) -> bool:
    if node.op != "call_function" or node.target is not _quantize().default:
        return False
    flat = node.args[0]
    if not isinstance(flat, Node) or flat.target not in (aten.view.default, aten.reshape.default):
        return False
    source = flat.args[0]
    return isinstance(source, Node) and always_contiguous(source.meta["val"])


def _copied(args: Any, copies: dict[Node, Node]) -> Any:
    return torch.fx.node.map_arg(args, copies.__getitem__)


def leave_fp8_to_eager(graph: GraphModule) -> GraphModule:
    """``graph`` with 8-bit numbers read by operators that a compiler has no kernels for; itself where there are none.

    Before compute capability 8.9 Triton compiles nothing that reads or writes them, and PyTorch's own kernels do both.

    Args:
        graph: functional, with fake tensors under ``val`` as ``torch.export`` leaves them.
    """
    found = {node: operator for node in graph.graph.nodes if (operator := _eager_form(node)) is not None}
    if not found:
        return graph
    rewritten, copies = Graph(), dict[Node, Node]()
    for node in graph.graph.nodes:
        if node not in found:
            copies[node] = rewritten.node_copy(node, copies.__getitem__)
            continue
        read, args = found[node]
        copies[node] = rewritten.call_function(read, _copied(args, copies))
        copies[node].meta = dict(node.meta)
    rewritten.lint()
    return GraphModule(graph, rewritten)


def _eager_form(node: Node) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]] | None:
    """The operator that does what a node does that reads 8-bit numbers, and its arguments."""
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


_FP8 = {torch.float8_e4m3fn, torch.float8_e5m2}
_CASTS = (aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten._to_copy.default, aten.type_as.default)


@functools.cache
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


@functools.cache
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
