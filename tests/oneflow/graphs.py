"""Small captures, made by hand or by tracing, and what a compiled one computes."""

from __future__ import annotations

import operator as python_operators
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.fx.node import map_aggregate

from onediff_comfy.capture.export import Binding, Capture, GraphInput
from onediff_comfy.engines.base import CompiledGraph


def capture_of(operator: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> tuple[Capture, list[torch.Tensor]]:
    """A capture that calls one operator, and the tensors to call it with: those among the arguments."""
    graph = torch.fx.Graph()
    tensors: list[torch.Tensor] = []

    def placeholder(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        node = graph.placeholder(f"input_{len(tensors)}")
        node.meta["val"] = value
        tensors.append(value)
        return node

    nodes = map_aggregate((tuple(args), dict(kwargs)), placeholder)
    if not tensors:
        placeholder(torch.zeros(1))  # no call is without tensors; this one is not used
    result = operator(*args, **kwargs)
    called = graph.call_function(operator, *nodes)
    called.meta["val"] = result
    flat = [result] if isinstance(result, torch.Tensor) else list(result)
    outputs = [called]
    if not isinstance(result, torch.Tensor):
        outputs = [graph.call_function(python_operators.getitem, (called, index)) for index in range(len(flat))]
        for node, value in zip(outputs, flat, strict=True):
            node.meta["val"] = value
    graph.output(tuple(outputs))
    binding = Binding(
        tuple(GraphInput("tensor", node.name, i) for i, node in enumerate(graph.find_nodes(op="placeholder"))),
        {},
        pytree.tree_structure(tuple(flat)),
    )
    return Capture(torch.fx.GraphModule(torch.nn.Module(), graph), binding, "by hand"), tensors


def run(compiled: CompiledGraph, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs for tensors and no weights."""
    return list(compiled([], tensors))
