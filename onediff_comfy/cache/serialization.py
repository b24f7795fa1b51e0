"""A compiled graph as an artifact, and back."""

from __future__ import annotations

import datetime
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import safetensors.torch
import torch
import torch.utils._pytree as pytree

from ..capture.export import Binding, GraphInput
from ..capture.shape_range import ShapeRange
from ..capture.tracing.opaque_function import call_option
from ..engines.base import CompiledGraph, Engine
from ..runtime.step_cache import ReusableGraph
from ..store.artifact import LONGEST_OPTION, MOST_OPTIONS, Artifact, Manifest, Part
from ..store.trust import VerifiedArtifact
from .keys import GraphKey

_CONSTANTS = "constants"
_ENGINE = "engine/"
_BRIEF = "brief/"
_BRIEF_BINDING = "brief"


@dataclass(frozen=True)
class GraphOrigin:
    """Where a graph came from: for people who look at it, and for finding it again without a capture.

    Attributes:
        target: class name of the module.
        signature: canonical lines of the call's signature.
        call_key: of the call that it was captured for.
        options_read: what the call reads, by who reads it (see ``reader_of``).
    """

    target: str
    signature: Sequence[str]
    call_key: str
    options_read: Mapping[str, Collection[str]]


def to_artifact(
    graph: CompiledGraph, engine: Engine, key: GraphKey, origin: GraphOrigin, compile_seconds: float
) -> Artifact | None:
    """Return the graph as an unsealed artifact; None if this engine's graphs are not worth keeping."""
    data: dict[str, bytes] = {}
    for prefix, part in _graphs(graph).items():
        parts = engine.to_parts(part)
        if parts is None:
            return None
        data.update((prefix + name, content) for name, content in parts.items())
    data[_CONSTANTS] = safetensors.torch.save(dict(graph.binding.constants))
    manifest = Manifest(
        key=key.digest,
        capture=key.capture,
        target=origin.target,
        engine=key.compiler.engine,
        options=dict(key.compiler.options),
        environment=dict(key.compiler.environment),
        signature=list(origin.signature),
        shapes=graph.shapes.to_json(),
        binding=_bindings_to_json(graph),
        calls=[origin.call_key],
        # What is left out is found out by a trace, on another machine. A manifest that is too long would be no graph.
        options_read={
            reader: sorted(name for name in names if len(name) <= LONGEST_OPTION)[:MOST_OPTIONS]
            for reader, names in origin.options_read.items()
        },
        parts={name: Part.of(content) for name, content in data.items()},
        compile_seconds=round(compile_seconds, 3),
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    )
    return Artifact(manifest.to_json(), "", data)


def from_artifact(artifact: VerifiedArtifact, engine: Engine, device: torch.device) -> CompiledGraph:
    """Load an artifact. Runs code that is in it.

    Args:
        artifact: sealed or trusted, with exactly the parts that its manifest names.
        engine: the one that made it.
        device: where the graph computes; its constants go there.
    """
    data = artifact.data
    constants = {name: value.to(device) for name, value in safetensors.torch.load(data[_CONSTANTS]).items()}
    shapes = ShapeRange.from_json(artifact.manifest.shapes)

    def graph(fields: Mapping[str, object], prefix: str) -> CompiledGraph:
        parts = {name.removeprefix(prefix): content for name, content in data.items() if name.startswith(prefix)}
        return engine.from_parts(_binding_from_json(fields, constants), shapes, parts)

    whole = graph(artifact.manifest.binding, _ENGINE)
    brief = artifact.manifest.binding.get(_BRIEF_BINDING)
    return whole if brief is None else ReusableGraph(whole, graph(brief, _BRIEF))


def _graphs(graph: CompiledGraph) -> Mapping[str, CompiledGraph]:
    """Return what an engine has made, by the prefix that its parts get."""
    return {_ENGINE: graph.whole, _BRIEF: graph.brief} if isinstance(graph, ReusableGraph) else {_ENGINE: graph}


def _bindings_to_json(graph: CompiledGraph) -> dict[str, object]:
    fields = _binding_to_json(graph.binding)
    if isinstance(graph, ReusableGraph):
        fields[_BRIEF_BINDING] = _binding_to_json(graph.brief.binding)
    return fields


def _binding_to_json(binding: Binding) -> dict[str, object]:
    fields = {
        "inputs": [[item.kind, item.name, item.index] for item in binding.inputs],
        "output": pytree.treespec_dumps(binding.output),
        "folds": [[index, factor] for index, factor in binding.folds.items()],
        "waits": binding.waits,
    }
    return fields | {"calls_option": True} if binding.calls_option else fields  # versions before take no such field


def _binding_from_json(fields: Mapping[str, object], constants: Mapping[str, torch.Tensor]) -> Binding:
    inputs, output, folds = fields["inputs"], fields["output"], fields["folds"]
    assert isinstance(inputs, list) and isinstance(output, str) and isinstance(folds, list)
    tree = pytree.treespec_loads(output)
    waits = bool(fields.get("waits", False))  # artifacts from before had none that did
    if calls_option := bool(fields.get("calls_option", False)):
        call_option()  # by its name the graph calls it
    return Binding(tuple(GraphInput(*item) for item in inputs), constants, tree, dict(folds), waits, calls_option)
