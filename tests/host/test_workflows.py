"""The workflows that the pack ships run, in both of their forms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from controls import NET, install_controls
from pictures import FAMILIES, Counters

from dev.checkpoints import checkpoint_file
from dev.environment import repository
from dev.host import ComfyServer
from dev.workflow_files import editor_form, workflows, write
from dev.workflows import Workflow

FOLDER = repository() / "workflows"
SD15 = FAMILIES["sd15"]


def test_the_files_are_what_the_code_and_this_host_make(server: ComfyServer, tmp_path: Path) -> None:
    """Run ``python -m dev.workflow_files`` after a change of either."""
    write(tmp_path, server.get_json("/object_info"))
    made = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*.json")}
    shipped = {path.relative_to(FOLDER): path.read_text() for path in FOLDER.rglob("*.json")}
    assert made == shipped


@pytest.mark.parametrize("name", workflows())
def test_the_editors_form_says_the_same_as_the_api_form(server: ComfyServer, name: str) -> None:
    node_types = server.get_json("/object_info")
    editor = json.loads((FOLDER / f"{name}.json").read_text())
    api = json.loads((FOLDER / "api" / f"{name}.json").read_text())
    assert _as_api(editor, node_types, list(api)) == api
    assert editor_form(api, node_types) == editor


def _as_api(editor: dict[str, Any], node_types: dict[str, Any], names: list[str]) -> Workflow:
    """What the editor sends to the host for a workflow: wires and widget values by input name."""
    wires = {link: [names[source - 1], slot] for link, source, slot, *_ in editor["links"]}
    workflow: Workflow = {}
    for node in editor["nodes"]:
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


def _small(name: str, seed: int) -> Workflow:
    """The shipped API form, on a tiny checkpoint and a tiny image."""
    workflow: Workflow = json.loads((FOLDER / "api" / f"{name}.json").read_text())
    workflow["loader"]["inputs"]["ckpt_name"] = checkpoint_file(SD15.checkpoint)
    if "shape" in workflow:  # which goes to the nearest of its buckets
        workflow["shape"]["inputs"] |= {"buckets": "128x128 b1", "width": 100, "height": 120}
        workflow["speedup"]["inputs"]["engine"] = "eager"  # the bucket gets a graph of its own, here in no time
    elif "image" in workflow:
        workflow["image"] = {"class_type": "TinyImage", "inputs": {"width": 128, "height": 96, "batch": 1, "seed": 0}}
    else:
        workflow["latent"]["inputs"] |= {"width": 128, "height": 128}
    # A seed of its own, or the host answers from its cache and runs nothing.
    for sampler in ("sampler", "second_sampler"):
        if sampler in workflow:
            workflow[sampler]["inputs"] |= {"steps": SD15.steps, "seed": seed}
    if "vae_speedup" in workflow:
        workflow["vae_speedup"]["inputs"]["engine"] = "eager"
    if "net" in workflow:
        workflow["net"]["inputs"]["control_net_name"] = checkpoint_file(NET)
        workflow["hint"] = {
            "class_type": "EmptyImage",
            "inputs": {"width": 128, "height": 128, "batch_size": 1, "color": 0x8040C0},
        }
        workflow["net_speedup"]["inputs"]["engine"] = "eager"
    for number, prompt in enumerate(("positive", "negative")):  # the tiny checkpoint has no text encoder
        workflow[prompt] = {"class_type": "TinyConditioning", "inputs": {"seed": number, **SD15.conditioning}}
    return workflow


# Calls besides the first sampler's: a step for any size and one for the one bucket; the ControlNet's, which leaves out
# the last step; an image that is encoded and decoded; one that is sampled twice, and decoded in tiles of three shapes.
_MORE_SERVED = {
    "shape_bucket": 2,
    "controlnet": SD15.steps - 1,
    "image_to_image": 2,
    "inpaint": 2,
    "upscale": SD15.steps + 3,
}


def test_each_runs_and_is_accelerated(server: ComfyServer) -> None:
    """In this order, as what one saves the other loads."""
    names = (
        *("text_to_image", "save_compiled_graph", "load_compiled_graph", "shape_bucket", "controlnet"),
        *("image_to_image", "inpaint", "upscale"),
    )
    assert set(names) == set(workflows())
    install_controls(server)
    for seed, name in enumerate(names, start=100):
        counters = Counters(server)
        result = server.run(_small(name, seed))
        assert result.status == "success", (name, result.error)
        assert result.images
        assert counters.served == SD15.steps + _MORE_SERVED.get(name, 0), name
        assert counters.fallbacks == {}
