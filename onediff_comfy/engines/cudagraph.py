"""Eager kernels replayed through CUDA graphs: no compilation, no launch overhead.

Worth little where the GPU is the bottleneck and much where launching is: small images, slow CPUs.
The graph is the captured one, run operator by operator; recording and replaying it is what happens to
every engine's graphs on a GPU (``runtime/cuda_graphs.py``).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..capture.export import Capture
from ..capture.rewrites.op_substitutions import FOR_RECORDINGS, Forms
from ..messages import Message, message
from .base import CompiledGraph, Engine
from .eager import EagerGraph


class CudaGraphEngine(Engine):
    name = "cudagraph"
    general = True
    recorded = True
    fp8 = False  # rounding that nothing fuses costs more than the products save

    def unavailable(self, device: torch.device) -> Message | None:
        if device.type != "cuda":
            return message("CUDA graphs need an NVIDIA GPU, and this model runs on {device}", device=device.type)
        return None

    def forms(self) -> Forms:
        return FOR_RECORDINGS

    def options(self) -> Mapping[str, str]:
        return {"numbers": "filled in"}

    def compile(self, capture: Capture) -> CompiledGraph:
        return EagerGraph(capture)
