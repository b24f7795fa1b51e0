"""Operands of linear layers, written where matrix products read them.

A linear layer of [batch, tokens, channels] is a matrix product of [batch · tokens, channels], which is the same
memory. Inductor knows that of a tensor that is in memory. For one that it has yet to compute it divides rows by tokens
to find each row's place, and where tokens are a sum of symbols, as those of text and image are, it does not see that
the places are the same: it writes the tensor, and then copies it. So it is asked to put the tensor into memory first.

Parts that are put together, as attention and the activation are, are written by one kernel if nothing is in memory. It
would divide by tokens, in 64 bits, for every element, though only what attention's heads leave is elsewhere in its
rows. With the other parts asked for too, each is written to its place by a kernel of its own.

Flux has two such layers in each of 38 blocks, whose copies took 3.1 of 145 ms a step on an H200.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch._inductor.ir import ExternKernel, IRNode, TensorBox
from torch._inductor.lowering import register_lowering
from torch.fx import GraphModule, Node

from ....capture.shape_range import always_contiguous
from ....once import once
from .rewriting import Replacement, replace_nodes

aten = torch.ops.aten


def write_operands_once(graph: GraphModule) -> GraphModule:
    """Return ``graph`` with such operands in memory before the product; ``graph`` itself where there are none.

    Args:
        graph: functional, with fake tensors under ``val`` as ``torch.export`` leaves them.
    """
    operands = {tensor for node in graph.graph.nodes for tensor in _copied(node)}

    def find(node: Node) -> Replacement | None:
        if node not in operands:
            return None
        return lambda new, copied: new.call_function(in_memory(), (new.node_copy(node, copied),))

    return replace_nodes(graph, find)


@once
def in_memory() -> Callable[[torch.Tensor], torch.Tensor]:
    """The operator ``onediff_comfy::in_memory``, which gives its argument as a contiguous tensor.

    Inductor has no kernel for it: it lets what computes the argument write it, to a place within another if it likes.
    """

    @torch.library.custom_op("onediff_comfy::in_memory", mutates_args=())
    def in_memory(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone(memory_format=torch.contiguous_format)

    @in_memory.register_fake
    def _(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, memory_format=torch.contiguous_format)

    operator: Callable[[torch.Tensor], torch.Tensor] = torch.ops.onediff_comfy.in_memory.default
    register_lowering(operator, type_promotion_kind=None)(_realized)
    return operator


def _realized(tensor: TensorBox) -> TensorBox:
    realized: IRNode = ExternKernel.realize_input(tensor)
    return realized if isinstance(realized, TensorBox) else TensorBox(realized)


def _copied(node: Node) -> Iterator[Node]:
    """What Inductor would copy before this node computes, and what that is put together of."""
    operand = _operand(node)
    if operand is None:
        return
    tensor = operand.meta["val"]
    leading = [size for size in tensor.shape[:-1] if isinstance(size, torch.SymInt) or size != 1]
    # One that is not contiguous is copied by eager too, and its bias added afterwards, which rounds otherwise.
    if operand.op == "call_function" and any(map(_is_a_sum, leading[1:])) and always_contiguous(tensor):
        yield operand
        # What rounds to 8 bits puts together by itself: half the bytes, and nothing else wants them.
        if operand.target is aten.cat.default:
            parts = operand.args[0]
            assert isinstance(parts, (list, tuple))
            yield from (part for part in parts if isinstance(part, Node) and _is_computed(part))


def _operand(node: Node) -> Node | None:
    """What is multiplied in rows, as it is before it is seen as rows."""
    operand = node.args[0] if node.target in (aten.linear.default, aten._scaled_mm.default) else None
    if node.target is aten._scaled_mm.default and isinstance(operand, Node):
        operand = operand.args[0] if operand.target in (aten.view.default, aten.reshape.default) else None
    return operand if isinstance(operand, Node) else None


def _is_computed(node: Node) -> bool:
    """Whether it is more than a view, or a copy for one: those would be written twice."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.is_view or target is aten._unsafe_view.default:
        return False
    return always_contiguous(node.meta["val"])  # or it would have another layout for whoever else uses it


def _is_a_sum(size: int | torch.SymInt) -> bool:
    return isinstance(size, torch.SymInt) and size.node.expr.expand().is_Add
