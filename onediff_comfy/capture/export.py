"""What a capture is: a target's forward as an FX graph of ATen operators, and how to call it.

Every parameter and buffer is an input, so that no weight value is in the graph. The text of the graph, hashed, is the
capture's digest: the identity of *what is computed*, whatever model object, file or process it came from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
import torch.utils._pytree as pytree

from .shape_range import ShapeRange, fold, range_of


@dataclass(frozen=True)
class GraphInput:
    """Where a graph's placeholder gets its value: a weight or a constant by name, or a call's tensor by index.

    A *feature* is a tensor that comes from another graph of the same forward, after the call's own.
    """

    kind: Literal["weight", "constant", "tensor", "feature"]
    name: str
    index: int = -1


@dataclass(frozen=True)
class Binding:
    """How to call a captured graph: where every input comes from, and what its outputs mean.

    Attributes:
        inputs: what each placeholder stands for, in order.
        constants: tensors that the forward made out of plain numbers; part of the code.
        output: how to put the flat outputs together again.
        folds: which of the call's tensors are handed over folded (see ``shape_range.fold``), and by what.
        waits: whether it waits for the device in its middle, for values that decide on sizes, or calls what may:
            another library's operator, a function of the options. Such a graph is not replayed as a CUDA graph.
        calls_option: whether it calls a function of the call's own options; see ``tracing.opaque_function``.
    """

    inputs: tuple[GraphInput, ...]
    constants: Mapping[str, torch.Tensor]
    output: pytree.TreeSpec
    folds: Mapping[int, int] = field(default_factory=dict)
    waits: bool = False
    calls_option: bool = False

    @cached_property
    def weight_names(self) -> tuple[str, ...]:
        return tuple(item.name for item in self.inputs if item.kind == "weight")

    @cached_property
    def places(self) -> Any:
        """Return the output as it is put together, with the number of a flat output in the place of each."""
        return pytree.tree_unflatten(range(self.output.num_leaves), self.output)

    def feed(self, weights: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the graph's inputs in order, from weights (in ``weight_names`` order) and a call's tensors."""
        remaining = iter(weights)
        return [
            next(remaining)
            if item.kind == "weight"
            else self._tensor(tensors, item.index)
            if item.kind in ("tensor", "feature")
            else self.constants[item.name]
            for item in self.inputs
        ]

    def _tensor(self, tensors: Sequence[torch.Tensor], index: int) -> torch.Tensor:
        return fold(tensors[index], self.folds[index]) if index in self.folds else tensors[index]


@dataclass(frozen=True)
class Capture:
    """A forward as a graph.

    Attributes:
        graph: functional ATen operators; called with one tensor per entry of ``binding.inputs``,
            returns a flat tuple of tensors.
        digest: sha256 of the graph's canonical text, binding, constants and symbols with their limits. Conditions on
            sizes are not in it: they say when the graph holds, and not what it computes.
        batch: which of the call's tensors has the batch as its first axis.
        brief: the same forward with most of its work left out (see ``rewrites.step_cache_split``), if there is such.
    """

    graph: torch.fx.GraphModule
    binding: Binding
    digest: str
    batch: int | None = None
    brief: Capture | None = None

    @property
    def shapes(self) -> ShapeRange:
        """Return the sizes it holds for. Compiling may narrow them: ask again afterwards."""
        placeholders = [node for node in self.graph.graph.nodes if node.op == "placeholder"]
        pairs = zip(self.binding.inputs, placeholders, strict=True)
        examples = [node.meta["val"] for item, node in pairs if item.kind == "tensor"]
        return range_of(examples, self.batch, self.binding.folds)

    def examples(self) -> list[Any]:
        """Return a fake tensor for every input: shapes, dtypes, strides and devices without memory."""
        return [node.meta["val"] for node in self.graph.graph.nodes if node.op == "placeholder"]
