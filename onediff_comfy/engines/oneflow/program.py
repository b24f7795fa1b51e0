"""A capture as a OneFlow job after its passes: what is compiled, kept and loaded. It holds no weights."""

from __future__ import annotations

import json
import uuid
import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import oneflow as flow
import oneflow._oneflow_internal as internal
import torch
from oneflow.framework import c_api_util, graph_build_util

from ...capture.export import Capture
from . import session
from .lowering import lower
from .lowering.table import DTYPES, device_of
from .sharing import as_bytes, carried_as, is_shareable


@dataclass(frozen=True)
class Slot:
    """One input or output of a job.

    Attributes:
        index: which of the graph's inputs or outputs it is.
        name: of the operator that feeds or fetches it.
        shape: sizes.
        dtype: torch's name for it, such as ``float32``.
    """

    index: int
    name: str
    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, index: int, name: str, example: torch.Tensor) -> Slot:
        return cls(index, name, tuple(map(int, example.shape)), str(example.dtype).removeprefix("torch."))

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is of this shape and dtype: OneFlow ends the process over one that is not."""
        return tuple(tensor.shape) == self.shape and tensor.dtype == self.torch_dtype


@dataclass(frozen=True)
class Program:
    """A job and what belongs to its inputs and outputs.

    Attributes:
        job: the serialised job, after all of OneFlow's passes.
        variables: inputs that OneFlow reads where they are: weights and constants.
        inputs: inputs that are handed over at each call.
        outputs: all outputs, in order.
    """

    job: bytes
    variables: tuple[Slot, ...]
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]

    def to_parts(self) -> dict[str, bytes]:
        """As bytes, for a file."""
        slots = {name: [asdict(slot) for slot in getattr(self, name)] for name in ("variables", "inputs", "outputs")}
        return {"job": zlib.compress(self.job), "slots": json.dumps(slots).encode()}

    @classmethod
    def from_parts(cls, parts: Mapping[str, bytes]) -> Program:
        """What ``to_parts`` gave."""
        fields = json.loads(parts["slots"])
        slots = {
            name: tuple(Slot(s["index"], s["name"], tuple(s["shape"]), s["dtype"]) for s in values)
            for name, values in fields.items()
        }
        return cls(zlib.decompress(parts["job"]), **slots)


def build(capture: Capture) -> Program:
    """Lower a capture and run OneFlow's passes over it.

    Before, it runs once on OneFlow tensors: a kernel that is missing shows there as an error, while a job that
    fails to be made ready leaves the process in a state in which the next one aborts.

    Raises:
        EngineError: OneFlow cannot compute it; names the operator.
    """
    placeholders = [node for node in capture.graph.graph.nodes if node.op == "placeholder"]
    examples = capture.examples()
    used = [index for index, node in enumerate(placeholders) if node.users]
    with session.exclusive(), warnings.catch_warnings():
        # OneFlow makes a module of its own for a tensor of ones, and warns that it did.
        warnings.filterwarnings("ignore", message=r".* is called in a nn\.Graph", category=UserWarning)
        samples = dict(zip(used, _samples([examples[index] for index in used]), strict=True))
        values = [samples.get(index) for index in range(len(placeholders))]
        lower(capture.graph, values)
        internal.eager.Sync()
        inputs, variables = [], []
        with session.building(f"onediff_{uuid.uuid4().hex}"):
            for index in used:
                kind = capture.binding.inputs[index].kind
                slot = Slot.of(index, f"{kind}_{index}", examples[index])
                if kind in ("tensor", "feature") or not is_shareable(examples[index]):
                    inputs.append(slot)
                    values[index] = graph_build_util.build_graph_input_arg(slot.name, samples[index])
                else:
                    variables.append(slot)
                    values[index] = graph_build_util.build_graph_state(slot.name, samples[index], None)
            outputs = [Slot.of(index, f"output_{index}", fake) for index, fake in enumerate(_outputs(capture))]
            for slot, result in zip(outputs, lower(capture.graph, values), strict=True):
                graph_build_util.build_graph_output(slot.name, as_bytes(result))
            internal.CurJobBuildAndInferCtx_Complete()
            job = c_api_util.GetCurrentJob().SerializeToString()
    return Program(job, tuple(variables), tuple(inputs), tuple(outputs))


def _samples(examples: Sequence[torch.Tensor]) -> list[Any]:
    """OneFlow tensors of these shapes and dtypes, any values: one piece of memory per dtype for all of them."""
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for example in examples:
        kind = (carried_as(example.dtype), example.device)
        sizes[kind] = max(sizes.get(kind, 1), example.numel())
    memory = {
        (dtype, device): flow.zeros(size, dtype=DTYPES[dtype], device=device_of(device))
        for (dtype, device), size in sizes.items()
    }
    pieces = ((memory[carried_as(e.dtype), e.device], e) for e in examples)
    return [flow.reshape(piece[: example.numel()], tuple(example.shape)) for piece, example in pieces]


def _outputs(capture: Capture) -> list[torch.Tensor]:
    output = next(iter(reversed(capture.graph.graph.nodes)))
    return [node.meta["val"] for node in output.args[0]]
