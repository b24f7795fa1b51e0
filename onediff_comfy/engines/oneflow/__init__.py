"""OneFlow: a capture lowered operator by operator into a OneFlow graph, for one set of sizes.

Nothing here imports OneFlow itself before it is wanted: the pack loads without it.
"""

from __future__ import annotations

import importlib.metadata
import logging
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from ...capture.export import Binding, Capture
from ...capture.shape_range import ShapeRange
from ...messages import Message, joined, message
from ..base import CompiledGraph, Engine, EngineError, Outputs
from . import install

if TYPE_CHECKING:
    from .program import Program
    from .running import Running

log = logging.getLogger(__name__)

# A job that failed to be made ready leaves OneFlow in a state in which the next one ends the process.
_broken: list[Message] = []


class OneFlowGraph(CompiledGraph):
    """A program, made ready with the weights that it is called with, and again when they lie elsewhere.

    Making it ready takes a tenth of a second to seconds: OneFlow plans its memory. That is needed at the first
    call, after weights have moved (a LoRA, another checkpoint, an offload), and after a session's reset.
    """

    def __init__(self, binding: Binding, shapes: ShapeRange, program: Program) -> None:
        super().__init__(binding, shapes)
        self.program = program
        self.code_bytes = len(program.job)
        self._running: Running | None = None
        self._gone: weakref.finalize[..., OneFlowGraph] | None = None

    @property
    def nbytes(self) -> int:
        running = self._running
        return super().nbytes + (running.nbytes if running else 0)

    def __call__(self, weights: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> Outputs:
        from . import session
        from .sharing import is_shareable

        fed = self.binding.feed(weights, tensors)
        slots = (*self.program.variables, *self.program.inputs)
        wrong = [slot.name for slot in slots if not slot.fits(fed[slot.index])]
        if wrong:
            raise ValueError(
                message("{names} are of another shape or dtype than the graph is for", names=", ".join(wrong))
            )
        variables = [fed[slot.index] for slot in self.program.variables]
        if not all(map(is_shareable, variables)):
            raise ValueError(message("a weight has gaps in memory that it did not have when the graph was compiled"))
        inputs = [fed[slot.index] for slot in self.program.inputs]
        with session.exclusive():
            if self._running is not None and not self._running.reads(variables):
                session.reset()  # ends this one too
            if self._running is None:
                device = max(fed, key=torch.Tensor.numel).device
                self._running = self._ready(variables, inputs, device)
                session.entered(self)
                if self._gone is None:
                    self._gone = weakref.finalize(self, session.left)
                    self._gone.atexit = False
            return self._running(inputs)

    def _ready(
        self, variables: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], device: torch.device
    ) -> Running:
        from .running import Running

        if _broken:
            raise EngineError(_broken[0])
        start = time.monotonic()
        try:
            running = Running(self.program, variables, inputs, device)
        except Exception as error:
            _broken.append(
                message(
                    "OneFlow could not make a graph ready and must not be used again before a restart: {error}",
                    error=error,
                )
            )
            raise
        log.info("OneDiff: OneFlow made a graph ready in %.1f s", time.monotonic() - start)
        return running

    def end(self) -> None:
        """Give up what a reset of the session takes back; the next call makes it ready again."""
        self._running = None


class OneFlowEngine(Engine):
    name = "oneflow"
    general = False  # a OneFlow graph is for one set of sizes
    recorded = False
    fp8 = False

    def unavailable(self, device: torch.device) -> Message | None:
        return _broken[0] if _broken else install.problem(device)

    def prepare(self) -> None:
        # Which imports it, if it can be used.
        install.problem(torch.device("cuda" if torch.cuda.is_available() else "cpu"))

    def versions(self, device: torch.device) -> Mapping[str, str]:
        return {"oneflow": importlib.metadata.version("oneflow")}

    def compile(self, capture: Capture) -> CompiledGraph:
        from .lowering import unsupported
        from .program import build

        missing = unsupported(capture.graph)
        if missing:
            raise EngineError(message("OneFlow has no form for {names}", names=joined(", ", missing)))
        return OneFlowGraph(capture.binding, capture.shapes, build(capture))

    def to_parts(self, graph: CompiledGraph) -> Mapping[str, bytes]:
        assert isinstance(graph, OneFlowGraph)
        return graph.program.to_parts()

    def from_parts(self, binding: Binding, shapes: ShapeRange, parts: Mapping[str, bytes]) -> CompiledGraph:
        from .program import Program

        return OneFlowGraph(binding, shapes, Program.from_parts(parts))
