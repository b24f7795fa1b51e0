"""Lowering: a capture's ATen operators, one by one, to OneFlow's. One file per family of operators.

Imports OneFlow: only what has made sure of it (``..install``) may import this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import oneflow as flow
import torch

from ....messages import Message, message
from ...base import EngineError
from . import attention, convolution, creation, matmul, pointwise, reduction, shape
from .table import DTYPES, Lowering

FAMILIES: Mapping[str, Mapping[Any, Lowering]] = {
    "pointwise": pointwise.TABLE,
    "reductions and norms": reduction.TABLE,
    "matrix products": matmul.TABLE,
    "convolution and resolution": convolution.TABLE,
    "attention": attention.TABLE,
    "views and moves": shape.TABLE,
    "creation and indexing": creation.TABLE,
}
LOWERINGS: Mapping[Any, Lowering] = {name: f for table in FAMILIES.values() for name, f in table.items()}


def lowering_of(operator: Any) -> Lowering | None:
    """The table's entry for what a graph calls, if it has one."""
    return LOWERINGS.get(operator) or LOWERINGS.get(str(operator))


# Statements about tensors that hold already: the graph is for exactly these sizes and dtypes.
_ASSERTIONS = {torch.ops.aten._assert_tensor_metadata.default, torch.ops.aten._assert_scalar.default}


def unsupported(graph: torch.fx.GraphModule) -> list[str]:
    """What in a capture OneFlow has no form for: operators by name, and dtypes; nothing is run for this."""
    found: set[str] = set()
    for node in graph.graph.nodes:
        if node.op == "call_function" and lowering_of(node.target) is None and node.target not in _ASSERTIONS:
            found.add(str(node.target))
        elif node.op in ("get_attr", "call_module", "call_method"):
            found.add(f"{node.op} {node.target}")
        value = node.meta.get("val")
        known = (*DTYPES, torch.int16) if node.op == "placeholder" else DTYPES  # int16 is handed over wider
        if isinstance(value, torch.Tensor) and value.dtype not in known:
            found.add(message("{dtype} in {operator}", dtype=value.dtype, operator=node.target))
        if isinstance(value, torch.Tensor) and value.numel() == 0:  # one ends the process
            found.add(message("a tensor without elements in {operator}", operator=node.target))
    return sorted(found)


def lower(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """Run a capture on OneFlow tensors: eager ones compute, lazy ones become a graph.

    Args:
        graph: functional ATen operators, all of them in the table.
        inputs: one tensor per placeholder.

    Returns:
        The flat outputs.

    Raises:
        EngineError: an operator has no kernel for these dtypes or this device, or came out in
            another shape than torch's; names it.
    """
    values: dict[torch.fx.Node, Any] = {}
    last_uses = _last_uses(graph)
    given = iter(inputs)
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            values[node] = _as_in_torch(node, next(given))
        elif node.op == "output":
            return [values[item] for item in node.args[0]]
        elif node.target not in _ASSERTIONS:
            values[node] = _lowered(node, values.__getitem__)
        for done in last_uses.get(node, ()):
            values.pop(done, None)
    raise EngineError(message("the captured graph has no output"))


def _lowered(node: torch.fx.Node, value_of: Callable[[torch.fx.Node], Any]) -> Any:
    arguments = torch.fx.node.map_arg(node.args, value_of)
    options = torch.fx.node.map_arg(node.kwargs, value_of)
    function = lowering_of(node.target)
    if function is None:
        raise EngineError(message("OneFlow has no form for {operator}", operator=node.target))
    try:
        result = function(*arguments, **options)
    except Exception as error:
        reason = str(error)
        if not isinstance(reason, Message):  # OneFlow's own, which ends with what is wrong
            reason = next(
                (line.strip() for line in reversed(reason.splitlines()) if line.strip()), message("no message")
            )
        raise EngineError(
            message("OneFlow cannot compute {operation}: {reason}", operation=_described(node), reason=reason)
        ) from error
    return _as_in_torch(node, result)


def _as_in_torch(node: torch.fx.Node, result: Any) -> Any:
    """The result in torch's dtype, after a look at its shape."""
    expected = node.meta.get("val")
    if not (isinstance(expected, torch.Tensor) and isinstance(result, flow.Tensor)):
        return result
    if tuple(result.shape) != tuple(expected.shape):
        raise EngineError(
            message(
                "OneFlow computes {operation} in another shape, {shape}",
                operation=_described(node),
                shape=tuple(result.shape),
            )
        )
    wanted = DTYPES.get(expected.dtype, result.dtype)
    return result if result.dtype == wanted else result.to(wanted)


def _described(node: torch.fx.Node) -> str | Message:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return message(
            "{operator} of {dtype} {shape} on {device}",
            operator=node.target,
            dtype=value.dtype,
            shape=tuple(value.shape),
            device=value.device,
        )
    return str(node.target)


def _last_uses(graph: torch.fx.GraphModule) -> dict[torch.fx.Node, list[torch.fx.Node]]:
    """For each node, what nothing after it needs: so much less memory at once."""
    last = {used: node for node in graph.graph.nodes for used in node.all_input_nodes}
    uses: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    for used, node in last.items():
        uses.setdefault(node, []).append(used)
    return uses
