"""The workflows that the pack ships run, in both of their forms."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from controls import install_controls
from model_parts import install_model_parts
from pictures import Counters
from shipped import FOLDER, SD15, small

from dev.host import ComfyServer
from tools.templates import TITLES
from tools.workflow_files import NOTES, editor_form, workflows, write
from tools.workflows import Workflow


def test_the_files_are_what_the_code_and_this_host_make(server: ComfyServer, tmp_path: Path) -> None:
    """Run ``python -m tools.workflow_files`` after a change of either."""
    write(tmp_path, server.get_json("/object_info"))
    made = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*.json")}
    shipped = {path.relative_to(FOLDER): path.read_text() for path in FOLDER.rglob("*.json")}
    assert made == shipped


@pytest.mark.parametrize("name", workflows())
def test_the_editors_form_says_the_same_as_the_api_form(server: ComfyServer, name: str) -> None:
    node_types = server.get_json("/object_info")
    editor = json.loads((FOLDER / f"{TITLES[name]}.json").read_text())
    api = json.loads((FOLDER / "api" / f"{name}.json").read_text())
    assert _as_api(editor, node_types, list(api)) == api
    assert editor_form(api, node_types, NOTES[name]) == editor


@pytest.mark.parametrize("name", workflows())
def test_the_editors_form_is_laid_out_to_be_read(name: str) -> None:
    """No node covers another, every wire runs to the right, every node is in one group, and a note says what to do."""
    editor = json.loads((FOLDER / f"{TITLES[name]}.json").read_text())
    nodes = {node["id"]: node for node in editor["nodes"]}
    boxes = {number: _box(node) for number, node in nodes.items()}
    for one, other in itertools.combinations(boxes, 2):
        assert _apart(boxes[one], boxes[other]), (nodes[one]["type"], nodes[other]["type"])
    for _, source, _, target, *_ in editor["links"]:
        assert boxes[source][2] < boxes[target][0], (nodes[source]["type"], nodes[target]["type"])
    (note,) = (number for number, node in nodes.items() if node["type"] == "MarkdownNote")
    assert nodes[note]["widgets_values"][0].startswith("## ")
    groups = [(x, y, x + width, y + height) for x, y, width, height in (g["bounding"] for g in editor["groups"])]
    for one, other in itertools.combinations(groups, 2):
        assert _apart(one, other)
    for number, (left, top, right, bottom) in boxes.items():
        around = [g for g in groups if g[0] < left and g[1] < top and right < g[2] and bottom < g[3]]
        assert len(around) == (number != note), nodes[number]["type"]


_Corners = tuple[float, float, float, float]


def _box(node: dict[str, Any]) -> _Corners:
    """Left, top, right and bottom of a node with its title, which is 30 pixels above ``pos``."""
    (x, y), (width, height) = node["pos"], node["size"]
    return x, y - 30, x + width, y + height


def _apart(one: _Corners, other: _Corners) -> bool:
    return one[2] < other[0] or other[2] < one[0] or one[3] < other[1] or other[3] < one[1]


def _as_api(editor: dict[str, Any], node_types: dict[str, Any], names: list[str]) -> Workflow:
    """What the editor sends to the host for a workflow: wires and widget values by input name."""
    wires = {link: [names[source - 1], slot] for link, source, slot, *_ in editor["links"]}
    workflow: Workflow = {}
    for node in editor["nodes"]:
        if node["type"] == "MarkdownNote":  # which only the editor knows
            continue
        info = node_types[node["type"]]["input"]
        declared = {**info.get("required", {}), **info.get("optional", {})}
        wired = {item["name"]: item["link"] for item in node["inputs"]}
        fields = {item["name"] for item in node["inputs"] if "widget" in item}
        inputs = {name: wires[link] for name, link in wired.items() if link is not None}
        values = iter(node["widgets_values"])
        for name, (_, *options) in declared.items():
            if name in fields:
                next(values)  # the field behind a wire has a value, which does not count
            elif name not in wired:
                inputs[name] = next(values)
                if options and options[0].get("control_after_generate"):
                    assert next(values) == "fixed"
        assert not list(values), "a value without its field"
        workflow[names[node["id"] - 1]] = {"class_type": node["type"], "inputs": inputs}
    return workflow


# Calls besides the first sampler's: two steps for any size and two for the one bucket; the ControlNet's, which leaves
# out the last step; an image that is encoded and decoded; one that is sampled twice, and decoded in tiles of three
# shapes.
_MORE_SERVED = {
    "shape_bucket": 2 + 2,
    "controlnet": SD15.steps - 1,
    "image_to_image": 2,
    "inpaint": 2,
    "upscale": SD15.steps + 3,
    "text_to_image_sd15": 1,
    "report": 1,
}


def test_each_runs_and_is_accelerated(server: ComfyServer) -> None:
    """In this order, as what one saves the other loads. OneDiff Optimize, with its own engine, is in test_optimize."""
    names = (
        *("text_to_image", "save_compiled_graph", "load_compiled_graph", "shape_bucket", "controlnet"),
        *(
            "image_to_image",
            "inpaint",
            "upscale",
            "text_to_image_sd15",
            "text_to_image_flux",
            "lora",
            "video",
            "report",
            "step_cache",
        ),
    )
    assert {*names, "optimize"} == set(workflows())
    install_controls(server)
    install_model_parts(server)
    for seed, name in enumerate(names, start=100):
        counters = Counters(server)
        result = server.run(small(name, seed))
        assert result.status == "success", (name, result.error)
        assert result.images
        assert counters.served == SD15.steps + _MORE_SERVED.get(name, 0), name
        assert counters.fallbacks == {}
    assert "lora key not loaded" not in server.log_text()
