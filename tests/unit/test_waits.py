"""capture/tracing/: graphs that wait for the device in their middle are known, for they cannot be replayed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from onediff_comfy.cache.keys import GraphKey, compiler
from onediff_comfy.cache.memory import GraphCache
from onediff_comfy.cache.serialization import GraphOrigin, from_artifact, to_artifact
from onediff_comfy.capture.export import Binding, Capture
from onediff_comfy.capture.shape_range import ShapeRange
from onediff_comfy.compilation.library import GraphLibrary
from onediff_comfy.engines.base import CompiledGraph
from onediff_comfy.engines.eager import EagerEngine
from onediff_comfy.metrics import Metrics
from onediff_comfy.runtime.cuda_graphs import RecordedGraph
from onediff_comfy.store.artifact import Artifact

CPU = torch.device("cpu")
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
        pytest.param(lambda x: x[torch.tensor([1, 0])], False, id="positions"),
        pytest.param(lambda x: x.repeat_interleave(2, 0), False, id="repeated"),
        pytest.param(lambda x: x.softmax(-1), False, id="plain"),
    ],
)
def test_graphs_that_wait_are_known(capture_of: Any, function: Callable[..., torch.Tensor], waits: bool) -> None:
    capture = capture_of(Net(function), torch.randn(2, 4)).capture
    assert capture.binding.waits is waits
    assert from_artifact(kept(capture), ENGINE, CPU).binding.waits is waits


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
