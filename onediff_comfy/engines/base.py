"""What an engine is: something that turns a capture into a compiled graph."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from ..capture.export import Binding, Capture
from ..capture.rewrites.fp8_linear import fp8_unavailable
from ..capture.rewrites.op_substitutions import Forms
from ..capture.shape_range import ShapeRange
from ..messages import Message, message

Outputs = Sequence[torch.Tensor | None]
"""What a graph gives, flat; None where the module gives none, as a text encoder for a layer that nobody asked for."""


class EngineError(Exception):
    """An engine cannot compile here. The message names the cause and the remedy."""


class CompiledGraph(ABC):
    """A capture made fast. Called with weights and tensors; knows what it costs to keep.

    Holds no weight: whoever calls passes the weights that are in place now, so one compiled graph
    serves every checkpoint and LoRA of an architecture.

    Attributes:
        binding: how to call it.
        shapes: the sizes of a call's tensors that it may be called with.
        code_bytes: size of its machine code, as far as the engine knows.
        compilation: which of all that may have been made under its key it is; see ``cache.verdicts``.
    """

    compilation = ""

    def __init__(self, binding: Binding, shapes: ShapeRange) -> None:
        self.binding = binding
        self.shapes = shapes
        self.code_bytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of device (or host) memory held while the graph is kept, weights excluded."""
        return self.code_bytes + sum(value.nbytes for value in self.binding.constants.values())

    @abstractmethod
    def __call__(self, weights: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> Outputs:
        """Run on weights (in ``binding.weight_names`` order) and a call's tensors; flat outputs."""

    def returns_early(self, device: torch.device) -> bool:
        """Return True if a call returns before ``device`` has computed the outputs."""
        return device.type == "cuda"

    def recordable(self) -> contextlib.AbstractContextManager[None]:
        """Inside, a call whose sizes were called before can be recorded as a CUDA graph."""
        return contextlib.nullcontext()


class Engine(ABC):
    """One way of compiling. Stateless; everything that changes the code it makes is in its key fields."""

    name: ClassVar[str]
    general: ClassVar[bool]
    """Whether it compiles captures whose sizes are symbols, so that one graph serves many sizes."""
    recorded: ClassVar[bool]
    """Whether its graphs, on a GPU, are to be replayed through CUDA graphs."""
    fp8: ClassVar[bool] = True
    """Whether it compiles products of 8-bit numbers."""
    fuses: ClassVar[bool] = False
    """Whether it makes one kernel of several plain operators, so that it is better to have those than one it does not
    know."""

    @abstractmethod
    def unavailable(self, device: torch.device) -> Message | None:
        """Why this engine cannot serve ``device`` on this machine, with the remedy; None if it can."""

    def prepare(self) -> None:  # noqa: B027 - nothing to do for most
        """Import what compiling and loading need, seconds of work that can overlap with loading a model."""

    def specialises(self, device: torch.device) -> bool:
        """Whether a graph for one set of sizes is faster on ``device`` than a general one, enough to make it."""
        return False

    def fp8_unavailable(self, device: torch.device) -> Message | None:
        """Return why graphs of this engine cannot compute in fp8 on ``device``; None if they can."""
        if not self.fp8:
            return message("the {engine} engine does not compute in fp8", engine=self.name)
        return fp8_unavailable(device)

    def forms(self) -> Forms:
        """Functions of torch that a capture for this engine is to have in another form."""
        return {}

    def rewritten(self, capture: Capture) -> torch.fx.GraphModule:
        """Return a capture's graph without the operators of other libraries that this engine has own kernels for."""
        return capture.graph

    def options(self) -> Mapping[str, str]:
        """Options that change the compiled code."""
        return {}

    def versions(self, device: torch.device) -> Mapping[str, str]:
        """Versions and hardware that change the compiled code, besides torch's own."""
        return {}

    @abstractmethod
    def compile(self, capture: Capture) -> CompiledGraph:
        """Compile. May take minutes; called with no lock of the caller's held.

        Raises:
            EngineError: the engine knows what is wrong and how to mend it.
        """

    def to_parts(self, graph: CompiledGraph) -> Mapping[str, bytes] | None:
        """The graph as bytes, without weights and constants; None if compiling again costs no more than loading."""
        return None

    def from_parts(self, binding: Binding, shapes: ShapeRange, parts: Mapping[str, bytes]) -> CompiledGraph:
        """The graph that ``to_parts`` of this engine gave; runs code that is in the parts."""
        raise NotImplementedError(f"graphs of the {self.name} engine are not kept")
