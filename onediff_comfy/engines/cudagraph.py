"""Eager kernels replayed through one CUDA graph: no compilation, no launch overhead.

Worth little where the GPU is the bottleneck and much where launching is: small images, slow CPUs.
A CUDA graph holds addresses. Inputs are copied into addresses of its own; weights are read where
they are, and when one has moved the graph is recorded again, which takes about a second.

Does not share memory between graphs and does not record while another stream works; both belong
to the runner of issue "any size", which will take any engine's graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..capture.trace import Capture
from .base import CompiledGraph, Engine

# cuBLAS and cuDNN choose algorithms and allocate workspaces in the first runs; none may happen in
# a recording.
_WARM_UP_RUNS = 2


class CudaGraph(CompiledGraph):
    def __init__(self, capture: Capture) -> None:
        super().__init__(capture.binding)
        self._module = capture.graph
        self._graph: torch.cuda.CUDAGraph | None = None
        self._addresses: list[int] = []
        self._tensors: list[torch.Tensor] = []
        self._outputs: Sequence[torch.Tensor] = ()
        self._pool_bytes = 0

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._pool_bytes

    def __call__(self, weights: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        addresses = [weight.data_ptr() for weight in weights]
        if self._graph is None or addresses != self._addresses:
            self._record(weights, tensors)
            self._addresses = addresses
        for own, given in zip(self._tensors, tensors, strict=True):
            own.copy_(given)
        assert self._graph is not None
        self._graph.replay()
        # The next replay overwrites the graph's own outputs; a sampler may keep what it is given.
        return [output.clone() for output in self._outputs]

    def _record(self, weights: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
        self._graph, self._outputs = None, ()
        self._tensors = [tensor.clone() for tensor in tensors]
        inputs = self.binding.feed(weights, self._tensors)
        before = torch.cuda.memory_reserved(tensors[0].device)
        side = torch.cuda.Stream(tensors[0].device)
        side.wait_stream(torch.cuda.current_stream(tensors[0].device))
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP_RUNS):
                self._module(*inputs)
        torch.cuda.current_stream(tensors[0].device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            self._outputs = self._module(*inputs)
        self._graph = graph
        self._pool_bytes = max(0, torch.cuda.memory_reserved(tensors[0].device) - before)


class CudaGraphEngine(Engine):
    name = "cudagraph"

    def unavailable(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"CUDA graphs need an NVIDIA GPU, and this model runs on {device.type}"
        return None

    def compile(self, capture: Capture) -> CompiledGraph:
        return CudaGraph(capture)
