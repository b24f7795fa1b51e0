"""serving/module_guard.py: a call's options, as far as its target reads them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from onediff_comfy.cache.memory import GraphCache
from onediff_comfy.compilation.compile_graph import HostServices
from onediff_comfy.compilation.library import GraphLibrary
from onediff_comfy.metrics import Metrics
from onediff_comfy.serving.decision import Invocation, Request
from onediff_comfy.serving.module_guard import ModuleGuard
from onediff_comfy.serving.run import RunContext, RunReport

HOST = HostServices(
    identity="host",
    options_name="options",
    capture_options={},
    check_interrupted=lambda: None,
    refuse=lambda _layers: None,
)


class Net(nn.Module):
    def forward(self, x: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        return x


def test_each_of_two_requests_learns_what_the_other_found_to_be_read() -> None:
    """Both were made before. One that learnt nothing would be captured again and again."""
    library, module = GraphLibrary(GraphCache(1 << 30), Metrics()), Net()
    run = RunContext(RunReport(Metrics(), library.metrics, lambda _kind, _signature: None))
    guard = ModuleGuard(library, HOST)

    def request() -> Request:
        return guard.request(Invocation(module, module.forward, (torch.ones(1), {"scale": 2}), {}), run)

    first, second = request(), request()
    library.index.learn_option(first.target.fingerprint, "scale")
    assert "scale" not in str(request().call.signature.structure), "the index is not asked at every call"
    for made in (first, second):
        assert "scale" in str(guard.up_to_date(made).call.signature.structure)
    assert request().key == guard.up_to_date(first).key != first.key
