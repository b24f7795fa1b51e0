"""An engine for tests: the eager one, whose graphs can be kept, loaded again in this process, and spoilt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from onediff_comfy.capture.export import Binding, Capture
from onediff_comfy.capture.shape_range import ShapeRange
from onediff_comfy.engines.base import CompiledGraph
from onediff_comfy.engines.eager import EagerEngine, EagerGraph

Spoil = Callable[[torch.Tensor, tuple[int, ...]], torch.Tensor]


class _Graph(EagerGraph):
    def __init__(self, capture: Capture, spoil: Spoil) -> None:
        super().__init__(capture)
        self.capture, self._spoil = capture, spoil

    def __call__(self, weights: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        sizes = tuple(max(tensors, key=torch.Tensor.numel).shape)
        return [self._spoil(output, sizes) for output in super().__call__(weights, tensors)]


class Recompiling(EagerEngine):
    """The eager engine, counting what it compiles and loads; its graphs can be kept, as the number of a capture.

    Args:
        spoil: what goes wrong, of an output and the sizes of its call.
    """

    def __init__(self, spoil: Spoil = lambda output, _sizes: output) -> None:
        self.captures: list[Capture] = []
        self.loaded = 0
        self.spoil = spoil

    @property
    def made(self) -> list[str]:
        return ["general" if capture.shapes.general else "exact" for capture in self.captures]

    def compile(self, capture: Capture) -> CompiledGraph:
        self.captures.append(capture)
        return _Graph(capture, self.spoil)

    def to_parts(self, graph: CompiledGraph) -> Mapping[str, bytes]:
        assert isinstance(graph, _Graph)
        return {"number": str(self.captures.index(graph.capture)).encode()}

    def from_parts(self, binding: Binding, shapes: ShapeRange, parts: Mapping[str, bytes]) -> CompiledGraph:
        self.loaded += 1
        graph = _Graph(self.captures[int(parts["number"])], self.spoil)
        assert (graph.shapes, graph.binding.inputs, graph.binding.folds) == (shapes, binding.inputs, binding.folds)
        graph.binding = binding
        return graph
