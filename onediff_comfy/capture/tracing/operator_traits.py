"""What the operators of a captured graph do besides computing: draw random numbers, wait for values."""

from __future__ import annotations

import torch

from .opaque_function import call_option

_KNOWN_LIBRARIES = ("aten", "prims", "onediff_comfy")


def foreign_operators(graph: torch.fx.GraphModule) -> frozenset[str]:
    """Return the operators in a capture's graph, ``library::operator``, that are neither PyTorch's nor our own."""
    operators = (node.target for node in graph.graph.nodes)
    return frozenset(
        operator._schema.name
        for operator in operators
        if isinstance(operator, torch._ops.OpOverload) and operator.namespace not in _KNOWN_LIBRARIES
    )


def draws_random_numbers(node: torch.fx.Node) -> bool:
    """Return True if an operator draws random numbers. Dropout, also in attention, is off outside of training."""
    operator = node.target
    if not isinstance(operator, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    return not any(part in operator.name() for part in ("dropout", "attention"))


def calls_option(node: torch.fx.Node) -> bool:
    """Return True if an operator calls a function of the options, of which nobody knows what it does."""
    return node.target is call_option()


def waits_for_values(node: torch.fx.Node) -> bool:
    """Return True if only the values of an operator's arguments tell its result's size, or a number that it gives."""
    operator = node.target
    if not isinstance(operator, torch._ops.OpOverload):
        return False
    if operator is torch.ops.aten.index.Tensor:  # by a mask, not by positions
        indices = [index.meta["val"] for index in node.args[1] if index is not None]  # type: ignore[union-attr]
        return any(index.dtype in (torch.bool, torch.uint8) for index in indices)
    if operator is torch.ops.aten.repeat_interleave.Tensor and node.kwargs.get("output_size") is not None:
        return False
    return not {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}.isdisjoint(operator.tags)
