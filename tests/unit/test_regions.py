"""engines/inductor/passes/regions.py: what repeats is compiled once, and computes what it computed."""

from __future__ import annotations

import functools
import itertools
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from releases import since
from torch import nn
from torch._higher_order_ops.invoke_subgraph import invoke_subgraph

from onediff_comfy.capture.export import Capture
from onediff_comfy.engines.inductor import engine as inductor
from onediff_comfy.engines.inductor.engine import InductorEngine
from onediff_comfy.engines.inductor.passes.regions import share_regions

compiled_once = since("2.11", "compiles each block: engine.py, _REGIONS_SINCE")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")


class Block(nn.Module):
    """Some thirty operators, as a transformer's block has."""

    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.own, self.query = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.others, self.out = nn.Linear(6, 2 * width), nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def attend(self, *tokens: torch.Tensor) -> torch.Tensor:
        heads = [t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in tokens]
        return F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        x = x + self.out[0](self.attend(*self.own(self.norms[0](x)).chunk(3, -1)))
        x = x + self.out[1](self.attend(self.query(self.norms[1](x)), *self.others(context).chunk(2, -1)))
        left, right = self.wide(self.norms[2](x)).chunk(2, -1)
        return x + self.narrow(left * F.gelu(right))


class Transformer(nn.Module):
    """Blocks over an image; the last of another width, with two inner blocks."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for width in widths)
        self.first, self.last = nn.Conv2d(4, widths[0], 1), nn.Conv2d(widths[-1], 4, 1)
        pairs = itertools.pairwise(widths)
        self.between = nn.ModuleList(nn.Linear(a, b) if a != b else nn.Identity() for a, b in pairs)

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        h, w = x.shape[2:]
        tokens = self.first(x).flatten(2).transpose(1, 2)
        for index, block in enumerate(self.blocks):
            tokens = block(tokens, context)
            if index < len(self.between):
                tokens = self.between[index](tokens)
        return self.last(tokens.transpose(1, 2).unflatten(2, (h, w)))


@pytest.fixture
def captured_of(capture_of: Callable[..., Any]) -> Callable[..., Any]:
    """Captures a module of an image and a context."""
    return functools.partial(capture_of, multiple=2, x=torch.zeros(2, 4, 8, 12), context=torch.zeros(2, 5, 6))


def _calls(graph: torch.fx.GraphModule) -> Counter[str]:
    return Counter(str(node.target) for node in graph.graph.nodes if node.op == "get_attr")


def _inputs(captured: Any, context: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
    binding = captured.capture.binding
    return binding.feed(captured.target.weights(binding.weight_names, torch.device("cpu")), (context, x))


@pytest.mark.parametrize("general", [False, True])
def test_equal_blocks_are_one_function(captured_of: Callable[..., Any], general: bool) -> None:
    captured = captured_of(Transformer((16, 16, 16, 16, 32, 32, 32, 8)), general=general).capture
    shared = share_regions(captured.graph)
    assert sorted(_calls(shared).values()) == [3, 4]  # the one of width 8 is alone
    assert len(shared.graph.nodes) < len(captured.graph.graph.nodes) / 2
    assert not _calls(captured.graph), "the capture itself must stay as it was"


def test_it_computes_the_same_with_other_weights_in_every_place(captured_of: Callable[..., Any]) -> None:
    module = Transformer((16, 16, 16, 16))
    captured = captured_of(module, general=True)
    shared = share_regions(captured.capture.graph)
    for size in ((2, 4, 8, 12), (3, 4, 6, 4)):
        x, context = torch.randn(size), torch.randn(size[0], 7, 6)
        inputs = _inputs(captured, context, x)
        with torch.no_grad():
            torch.testing.assert_close(shared(*inputs)[0], captured.run(context, x), rtol=0, atol=0)
            torch.testing.assert_close(shared(*inputs)[0], module(x, context))


def test_blocks_that_compute_something_else_are_not_confused(captured_of: Callable[..., Any]) -> None:
    module = Transformer((16, 16, 16, 16, 16, 16))
    for index in (1, 3, 5):
        module.blocks[index].heads = 4
    module.blocks[4].norms[0].eps = 1e-3
    captured = captured_of(module, general=True)
    shared = share_regions(captured.capture.graph)
    assert list(_calls(shared).values()) == [3]  # those of four heads; of the other three one has another eps
    x, context = torch.randn(2, 4, 8, 12), torch.randn(2, 5, 6)
    inputs = _inputs(captured, context, x)
    with torch.no_grad():
        torch.testing.assert_close(shared(*inputs)[0], module(x, context))


class _WithContext(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + context.mean()


class _Views(nn.Module):
    """Gives a view of what it was given, which a subgraph must not return."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(16):  # an even number of times: all of them see the same sizes
            x = x.transpose(1, 2).unsqueeze(0).squeeze(0)
        return x


def _convolutions() -> nn.Module:
    return nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1) for _ in range(30)))


@pytest.mark.parametrize(
    "module",
    [
        pytest.param(Transformer((16, 16)), id="twice only"),
        pytest.param(_WithContext(nn.Sequential(*(_convolutions() for _ in range(4)))), id="convolutions"),
        pytest.param(_WithContext(nn.Sequential(*(_Views() for _ in range(4)))), id="views"),
    ],
)
def test_what_cannot_be_shared_or_is_rare_is_left_alone(captured_of: Callable[..., Any], module: nn.Module) -> None:
    graph = captured_of(module).capture.graph
    assert share_regions(graph) is graph


_LOADED = """
import pickle, sys, torch
from onediff_comfy.engines.inductor.engine import InductorEngine
parts, binding, shapes, inputs, expected = pickle.load(open(sys.argv[1], "rb"))
graph = InductorEngine().from_parts(binding, shapes, parts)
(actual,) = graph.artifact(*inputs)
torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
print("equal")
"""


@compiled_once
def test_inductor_compiles_saves_and_loads_them(
    captured_of: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One artifact for all sizes, and the same in a process that has no compiler cache."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "here"))
    module = Transformer((16, 16, 16, 16))
    made = captured_of(module, general=True)
    captured, engine = made.capture, InductorEngine()
    compiled, traced = [], []
    whole, trace = inductor._compile, type(invoke_subgraph).gen_schema
    monkeypatch.setattr(inductor, "_compile", lambda c, graph: compiled.append(graph) or whole(c, graph))
    monkeypatch.setattr(type(invoke_subgraph), "gen_schema", lambda *given: traced.append(given) or trace(*given))
    graph = engine.compile(captured)
    assert [bool(_calls(each)) for each in compiled] == [True]
    assert len(traced) <= 2  # by PyTorch's analysis, and as Inductor is given it; there are four calls
    with torch.no_grad():
        for size in ((2, 4, 8, 12), (3, 4, 6, 4), (1, 4, 10, 8)):
            x, context = torch.randn(size), torch.randn(size[0], 7, 6)
            weights = dict(module.named_parameters())
            (actual,) = graph([weights[name] for name in captured.binding.weight_names], (context, x))
            torch.testing.assert_close(actual, module(x, context))
    inputs = [tensor.detach() for tensor in _inputs(made, context, x)]
    saved = (engine.to_parts(graph), captured.binding, captured.shapes, inputs, actual)
    (tmp_path / "saved").write_bytes(pickle.dumps(saved))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "there"))
    run = subprocess.run([sys.executable, "-c", _LOADED, tmp_path / "saved"], capture_output=True, text=True)
    assert run.stdout.strip() == "equal", run.stderr


class Controlled(nn.Module):
    """Blocks over an image to which others are added, of whose sizes each is found to be the image's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(4, 16, 1), nn.Conv2d(16, 4, 1)
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))

    def forward(
        self, x: torch.Tensor, context: torch.Tensor, deep: torch.Tensor, control: torch.Tensor
    ) -> torch.Tensor:
        hidden = self.first(x) + control
        small = F.avg_pool2d(hidden, 2) + deep
        tokens = hidden.flatten(2).transpose(1, 2)
        for block in self.blocks:
            tokens = block(tokens, context)
        hidden = tokens.transpose(1, 2).reshape(hidden.shape)
        return self.last(hidden + F.interpolate(small, scale_factor=2.0))


@compiled_once
def test_inputs_whose_sizes_are_each_others_do_not_keep_it_from_compiling(capture_of: Callable[..., Any]) -> None:
    """Of a UNet under the control of a ControlNet. Its blocks were compiled one by one, for minutes."""
    tensors = {
        "x": torch.randn(2, 4, 8, 12),
        "context": torch.randn(2, 5, 6),
        "deep": torch.randn(2, 16, 4, 6),
        "control": torch.randn(2, 16, 8, 12),
    }
    module = Controlled().eval()
    captured = capture_of(module, multiple=2, general=True, **tensors)
    assert captured.capture.shapes.general
    artifact = inductor._compile_in_regions(captured.capture, captured.capture.graph)
    assert artifact is not None
    binding = captured.capture.binding
    weights = captured.target.weights(binding.weight_names, torch.device("cpu"))
    with torch.no_grad():
        (output,) = artifact(*binding.feed(weights, [tensors[name] for name in sorted(tensors)]))
        torch.testing.assert_close(output, module(**tensors), rtol=1e-4, atol=1e-5)


@compiled_once
def test_where_it_fails_the_graph_is_compiled_as_it_is(
    captured_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    captured = captured_of(Transformer((16, 16, 16))).capture
    seen = []

    def compile_(_capture: Capture, graph: torch.fx.GraphModule) -> str:
        seen.append(graph)
        if graph is not captured.graph:
            raise RuntimeError("no subgraphs today")
        return "whole"

    monkeypatch.setattr(inductor, "_compile", compile_)
    with caplog.at_level("INFO"):
        assert InductorEngine().compile(captured).artifact == "whole"
    assert len(seen) == 2
    assert "no subgraphs today" in caplog.text


def test_an_older_torch_gets_whole_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.7.1+cpu")
    assert InductorEngine().options()["regions"] == "none"
    monkeypatch.setattr(torch, "__version__", "2.11.0a0+git123")
    assert InductorEngine().options()["regions"] == "shared"
