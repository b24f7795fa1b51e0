"""docs/engines.md: the engine that is written there serves a model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from onediff_comfy import engines
from onediff_comfy.cache.memory import GraphCache
from onediff_comfy.compilation.compile_graph import HostServices
from onediff_comfy.compilation.library import GraphLibrary
from onediff_comfy.engines.base import Engine
from onediff_comfy.metrics import Metrics
from onediff_comfy.serving.dispatcher import Dispatcher

HOST = HostServices("host", "transformer_options", {}, lambda: None, lambda _layers: None)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(self.linear(x)) + 1


@pytest.fixture
def page(root: Path) -> str:
    return (root / "docs" / "engines.md").read_text()


def test_the_page_names_every_method_of_an_engine(page: str) -> None:
    methods = {name for name in vars(Engine) if not name.startswith("_") and name != "name"}
    assert [name for name in methods if f"`{name}" not in page] == []


def test_the_engine_on_the_page_serves_a_model(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    written: dict[str, Any] = {}
    exec("from __future__ import annotations\n" + code, written)
    kernels_run: list[torch.Size] = []

    def counted(x: torch.Tensor) -> torch.Tensor:
        kernels_run.append(x.shape)
        return written["fast_silu"](x)

    written["KERNELS"][torch.ops.aten.silu.default] = counted
    engine = written["KernelsEngine"]()
    monkeypatch.setitem(engines.ENGINES, engine.name, engine)
    monkeypatch.setattr(engines, "ENGINE_NAMES", (*engines.ENGINE_NAMES, engine.name))
    metrics = Metrics()
    dispatcher, module = Dispatcher(engine.name, GraphLibrary(GraphCache(1 << 30), metrics), HOST), Net()
    with torch.no_grad():
        for rows in (8, 8, 12):
            x = torch.randn(rows, 4)
            module.linear.weight = nn.Parameter(torch.randn(4, 4))  # no weight may be in the graph
            torch.testing.assert_close(dispatcher(module, module.forward, (x,), {}), module(x))
    counted_now = metrics.snapshot()
    assert (counted_now["served"], counted_now["fallbacks"]) == (3, {})
    assert [graph["engine"] for graph in counted_now["graphs"]] == ["kernels"], "one graph for both sizes"
    assert kernels_run == [torch.Size((8, 4)), torch.Size((8, 4)), torch.Size((12, 4))]
