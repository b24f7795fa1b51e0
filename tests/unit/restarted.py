"""Serves calls from a folder of kept graphs and prints what was done for each. Run by ``test_restarted.py``.

    python tests/unit/restarted.py FOLDER SCALE...

Each SCALE is the value, while one call is made, of a table that the module's forward reads.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onediff_comfy import engines
from onediff_comfy.cache.memory import GraphCache
from onediff_comfy.capture.export import Binding, Capture
from onediff_comfy.capture.shape_range import ShapeRange
from onediff_comfy.compilation.compile_graph import HostServices
from onediff_comfy.compilation.library import GraphLibrary
from onediff_comfy.engines.base import CompiledGraph
from onediff_comfy.engines.eager import EagerEngine
from onediff_comfy.metrics import Metrics
from onediff_comfy.serving.dispatcher import Dispatcher
from onediff_comfy.store.store import GraphStore
from onediff_comfy.store.trust import Trust

TABLE = {"scale": 1.0}
HOST = HostServices("host", "transformer_options", {}, lambda: None, lambda _layers: None)


class _Graph(CompiledGraph):
    """A captured graph as Python code, which can be kept."""

    def __init__(self, binding: Binding, shapes: ShapeRange, code: str) -> None:
        super().__init__(binding, shapes)
        self.code = code
        names: dict[str, Any] = {"torch": torch, "device": torch.device}
        exec(code, names)
        self._forward = names["forward"]

    def __call__(self, weights: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        made: Sequence[torch.Tensor] = self._forward(None, *self.binding.feed(weights, tensors))
        return made


class Keeping(EagerEngine):
    """The eager engine, with graphs that can be kept. It takes a tenth of Inductor's time."""

    def compile(self, capture: Capture) -> CompiledGraph:
        return _Graph(capture.binding, capture.shapes, capture.graph.graph.python_code("self").src)

    def to_parts(self, graph: CompiledGraph) -> Mapping[str, bytes]:
        assert isinstance(graph, _Graph)
        return {"code": graph.code.encode()}

    def from_parts(self, binding: Binding, shapes: ShapeRange, parts: Mapping[str, bytes]) -> CompiledGraph:
        return _Graph(binding, shapes, bytes(parts["code"]).decode())


class Net(nn.Module):
    """Its graph calls ``torch.sym_max``, a Python function."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        padded = nn.functional.pad(x, (0, 0, 0, torch.sym_max(x.shape[1], 9)))
        return self.linear(padded) * TABLE["scale"]


def main() -> None:
    folder, *scales = sys.argv[1:]
    torch.set_num_threads(1)
    engines.ENGINES["eager"] = Keeping()
    module = Net().eval().requires_grad_(False)
    printed = []
    for scale in scales:
        TABLE["scale"] = float(scale)
        store = GraphStore(Path(folder) / "cache", Trust(Path(folder) / "config"))
        library = GraphLibrary(GraphCache(1 << 30), Metrics(), store)
        x = torch.randn(2, 6, 4)
        made = Dispatcher("eager", library, HOST)(module, module.forward, (x,), {})
        torch.testing.assert_close(made, module(x), rtol=1e-5, atol=1e-5)
        printed.append(
            {name: value for name, value in library.metrics.snapshot().items() if value and type(value) is int}
        )
    json.dump(printed, sys.stdout)


if __name__ == "__main__":
    main()
