"""Workflows of the earlier OneDiff run: its nodes become ours, values are carried over, what is lost is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from controls import install_controls
from migration import NAMES, api_form, editor_form, migrated
from pictures import FAMILIES, Counters

from dev.environment import OTHER_COMFYUI, other_comfyui_path
from dev.host import ComfyServer, RunResult
from onediff_comfy.host.legacy.replacements import NOT_REPLACED, REPLACEMENTS, as_the_host_wants_it, outputs_of
from tools.workflows import Workflow

STEPS = FAMILIES["sd15"].steps
_OLDEST, *_BETWEEN = OTHER_COMFYUI
"""The oldest host; and those between it and the one that all other tests run in, which are slow."""


def _assert_known(server: ComfyServer) -> None:
    """The host of ``server`` tells its editor about every replacement."""
    offered = server.get_json("/node_replacements")
    for replacement in REPLACEMENTS:
        (known,) = offered[replacement.old]
        assert known == {**as_the_host_wants_it(replacement), "output_mapping": outputs_of(replacement.old)}
    assert not set(NOT_REPLACED) & set(offered)


def test_every_replacement_fits_the_node_that_it_puts_in_place(server: ComfyServer) -> None:
    _assert_known(server)
    node_types = server.get_json("/object_info")
    assert len({replacement.old for replacement in REPLACEMENTS}) == len(REPLACEMENTS)
    for replacement in REPLACEMENTS:
        new = node_types[replacement.new]
        declared = {**new["input"].get("required", {}), **new["input"].get("optional", {})}
        given = {*replacement.inputs, *replacement.set_values}
        assert given <= set(declared), replacement.old
        assert set(new["input"].get("required", {})) <= given, replacement.old
        assert all(number < len(new["output"]) for number in replacement.outputs), replacement.old
        for name, value in replacement.values.items():
            assert value in declared[name][1]["options"], (replacement.old, name)


def _with_other(workflow: Workflow, node: str, **values: Any) -> Workflow:
    return {**workflow, node: {**workflow[node], "inputs": {**workflow[node]["inputs"], **values}}}


def _run(server: ComfyServer, workflow: Workflow) -> RunResult:
    """Run an old workflow; the host must have made of it what the table says."""
    before = set(server.get_json("/history"))
    result = server.run(workflow)
    (prompt,) = set(server.get_json("/history")) - before
    ran = server.get_json(f"/history/{prompt}")[prompt]["prompt"][2]
    assert {name: {key: node[key] for key in ("class_type", "inputs")} for name, node in ran.items()} == migrated(
        workflow
    )
    return result


def test_speedup_nodes_run_and_are_accelerated(server: ComfyServer) -> None:
    counters = Counters(server)
    result = _run(server, api_form("speedup_nodes"))
    assert result.status == "success", result.error
    assert result.images
    assert counters.served == STEPS + 1, "each step, and the VAE"
    assert counters.fallbacks == {}
    (saved,) = result.outputs["14"]["text"]
    assert saved.startswith("SD 1.5, all sizes")
    assert (server.base_dir / "models" / "onediff_graphs" / "unet of old.graph").is_file()


def _loaders(seed: int, vae_speedup: str) -> Workflow:
    """The workflow of loaders; its ControlNet rests, for a compilation of it is tested elsewhere and takes a minute."""
    workflow = _with_other(api_form("loaders"), "17", end_percent=0.0)
    return _with_other(_with_other(workflow, "3", seed=seed), "10", vae_speedup=vae_speedup)


def test_loaders_load_and_accelerate(server: ComfyServer) -> None:
    install_controls(server)
    workflow = _loaders(6, "enable")
    seen = {"model": ["12", 0], "vae": ["10", 2], "control_net": ["15", 0], "after": ["8", 0]}
    workflow["19"] = {"class_type": "OneDiffReport", "inputs": seen, "_meta": {"title": "OneDiff Report"}}
    counters = Counters(server)
    result = _run(server, workflow)
    assert result.status == "success", result.error
    assert result.images
    assert counters.served == STEPS + 1, "each step, and the VAE"
    assert counters.fallbacks == {}
    (report,) = result.outputs["19"]["report"]
    assert [known["kind"] for known in report["objects"]] == ["MODEL", "VAE", "CONTROL_NET"]
    assert all(known["accelerated"] for known in report["objects"])
    # What is not done any more is said: in the log, and on the node while it runs.
    assert any(node == "12" and "one graph serves every batch size" in text for node, text in result.texts)
    assert "OneDiff: DeepCache is not done" in server.log_text()


def test_the_vae_is_accelerated_only_where_it_was(server: ComfyServer) -> None:
    install_controls(server)
    counters = Counters(server)
    result = _run(server, _loaders(7, "disable"))
    assert result.status == "success", result.error
    assert counters.served == STEPS


def test_what_nothing_makes_any_more_stops_and_says_what_to_use(server: ComfyServer) -> None:
    workflow = api_form("speedup_nodes")
    workflow["4"] = {
        "class_type": "UNETLoaderInt8",
        "inputs": {"model_path": "sd15"},
        "_meta": {"title": "UNET Loader Int8"},
    }
    workflow["8"]["inputs"]["vae"] = ["15", 2]
    del workflow["13"], workflow["14"]
    workflow["15"] = {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "sd15_min.safetensors"}}
    result = server.run(workflow)
    assert result.status == "error"
    assert result.error is not None
    assert result.error["node_id"] == "4"
    assert "Use Load Diffusion Model" in result.error["exception_message"]
    assert "(In place of UNETLoaderInt8.)" in result.error["exception_message"]


def test_the_two_forms_are_of_the_same_nodes() -> None:
    for name in NAMES:
        editor = {str(node["id"]): node["type"] for node in json.loads(editor_form(name))["nodes"]}
        assert editor == {node: content["class_type"] for node, content in api_form(name).items()}


@pytest.mark.parametrize("version", [_OLDEST, *(pytest.param(v, marks=pytest.mark.slow) for v in _BETWEEN)])
def test_another_version_of_the_host_loads_the_pack_and_knows_the_replacements(
    start_server: Callable[..., ComfyServer], version: str
) -> None:
    with start_server(comfy=other_comfyui_path(version)) as other:
        assert {replacement.new for replacement in REPLACEMENTS} <= set(other.get_json("/object_info"))
        _assert_known(other)
