"""A forward that uses its arguments up, as a UNet takes a ControlNet's residuals off their lists, runs once a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from onediff_comfy.cache.memory import GraphCache
from onediff_comfy.compilation.compile_graph import HostServices
from onediff_comfy.compilation.library import GraphLibrary
from onediff_comfy.engines.eager import EagerGraph
from onediff_comfy.metrics import Metrics
from onediff_comfy.serving.dispatcher import Dispatcher

HOST = HostServices("host", "transformer_options", {}, lambda: None, lambda _layers: None)


class Controlled(torch.nn.Module):
    def forward(self, x: torch.Tensor, control: dict[str, list[torch.Tensor]]) -> torch.Tensor:
        return x + control["output"].pop() if control["output"] else x


def dispatched(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    module, metrics = Controlled(), Metrics()
    dispatcher = Dispatcher("eager", GraphLibrary(GraphCache(1 << 30), metrics), HOST)
    with torch.no_grad():
        output: torch.Tensor = dispatcher(module, module.forward, (x, {"output": [residual]}), {})
    return output


def test_a_graph_that_proves_itself() -> None:
    x, residual = torch.randn(2, 3), torch.randn(2, 3)
    torch.testing.assert_close(dispatched(x, residual), x + residual)


def test_a_graph_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    run = EagerGraph.__call__

    def spoiled(graph: EagerGraph, weights: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> Any:
        return [output * 2 for output in run(graph, weights, tensors)]

    monkeypatch.setattr(EagerGraph, "__call__", spoiled)
    x, residual = torch.randn(2, 3), torch.randn(2, 3)
    torch.testing.assert_close(dispatched(x, residual), x + residual)
