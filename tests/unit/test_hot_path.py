"""What a call that a graph answers enters of this pack: few functions, in few files."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.hot_path import entries
from onediff_comfy import engines
from onediff_comfy.cache.memory import GraphCache
from onediff_comfy.capture.export import Capture
from onediff_comfy.capture.fingerprint.code_ownership import HostCode
from onediff_comfy.compilation.compile_graph import HostServices
from onediff_comfy.compilation.library import GraphLibrary
from onediff_comfy.engines.base import CompiledGraph
from onediff_comfy.engines.eager import EagerEngine, EagerGraph
from onediff_comfy.metrics import Metrics
from onediff_comfy.serving.dispatcher import Dispatcher

MOST_FUNCTIONS, MOST_FILES = 20, 8
HOST = HostServices(
    identity="host",
    options_name="transformer_options",
    capture_options={},
    check_interrupted=lambda: None,
    refuse=lambda _layers: None,
    code=HostCode(__name__.partition(".")[0]),  # what an extension's code reads is looked at in each call besides
)


class Uncounted(EagerGraph):
    """What an engine's graph enters is the engine's own."""

    def __call__(self, weights: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        profiler = sys.getprofile()
        sys.setprofile(None)
        try:
            return super().__call__(weights, tensors)
        finally:
            sys.setprofile(profiler)


class UncountedEngine(EagerEngine):
    def compile(self, capture: Capture) -> CompiledGraph:
        return Uncounted(capture)


class Net(nn.Module):
    """With children, a buffer and options that it reads some of, as the host's models have."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("shift", torch.ones(8))

    def forward(
        self, x: torch.Tensor, context: torch.Tensor, transformer_options: dict[str, Any] | None = None
    ) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.tanh(self.first(x) + context)) + self.shift
        return out


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], torch.Tensor]]:
    """A call in the middle of a run of many."""
    monkeypatch.setitem(engines.ENGINES, "eager", UncountedEngine())
    module = Net().eval().requires_grad_(False)
    dispatcher = Dispatcher("eager", GraphLibrary(GraphCache(1 << 30), Metrics()), HOST)
    options = {"sigmas": torch.ones(1), "cond_or_uncond": [0, 1], "patches": None}
    x, context = torch.randn(2, 8), torch.randn(2, 8)
    served = 0

    def run() -> torch.Tensor:
        output: torch.Tensor = dispatcher(module, module.forward, (x, context), {"transformer_options": options})
        return output

    with torch.inference_mode():  # as the host's executor runs every node
        dispatcher.begin_run()
        for _ in range(3):
            torch.testing.assert_close(run(), module(x, context))
        served = dispatcher.metrics.snapshot()["served"]
        yield run
    assert dispatcher.metrics.snapshot()["served"] > served


def test_a_hot_call_enters_few_functions_of_few_files(call: Callable[[], torch.Tensor]) -> None:
    functions = entries(call)
    files = {function.partition(":")[0] for function in functions}
    assert len(functions) <= MOST_FUNCTIONS, sorted(functions)
    assert len(files) <= MOST_FILES, sorted(files)
    assert "serving/dispatcher.py:Dispatcher.__call__" in functions
