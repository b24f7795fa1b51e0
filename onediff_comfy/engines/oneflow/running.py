"""A program made ready to run: memory of its own, and the weights that it reads."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import oneflow as flow
import oneflow._oneflow_internal as internal
import torch
from oneflow.core.job import job_pb2
from oneflow.framework.tensor_tuple_util import convert_to_tensor_tuple

from . import session
from .lowering.table import DTYPES, device_of
from .program import Program
from .sharing import borrowed, carried_as, handed_over, shared, taken_back


class Running:
    """A program bound to tensors where they lie now. Made and called inside ``session.exclusive``.

    OneFlow fixes addresses when a job is made ready: it reads each variable in torch's memory, which it does not
    own. ``reads`` is asked before every call; once a tensor lies elsewhere, this is of no use any more.

    Args:
        program: what to run.
        variables: one tensor per variable, shareable (``sharing.is_shareable``).
        inputs: one tensor per input, of any values.
        device: where it computes.

    Attributes:
        nbytes: memory that it holds, as far as that was seen when it was made ready and ran first.
    """

    def __init__(
        self,
        program: Program,
        variables: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        device: torch.device,
    ) -> None:
        self.nbytes = 0
        self._before: int | None = session.memory_in_use(device)
        self._program = program
        self._device = device
        self._addresses = [tensor.data_ptr() for tensor in variables]
        self._variables = convert_to_tensor_tuple([borrowed(tensor) for tensor in variables])
        job = job_pb2.Job()
        job.ParseFromString(program.job)
        name = f"onediff_{uuid.uuid4().hex}"
        # The session is kept: without it the interpreter would wait for its graphs for ever at its end.
        with session.building(name, job.job_conf) as self._session:
            scope = internal.GetCurrentScope().symbol_id
            for operator in job.net.op:
                if operator.HasField("scope_symbol_id"):
                    operator.scope_symbol_id = scope
            job_id = internal.JobBuildAndInferCtx_GetCurrentJobId()
            self._graph = internal.nn.graph.CNNGraph(name, job.SerializeToString(), job_id, self._session._session_ctx)
            session.watch(self._graph)
            with internal.lazy_mode.guard(False):
                self._outputs = convert_to_tensor_tuple(
                    [
                        flow.empty(s.shape, dtype=DTYPES[carried_as(s.torch_dtype)], device=device_of(device))
                        for s in program.outputs
                    ]
                )
            internal.nn.graph.SoftSyncNNGraphBuffers(self._outputs, self._graph)
            given = convert_to_tensor_tuple([shared(handed_over(tensor)) for tensor in inputs])
            self._graph.register_input_op_names_and_tensors([slot.name for slot in program.inputs], given)
            self._graph.register_output_op_names_and_tensors([slot.name for slot in program.outputs], self._outputs)
            self._graph.register_variable_op_names_and_tensors(
                [slot.name for slot in program.variables], self._variables
            )
            internal.eager.Sync()
            with session.considerate_threads():
                self._graph.complie_and_init_runtime()

    def reads(self, variables: Sequence[torch.Tensor]) -> bool:
        """Whether these tensors lie where it reads."""
        return all(t.data_ptr() == address for t, address in zip(variables, self._addresses, strict=True))

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Its outputs, as tensors of torch's own."""
        given = convert_to_tensor_tuple([shared(handed_over(tensor)) for tensor in inputs])
        self._wait_for_torch()
        internal.nn.graph.RunLazyNNGraph(given, self._outputs, self._variables, self._graph)
        internal.eager.Sync()  # inputs may go now, and outputs are about to be read
        self._wait_for_torch()
        pairs = zip(self._outputs, self._program.outputs, strict=True)
        outputs = [taken_back(tensor, slot.torch_dtype) for tensor, slot in pairs]
        if self._before is not None:  # most memory is taken when it is first written to
            self.nbytes = max(0, session.memory_in_use(self._device) - self._before)
            self._before = None
        return outputs

    def _wait_for_torch(self) -> None:
        # OneFlow's stream waits for the default stream and the other way round, and for no other stream.
        if self._device.type == "cuda" and torch.cuda.current_stream() != torch.cuda.default_stream():
            torch.cuda.synchronize(self._device)
