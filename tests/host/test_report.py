"""OneDiff Report: what served how many calls, in the node, as JSON and over the API."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pictures import FAMILIES, Counters, latent_of
from scripts import printed_by

from dev.environment import comfyui_path
from dev.host import ComfyServer, RunResult
from tools.workflows import Workflow

FLUX = FAMILIES["flux"]


def _with_report(workflow: Workflow, **inputs: Any) -> Workflow:
    """``workflow`` with a report that waits for its image, and both its outputs as texts."""
    workflow["report"] = {"class_type": "OneDiffReport", "inputs": {"after": ["decode", 0], **inputs}}
    for number, name in enumerate(("as_text", "as_json")):
        workflow[name] = {"class_type": "PreviewAny", "inputs": {"source": ["report", number]}}
    return workflow


def _text(result: RunResult) -> str:
    (text,) = result.outputs["report"]["text"]
    return str(text)


def _data(result: RunResult) -> dict[str, Any]:
    (found,) = result.outputs["report"]["report"]
    return dict(found)


def test_the_report_tells_what_served_the_sampler_that_it_waited_for(server: ComfyServer) -> None:
    server.free()  # or the host gives what an earlier test has accelerated, and counted
    counters = Counters(server)
    result = server.run(_with_report(FLUX.workflow(11, "eager"), model=["speedup", 0]))
    latent_of(result)
    found, text = _data(result), _text(result)
    (model,) = found["objects"]
    (graph,) = model["graphs"]
    assert (model["kind"], model["accelerated"]) == ("MODEL", True)
    assert (model["served"], model["eager"], model["fallbacks"]) == (FLUX.steps, 0, {})
    assert (graph["served"], graph["engine"], graph["in_memory"]) == (FLUX.steps, "eager", True)
    assert graph["what"].startswith("Flux")
    assert 0 < graph["run_s"] < result.seconds
    assert model["run_s"] == graph["run_s"]
    assert found["process"]["served"] >= counters.served == FLUX.steps
    assert text.splitlines()[:2] == [
        "0 calls eager",
        f"MODEL: {FLUX.steps} of {FLUX.steps} calls served by compiled graphs",
    ]
    assert graph["what"] in text
    assert graph["steps"] == [] and "ms, eager" not in text, "the same kernels: no gain is claimed"
    (picture,) = result.outputs["report"]["images"]
    assert picture["type"] == "temp"
    # The node shows it, and both outputs carry it on.
    assert ("report", text) in result.texts
    assert result.outputs["as_text"]["text"] == [text]
    assert json.loads(result.outputs["as_json"]["text"][0]) == found


def test_it_begins_with_what_came_of_it() -> None:
    assert printed_by("headlines.py", comfyui_path()) == {
        "a model and a VAE": ["2.0x · 6.0 s saved · 0 calls eager"],
        "of two sizes": ["2.0x · 1.2 s saved · 3 calls eager"],
        "slower": ["0.5x · 1.0 s lost · 0 calls eager"],
        "not timed": ["1 call eager"],
        "no calls": [],
        "not accelerated": [],
    }


def test_it_is_told_anew_though_nothing_else_ran(server: ComfyServer) -> None:
    workflow = _with_report(FLUX.workflow(12, "eager"), model=["speedup", 0])
    before = _data(server.run(workflow))["process"]["served"]
    server.run(FLUX.workflow(13, "eager", size=96))
    again = server.run(workflow)
    assert _data(again)["process"]["served"] >= before + FLUX.steps
    assert again.outputs.keys() >= {"report"}


def test_eager_calls_are_counted_by_their_reason(server: ComfyServer) -> None:
    workflow = FLUX.workflow(14, "oneflow")  # not in the developer environment
    result = server.run(_with_report(workflow, model=["speedup", 0]))
    latent_of(result)
    (model,) = _data(result)["objects"]
    assert (model["served"], model["eager"], model["graphs"]) == (0, FLUX.steps, [])
    ((reason, count),) = model["fallbacks"].items()
    assert count == FLUX.steps
    assert f"{count} eager: {reason}" in _text(result)


def test_objects_that_went_through_no_speedup_node_are_named(server: ComfyServer) -> None:
    workflow = _with_report(FLUX.workflow(15), model=["loader", 0], vae=["loader", 2])
    found = server.run(workflow)
    assert _data(found)["objects"] == [
        {"kind": "MODEL", "accelerated": False},
        {"kind": "VAE", "accelerated": False},
    ]
    assert "VAE: not accelerated" in _text(found)


def test_with_nothing_connected_it_tells_about_the_process(server: ComfyServer) -> None:
    result = server.run({"report": {"class_type": "OneDiffReport", "inputs": {}}})
    assert _data(result)["objects"] == []
    assert _text(result).startswith("All together: ")


def test_a_model_that_was_not_sampled_yet_says_what_to_connect(server: ComfyServer) -> None:
    workflow = FLUX.workflow(16, "eager", cache_budget_mb=4096)
    workflow = {name: workflow[name] for name in ("loader", "speedup")}
    workflow["report"] = {"class_type": "OneDiffReport", "inputs": {"model": ["speedup", 0]}}
    assert "no calls yet" in _text(server.run(workflow))


def test_what_is_behind_the_speedup_node_is_the_same_model(server: ComfyServer) -> None:
    workflow = FLUX.workflow(17, "eager")
    workflow["scaled"] = {"class_type": "ScaleWrapper", "inputs": {"model": ["speedup", 0], "factor": 0.9}}
    workflow["sampler"]["inputs"]["model"] = ["scaled", 0]
    (model,) = _data(server.run(_with_report(workflow, model=["scaled", 0])))["objects"]
    assert model["served"] >= FLUX.steps


def test_the_api_tells_the_same_of_everything_that_is_accelerated(server: ComfyServer) -> None:
    result = server.run(_with_report(FLUX.workflow(18, "eager"), model=["speedup", 0]))
    (model,) = _data(result)["objects"]
    answer = server.get_json("/onediff/report")
    mine = [thing for thing in answer["objects"] if thing["node"] == "speedup" and thing["graphs"] == model["graphs"]]
    assert [(thing["kind"], thing["served"]) for thing in mine] == [("MODEL", model["served"])]
    process = _data(result)["process"]
    assert {name: answer[name] for name in process} == process


def test_an_evicted_graph_is_told(server: ComfyServer, emptied: ComfyServer) -> None:
    """In a process of which nobody expects a graph, because a budget is everybody's; the other has compiled them."""
    # Nothing fits into one megabyte beside the newest graph; Inductor's have sizes, the eager engine's have none.
    flux, sd15 = (FAMILIES[name].workflow(1, "inductor", cache_budget_mb=1) for name in ("flux", "sd15"))
    for workflow in (flux, sd15):
        latent_of(server.run({**workflow, "speedup": FLUX.workflow(1, "inductor")["speedup"]}))
    again = FLUX.workflow(2, "inductor", cache_budget_mb=1)
    for workflow in (flux, sd15, _with_report(again, model=["speedup", 0])):
        result = emptied.run(workflow)
        latent_of(result)
    (model,) = _data(result)["objects"]
    (graph,) = model["graphs"]
    assert (graph["engine"], graph["compile_s"], graph["recompiled"]) == ("inductor", 0, 0)
    assert (graph["evicted"], graph["loads"], graph["in_memory"]) == (1, 2, True)
    assert graph["load_s"] > 0 and graph["bytes"] > 0
    assert "left memory to make room: 1" in _text(result)


@pytest.mark.parametrize("name", ["model", "vae", "clip", "control_net", "after"])
def test_every_input_is_optional_and_explains_itself(server: ComfyServer, name: str) -> None:
    info = server.get_json("/object_info/OneDiffReport")["OneDiffReport"]
    assert info["output_node"] and "required" not in {k for k, v in info["input"].items() if v}
    assert info["input"]["optional"][name][1]["tooltip"]
    assert info["output"] == ["STRING", "STRING"]
