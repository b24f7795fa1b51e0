"""A capture as a OneFlow job after its passes: what is compiled, kept and loaded. It holds no weights.

``build`` lowers a capture into a job; ``Running`` gives a job memory and runs it. On OneFlow 0.9 an ``nn.Graph``
does both and cannot be kept, so the steps inside of it are taken here one by one.
"""

from __future__ import annotations

import json
import threading
import uuid
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import oneflow as flow
import oneflow._oneflow_internal as internal
import torch
from oneflow.core.job import job_conf_pb2, job_pb2
from oneflow.framework import c_api_util, graph_build_util, session_context
from oneflow.framework.tensor_tuple_util import convert_to_tensor_tuple

from ...capture.trace import Capture
from .lowering import lower
from .lowering.table import DTYPES, device_of
from .sharing import as_bytes, borrowed, handed_over, shared, taken_back

ONE_AT_A_TIME = threading.RLock()
"""Held for everything that OneFlow does: it builds one job at a time, and a session runs one graph after another."""


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

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


@dataclass(frozen=True)
class Program:
    """A job and what belongs to its inputs and outputs.

    Attributes:
        job: the serialised job, after all of OneFlow's passes.
        variables: inputs that OneFlow reads where they are: weights and constants.
        inputs: inputs that are handed over at each call.
        outputs: all outputs, in order.
        device: where it computes, as torch writes it, without an index.
    """

    job: bytes
    variables: tuple[Slot, ...]
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    device: str

    def to_parts(self) -> dict[str, bytes]:
        """As bytes, for a file."""
        slots = {name: [asdict(slot) for slot in getattr(self, name)] for name in ("variables", "inputs", "outputs")}
        return {"job": zlib.compress(self.job), "slots": json.dumps({**slots, "device": self.device}).encode()}

    @classmethod
    def from_parts(cls, parts: Mapping[str, bytes]) -> Program:
        """What ``to_parts`` gave."""
        fields = json.loads(parts["slots"])

        def slots(name: str) -> tuple[Slot, ...]:
            return tuple(Slot(s["index"], s["name"], tuple(s["shape"]), s["dtype"]) for s in fields[name])

        job = zlib.decompress(parts["job"])
        return cls(job, slots("variables"), slots("inputs"), slots("outputs"), fields["device"])


def build(capture: Capture) -> Program:
    """Lower a capture and run OneFlow's passes over it.

    It runs once on OneFlow tensors before: a kernel that is missing shows there as an error, while a job that
    fails to compile leaves the process in a state in which the next one aborts.

    Raises:
        EngineError: OneFlow cannot compute it; names the operator.
    """
    placeholders = [node for node in capture.graph.graph.nodes if node.op == "placeholder"]
    used = [index for index, node in enumerate(placeholders) if node.users]
    examples = capture.examples()
    device = _device_of(examples)
    with ONE_AT_A_TIME, flow.no_grad(), warnings.catch_warnings():
        # OneFlow makes a module of its own for a tensor of ones, and warns that it did.
        warnings.filterwarnings("ignore", message=r".* is called in a nn\.Graph", category=UserWarning)
        samples = dict(zip(used, _samples([examples[index] for index in used]), strict=True))
        inputs = [samples.get(index) for index in range(len(placeholders))]
        lower(capture.graph, inputs)
        internal.eager.Sync()
        slots = {"tensor": [], "weight": [], "constant": []}  # type: dict[str, list[Slot]]
        for index in used:
            kind = capture.binding.inputs[index].kind
            slots[kind].append(_slot(index, f"{kind}_{index}", examples[index]))
        with _building(f"onediff_{uuid.uuid4().hex}"):
            lazy = list(inputs)
            for slot in slots["tensor"]:
                lazy[slot.index] = graph_build_util.build_graph_input_arg(slot.name, samples[slot.index])
            for slot in (*slots["weight"], *slots["constant"]):
                lazy[slot.index] = graph_build_util.build_graph_state(slot.name, samples[slot.index], None)
            results = [as_bytes(result) for result in lower(capture.graph, lazy)]
            outputs = []
            for index, (result, fake) in enumerate(zip(results, _outputs(capture), strict=True)):
                outputs.append(_slot(index, f"output_{index}", fake))
                graph_build_util.build_graph_output(f"output_{index}", result)
            internal.CurJobBuildAndInferCtx_Complete()
            job = c_api_util.GetCurrentJob().SerializeToString()
    variables = (*slots["weight"], *slots["constant"])
    return Program(job, variables, tuple(slots["tensor"]), tuple(outputs), device)


class Running:
    """A program with memory of its own, bound to weights where they lie now.

    OneFlow fixes addresses when a job is made ready. It reads each variable in torch's memory, without owning it:
    before every call the addresses are compared, and where one has changed this is of no use any more.

    Args:
        program: what to run.
        variables: one tensor per variable, contiguous and of a dtype that OneFlow knows.
        inputs: one tensor per input, of any values.
    """

    def __init__(self, program: Program, variables: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        self._program = program
        self._addresses = [tensor.data_ptr() for tensor in variables]
        self._variables = convert_to_tensor_tuple([borrowed(tensor) for tensor in variables])
        job = job_pb2.Job()
        job.ParseFromString(program.job)
        name = f"onediff_{uuid.uuid4().hex}"  # OneFlow knows jobs by name
        job.job_conf.job_name = name
        # A session that is gone before its graphs makes the interpreter wait for ever at its end.
        self._session = session_context.GetDefaultSession()
        with _building(name, job.job_conf):
            scope = internal.GetCurrentScope().symbol_id
            for operator in job.net.op:
                if operator.HasField("scope_symbol_id"):
                    operator.scope_symbol_id = scope
            self._graph = internal.nn.graph.CNNGraph(
                name,
                job.SerializeToString(),
                internal.JobBuildAndInferCtx_GetCurrentJobId(),
                self._session._session_ctx,
            )
            with internal.lazy_mode.guard(False):
                self._outputs = convert_to_tensor_tuple([_empty(slot, program.device) for slot in program.outputs])
            internal.nn.graph.SoftSyncNNGraphBuffers(self._outputs, self._graph)
            given = convert_to_tensor_tuple([shared(handed_over(tensor)) for tensor in inputs])
            self._graph.register_input_op_names_and_tensors([slot.name for slot in program.inputs], given)
            self._graph.register_output_op_names_and_tensors([slot.name for slot in program.outputs], self._outputs)
            self._graph.register_variable_op_names_and_tensors(
                [slot.name for slot in program.variables], self._variables
            )
            internal.eager.Sync()
            self._graph.complie_and_init_runtime()

    def reads(self, variables: Sequence[torch.Tensor]) -> bool:
        """Whether it is bound to these very tensors' memory."""
        return all(tensor.data_ptr() == address for tensor, address in zip(variables, self._addresses, strict=True))

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        given = convert_to_tensor_tuple([shared(handed_over(tensor)) for tensor in inputs])
        internal.nn.graph.RunLazyNNGraph(given, self._outputs, self._variables, self._graph)
        internal.eager.Sync()  # inputs may go, and outputs are read, on torch's side
        pairs = zip(self._outputs, self._program.outputs, strict=True)
        return [taken_back(tensor, slot.torch_dtype) for tensor, slot in pairs]


@contextmanager
def _building(name: str, conf: Any = None) -> Iterator[None]:
    """Inside, operators on lazy tensors become parts of a new job."""
    session = session_context.GetDefaultSession()
    session.TryInit()
    if conf is None:
        conf = job_conf_pb2.JobConfigProto()
        conf.job_name = name
        conf.predict_conf.SetInParent()
    failure: list[BaseException] = []
    with graph_build_util.graph_build_context(conf, session):
        # Its own managers swallow what is raised inside some of them: kept, and raised again outside.
        try:
            yield
        except BaseException as error:
            failure.append(error)
            raise
    if failure:
        raise failure[0]


def _samples(examples: Sequence[torch.Tensor]) -> list[Any]:
    """OneFlow tensors of these shapes and dtypes, any values: one piece of memory per dtype for all of them."""
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for example in examples:
        place = (_wide(example.dtype), example.device)
        sizes[place] = max(sizes.get(place, 1), example.numel())
    memory = {
        (dtype, device): flow.zeros(size, dtype=DTYPES[dtype], device=device_of(device))
        for (dtype, device), size in sizes.items()
    }
    return [flow.reshape(memory[_wide(e.dtype), e.device][: e.numel()], tuple(e.shape)) for e in examples]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return {torch.bool: torch.uint8, torch.int16: torch.int32}.get(dtype, dtype)


def _slot(index: int, name: str, fake: torch.Tensor) -> Slot:
    return Slot(index, name, tuple(map(int, fake.shape)), str(fake.dtype).removeprefix("torch."))


def _outputs(capture: Capture) -> list[torch.Tensor]:
    output = next(iter(reversed(capture.graph.graph.nodes)))
    return [node.meta["val"] for node in output.args[0]]


def _empty(slot: Slot, device: str) -> Any:
    return flow.empty(slot.shape, dtype=DTYPES[_wide(slot.torch_dtype)], device=device_of(device))


def _device_of(examples: Sequence[torch.Tensor]) -> str:
    return max(examples, key=torch.Tensor.numel).device.type
