"""OneFlow: a capture lowered operator by operator into a OneFlow graph, for one set of sizes.

Nothing here imports OneFlow itself before it is wanted: the pack loads without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from ...capture.shapes import ShapeRange
from ...capture.trace import Binding, Capture
from ..base import CompiledGraph, Engine, EngineError
from . import install

if TYPE_CHECKING:
    from .program import Program, Running


class OneFlowGraph(CompiledGraph):
    """A program, made ready with the first weights that it is called with, and again when weights have moved."""

    def __init__(self, binding: Binding, shapes: ShapeRange, program: Program) -> None:
        super().__init__(binding, shapes)
        self.program = program
        self.code_bytes = len(program.job)
        self._running: Running | None = None

    def __call__(self, weights: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        from .program import ONE_AT_A_TIME, Running

        fed = self.binding.feed(weights, tensors)
        variables = [fed[slot.index] for slot in self.program.variables]
        inputs = [fed[slot.index] for slot in self.program.inputs]
        with ONE_AT_A_TIME:
            if self._running is None or not self._running.reads(variables):
                self._running = None
                self._running = Running(self.program, variables, inputs)
            return self._running(inputs)


class OneFlowEngine(Engine):
    name = "oneflow"
    general = False  # a OneFlow graph is for one set of sizes
    recorded = False

    def unavailable(self, device: torch.device) -> str | None:
        return install.problem(device)

    def compile(self, capture: Capture) -> CompiledGraph:
        from .lowering import unsupported
        from .program import build

        missing = unsupported(capture.graph)
        if missing:
            raise EngineError(f"OneFlow has no form for {', '.join(missing)}")
        return OneFlowGraph(capture.binding, capture.shapes, build(capture))

    def to_parts(self, graph: CompiledGraph) -> Mapping[str, bytes]:
        assert isinstance(graph, OneFlowGraph)
        return graph.program.to_parts()

    def from_parts(self, binding: Binding, shapes: ShapeRange, parts: Mapping[str, bytes]) -> CompiledGraph:
        from .program import Program

        return OneFlowGraph(binding, shapes, Program.from_parts(parts))
