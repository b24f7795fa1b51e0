"""capture/tracing/: graphs that wait for the device in their middle are known, for they cannot be replayed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.files import read, results_folder
from onediff_comfy import engines
from onediff_comfy.cache.keys import GraphKey, compiler
from onediff_comfy.cache.memory import GraphCache
from onediff_comfy.cache.serialization import GraphOrigin, from_artifact, to_artifact
from onediff_comfy.capture.export import Binding, Capture
from onediff_comfy.capture.shape_range import ShapeRange
from onediff_comfy.capture.tracing.operator_traits import waits_for_values, waits_unless_fused
from onediff_comfy.compilation.compile_graph import HostServices
from onediff_comfy.compilation.library import GraphLibrary
from onediff_comfy.engines.base import CompiledGraph
from onediff_comfy.engines.eager import EagerEngine
from onediff_comfy.metrics import Metrics
from onediff_comfy.runtime.cuda_graphs import RecordedGraph
from onediff_comfy.serving.dispatcher import Dispatcher
from onediff_comfy.store.artifact import Artifact

CPU = torch.device("cpu")
HOST = HostServices("host", "transformer_options", {}, lambda: None, lambda _layers: None)
ORIGIN = GraphOrigin("Net", (), "c" * 64, {})


class Net(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(x))


class Empty(CompiledGraph):
    """A graph of which nothing but the description matters."""

    def __call__(self, weights: Any, tensors: Any) -> Any:
        raise NotImplementedError


class Engine(EagerEngine):
    """Its graphs are kept, and replayed through CUDA graphs where they are on a GPU."""

    recorded = True

    def compile(self, capture: Capture) -> CompiledGraph:
        return Empty(capture.binding, capture.shapes)

    def to_parts(self, graph: CompiledGraph) -> Mapping[str, bytes]:
        return {"nothing": b""}

    def from_parts(self, binding: Binding, shapes: ShapeRange, parts: Mapping[str, bytes]) -> CompiledGraph:
        return Empty(binding, shapes)


ENGINE = Engine()


def key_of(capture: Capture) -> GraphKey:
    return GraphKey(capture.digest, compiler(ENGINE, CPU))


def kept(capture: Capture) -> Artifact:
    """The artifact of a graph made of ``capture``."""
    artifact = to_artifact(ENGINE.compile(capture), ENGINE, key_of(capture), ORIGIN, 0.0)
    assert artifact is not None
    return artifact


@pytest.mark.parametrize(
    ("function", "waits"),
    [
        pytest.param(lambda x: x[x > 0].sum(), True, id="mask"),
        pytest.param(lambda x: torch.nonzero(x).sum(), True, id="nonzero"),
        pytest.param(lambda x: x.index_put((x[:, 0] > 0,), x[0]), True, id="written by mask"),
        pytest.param(lambda x: torch.linalg.inv(x @ x.T + torch.eye(2)), True, id="inverse"),
        pytest.param(lambda x: x.index_put((x > 0,), torch.tensor(0.0)), False, id="filled by mask"),
        pytest.param(lambda x: x.index_put((torch.tensor([1, 0]),), x), False, id="written at positions"),
        pytest.param(lambda x: torch.linalg.vector_norm(x), False, id="norm"),
        pytest.param(lambda x: x[torch.tensor([1, 0])], False, id="positions"),
        pytest.param(lambda x: x.repeat_interleave(2, 0), False, id="repeated"),
        pytest.param(lambda x: x.softmax(-1), False, id="plain"),
    ],
)
def test_graphs_that_wait_are_known(capture_of: Any, function: Callable[..., torch.Tensor], waits: bool) -> None:
    capture = capture_of(Net(function), torch.randn(2, 4)).capture
    assert capture.binding.waits is waits
    assert from_artifact(kept(capture), ENGINE, CPU).binding.waits is waits


@pytest.mark.parametrize(
    ("function", "waits"),
    [
        pytest.param(lambda x: x.masked_fill(x > 0, x.sum()), True, id="filled with a tensor"),
        pytest.param(lambda x: x.index_put((x > 0,), torch.tensor(0.0)), True, id="filled by mask"),
        pytest.param(lambda x: torch.linspace(x[0, 0], 1.0, 4), True, id="linspace"),
        pytest.param(lambda x: x.masked_fill(x > 0, 1.0), False, id="filled with a number"),
        pytest.param(lambda x: x.index_put((torch.tensor([1, 0]),), x), False, id="written at positions"),
    ],
)
@pytest.mark.parametrize("fuses", [False, True])
def test_what_waits_by_pytorchs_own_kernels_is_not_recorded_where_these_run(
    monkeypatch: pytest.MonkeyPatch, function: Callable[..., torch.Tensor], waits: bool, fuses: bool
) -> None:
    captures: list[Capture] = []

    class Watching(EagerEngine):
        def compile(self, capture: Capture) -> CompiledGraph:
            captures.append(capture)
            return super().compile(capture)

    Watching.fuses = fuses
    monkeypatch.setitem(engines.ENGINES, "eager", Watching())
    dispatcher = Dispatcher("eager", GraphLibrary(GraphCache(1 << 30), Metrics()), HOST)
    module = Net(function)
    with torch.no_grad():
        dispatcher(module, module.forward, (torch.randn(2, 4),), {})
    assert [captured.binding.waits for captured in captures] == [waits and not fuses]


def test_every_operator_that_ended_a_recording_on_a_gpu_is_known() -> None:
    ended = read(results_folder() / "2026-11-27-h200-recordable-operators.json")["ended"]
    assert len(ended) > 40
    for name, operators in ended.items():
        if name in _ENDED_BY_OTHERS:
            continue
        own = getattr(torch.ops.aten, name.replace(".", "_"), None)  # as a capture has it, of which those are the parts
        assert any(map(_known, operators)), name
        assert own is None or "default" not in own.overloads() or not name.startswith("linalg") or _known(own.default)


# The graph of an earlier sample was destroyed in the recording of these; the last draws random numbers, so no model
# with it is captured.
_ENDED_BY_OTHERS = ("masked.logsumexp", "masked.std", "nn.functional.fractional_max_pool3d")


def _known(operator: str | torch._ops.OpOverload) -> bool:
    """Return True if a graph that calls an operator, named as PyTorch prints it, is recorded by no engine or by one."""
    if isinstance(operator, str):
        _, packet, overload = operator.split(".")
        operator = getattr(getattr(torch.ops.aten, packet), overload)
    node = torch.fx.Graph().call_function(operator)  # type: ignore[arg-type]
    return operator is not torch.ops.aten.index.Tensor and (waits_for_values(node) or waits_unless_fused(node))


def test_artifacts_from_before_do_not_wait(capture_of: Any) -> None:
    capture = capture_of(Net(torch.relu), torch.randn(2, 4)).capture
    artifact = kept(capture)
    fields = dict(artifact.manifest.binding)
    del fields["waits"]
    before = Artifact(dataclasses.replace(artifact.manifest, binding=fields).to_json(), "", artifact.data)
    assert from_artifact(before, ENGINE, CPU).binding == capture.binding


@pytest.mark.parametrize(("function", "recorded"), [(lambda x: x[x > 0], False), (torch.relu, True)])
def test_they_are_not_recorded(
    capture_of: Any, function: Callable[[torch.Tensor], torch.Tensor], recorded: bool
) -> None:
    library = GraphLibrary(GraphCache(1 << 30), Metrics())
    capture, gpu = capture_of(Net(function), torch.randn(2, 4)).capture, torch.device("cuda")
    made = library.builder.compiled(key_of(capture), capture, ENGINE, gpu, ORIGIN, lambda _waited: None)
    assert isinstance(made, RecordedGraph) is recorded
    assert library.cache.get(key_of(capture).digest) is made
