"""The reference engine: the captured graph, operator by operator, through PyTorch's own kernels.

It compiles nothing and is about as fast as the model itself. It is there to tell a wrong capture
from a wrong compilation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..capture.export import Capture
from ..messages import Message
from .base import CompiledGraph, Engine, Outputs


class EagerGraph(CompiledGraph):
    def __init__(self, capture: Capture) -> None:
        super().__init__(capture.binding, capture.shapes)
        self._graph = capture.graph

    def __call__(self, weights: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> Outputs:
        return self._graph(*self.binding.feed(weights, tensors))


class EagerEngine(Engine):
    name = "eager"
    general = True
    recorded = False

    def unavailable(self, device: torch.device) -> Message | None:
        return None

    def compile(self, capture: Capture) -> CompiledGraph:
        return EagerGraph(capture)
