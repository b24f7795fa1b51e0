"""Where a workflow's nodes stand in the editor: in groups from left to right, so that every wire runs one way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Node = dict[str, Any]
"""A node in the editor's form: ``pos`` is the corner of its body, below the title; ``size`` is the body's."""

_BLUE, _GREEN = "#3f789e", "#4e7a35"
_TITLE = 30  # the height of a node's title, and of a group's
_GAP = 40  # between nodes, and between groups
_MARGIN = 20  # inside a group


@dataclass(frozen=True)
class _Group:
    """Nodes that belong together, by their types. What is named earlier gets the place further up, of groups too."""

    title: str
    colour: str
    types: tuple[str, ...]


def _group(title: str, colour: str, *types: str) -> _Group:
    return _Group(title, colour, types)


_GROUPS = (
    _group(
        "Load",
        _BLUE,
        *("CheckpointLoaderSimple", "UNETLoader", "CLIPLoader", "DualCLIPLoader", "VAELoader"),
        *("ControlNetLoader", "LoadImage"),
    ),
    _group("Sizes", _GREEN, "OneDiffShapeBucket"),
    _group("Change the model", _BLUE, "LoraLoader", "ModelSamplingSD3"),
    _group(
        "OneDiff: accelerate",
        _GREEN,
        "OneDiffOptimize",
        *("OneDiffModelSpeedup", "OneDiffVAESpeedup", "OneDiffControlNetSpeedup", "OneDiffCLIPSpeedup"),
        "OneDiffLoadCompiledGraph",
    ),
    _group("OneDiff: reuse", _GREEN, "OneDiffStepCache"),
    _group(
        "Prompt and size",
        _BLUE,
        *("CLIPTextEncode", "EmptyLatentImage", "EmptySD3LatentImage", "EmptyHunyuanLatentVideo"),
    ),
    _group("OneDiff: prepare", _GREEN, "OneDiffWarmUp"),
    _group(
        "Condition",
        _BLUE,
        *("ControlNetApplyAdvanced", "FluxGuidance", "VAEEncode", "VAEEncodeForInpaint"),
    ),
    _group(
        "Sample",
        _BLUE,
        *("KSampler", "LatentUpscaleBy", "RandomNoise", "BasicGuider", "KSamplerSelect", "BasicScheduler"),
        "SamplerCustomAdvanced",
    ),
    _group("Result", _BLUE, "VAEDecode", "VAEDecodeTiled", "SaveImage", "CreateVideo", "SaveVideo"),
    _group("OneDiff: keep", _GREEN, "OneDiffSaveCompiledGraph"),
    _group("OneDiff: what happened", _GREEN, "OneDiffReport"),
)


@dataclass(frozen=True)
class _Box:
    left: float
    top: float
    right: float
    bottom: float


def place(nodes: Sequence[Node], links: Iterable[Sequence[Any]], note: Node) -> list[dict[str, Any]]:
    """Give every node its ``pos``, and return the groups in the editor's form.

    A group stands right of all that feed it, and below those whose room it would take; so does a node in its group.
    Types that are in no group come last, in a group "More".

    Args:
        nodes: with their ``size``; ``pos`` is written.
        links: of the editor's form.
        note: stands at the top left, above what is loaded.
    """
    feeders: dict[int, set[int]] = {node["id"]: set() for node in nodes}
    for _, source, _, target, *_ in links:
        feeders[target].add(source)
    note["pos"] = [0, 0]
    taken = [_Box(-_MARGIN, -_TITLE, note["size"][0] + _MARGIN, note["size"][1])]
    boxes: dict[int, _Box] = {}  # by node, the box of its group
    groups = []
    known = {kind for group in _GROUPS for kind in group.types}
    others = _group("More", _BLUE, *dict.fromkeys(node["type"] for node in nodes if node["type"] not in known))
    for group in (*_GROUPS, others):
        members = [node for kind in group.types for node in nodes if node["type"] == kind]
        if not members:
            continue
        columns = _columns(members, feeders)
        left = max(
            (boxes[f].right + _GAP for node in members for f in feeders[node["id"]] if f in boxes), default=-_MARGIN
        )
        width = sum(_width(column) for column in columns) + _GAP * (len(columns) - 1) + 2 * _MARGIN
        height = max(_height(column) for column in columns) + _TITLE + 2 * _MARGIN
        top = max((b.bottom + _GAP for b in taken if b.left < left + width and left < b.right), default=-_TITLE)
        box = _Box(left, top, left + width, top + height)
        taken.append(box)
        boxes |= {node["id"]: box for node in members}
        _place_columns(columns, left + _MARGIN, top + _TITLE + _MARGIN)
        bounding = [left, top, width, height]
        groups.append({"title": group.title, "bounding": bounding, "color": group.colour, "font_size": 24, "flags": {}})
    return groups


def _columns(members: Sequence[Node], feeders: Mapping[int, set[int]]) -> list[list[Node]]:
    """The nodes of a group by how many others of it come before them."""
    known = {node["id"] for node in members}

    def depth(node: int) -> int:
        return max((depth(feeder) + 1 for feeder in feeders[node] if feeder in known), default=0)

    columns: dict[int, list[Node]] = {}
    for node in members:
        columns.setdefault(depth(node["id"]), []).append(node)
    return [columns[number] for number in sorted(columns)]


def _place_columns(columns: Iterable[Sequence[Node]], left: float, top: float) -> None:
    for column in columns:
        below = top
        for node in column:
            node["pos"] = [left, below + _TITLE]
            below += _TITLE + node["size"][1] + _GAP
        left += _width(column) + _GAP


def _width(column: Sequence[Node]) -> float:
    return float(max(node["size"][0] for node in column))


def _height(column: Sequence[Node]) -> float:
    return float(sum(_TITLE + node["size"][1] for node in column) + _GAP * (len(column) - 1))
