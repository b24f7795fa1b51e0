"""OneFlow graphs. The lowering from ATen is not written yet; the engine says so when it is chosen."""

from __future__ import annotations

import importlib.util

import torch

from ...capture.trace import Capture
from ..base import CompiledGraph, Engine, EngineError


class OneFlowEngine(Engine):
    name = "oneflow"
    general = False  # a OneFlow graph is for one set of sizes
    recorded = False

    def unavailable(self, device: torch.device) -> str | None:
        if importlib.util.find_spec("oneflow") is None:
            return "OneFlow is not installed (its wheel exists for Python 3.10 and older)"
        return "this version of onediff-comfy cannot lower a model to OneFlow yet; choose inductor"

    def compile(self, capture: Capture) -> CompiledGraph:
        raise EngineError("this version of onediff-comfy cannot lower a model to OneFlow yet")
