"""The Optimize node in a real ComfyUI: one choice accelerates model, VAE and text encoders."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from pictures import FAMILIES, MEANWHILE, PATIENCE_S, Counters, assert_same_picture, latent_of

from dev.host import ComfyServer, RunResult
from tools.workflows import Workflow

FLUX = FAMILIES["flux"]
USED = {"model": "sampler", "vae": "decode", "clip": "encode"}
"""What uses each output of the node."""


def _optimized(workflow: Workflow, goal: str, *kinds: str) -> Workflow:
    """The same with the node behind the loader, which takes these besides the model."""
    outputs = {"model": 0, "clip": 1, "vae": 2}
    taken = {kind: ["loader", outputs[kind]] for kind in ("model", *kinds)}
    workflow["optimize"] = {"class_type": "OneDiffOptimize", "inputs": {"goal": goal, **taken}}
    workflow["sampler"]["inputs"]["model"] = ["optimize", 0]
    return workflow


def _once_compiled(server: ComfyServer, made: Callable[[int], Workflow]) -> tuple[RunResult, Counters, int]:
    """What comes of a workflow, made for a seed, once each call is a graph's; what was counted, and the seed.

    Before, other processes compile, one after the other.
    """
    start, seed = time.monotonic(), 0
    while True:
        seed += 1  # or the host answers from what it remembers, and calls nothing
        counters = Counters(server)
        result = server.run(made(seed))
        if not counters.fallbacks:
            return result, counters, seed
        assert set(counters.fallbacks) <= MEANWHILE
        assert time.monotonic() - start < PATIENCE_S, counters.fallbacks
        time.sleep(2)


def _said(result: RunResult) -> list[str]:
    """The lines on the node at the end."""
    return [text for node, text in result.texts if node == "optimize"][-1].splitlines()


def test_exact_is_the_same_picture_and_model_vae_and_clip_are_accelerated(server: ComfyServer) -> None:
    result, counters, seed = _once_compiled(server, _everything)
    assert_same_picture(latent_of(result), latent_of(server.run(FLUX.workflow(seed, size=64))))
    assert counters.reused == 0
    reports = [report for kind in USED for report in result.outputs[f"{kind}_report"]["report"]]
    served = {thing["kind"]: thing["served"] > 0 for found in reports for thing in found["objects"]}
    assert served == {"MODEL": True, "VAE": True, "CLIP": True}
    said = dict(line.split(": ", 1) for line in _said(result))
    assert sorted(said) == ["CLIP", "MODEL", "VAE"]
    assert said["MODEL"].startswith("compiled graph · 64×64 b1")


def _everything(seed: int) -> Workflow:
    """Model, VAE and text encoder of one Optimize node, and what it says of each."""
    workflow = _optimized(FLUX.workflow(seed, size=64), "exact")
    # Of which other tests have Inductor compile graphs too; tiny Flux' own VAE and no text encoder would be others.
    workflow["vae"] = {"class_type": "TinyVAE", "inputs": {"kind": "sd", "dtype": "float32", "seed": 0}}
    workflow["encoder"] = {"class_type": "TinyTextEncoder", "inputs": {"family": "sd15", "seed": 2}}
    workflow["optimize"]["inputs"] |= {"vae": ["vae", 0], "clip": ["encoder", 0]}
    workflow["data"] = {
        "class_type": "TinyLatent",
        "inputs": {"seed": seed, "width": 64, "height": 64, "batch": 1, "channels": 4},
    }
    workflow["decode"]["inputs"] = {"samples": ["data", 0], "vae": ["optimize", 1]}
    workflow["encode"] = {
        "class_type": "CLIPTextEncode",
        "inputs": {"clip": ["optimize", 2], "text": f"a lighthouse, {seed}"},
    }
    workflow["show"] = {"class_type": "PreviewAny", "inputs": {"source": ["encode", 0]}}
    for number, (kind, by) in enumerate(USED.items()):
        reported = {kind: ["optimize", number], "after": [by, 0]}
        workflow[f"{kind}_report"] = {"class_type": "OneDiffReport", "inputs": reported}
    return workflow


@pytest.mark.slow  # by the eager engine, test_step_cache.py; what the goal chooses, unit/test_presets.py
def test_faster_has_a_step_cache(server: ComfyServer) -> None:
    """How many steps it reuses depends on trained weights; test_step_cache.py has thresholds at which it does."""
    result, counters, _ = _once_compiled(server, lambda seed: _optimized(FLUX.workflow(seed, size=64), "faster"))
    latent_of(result)
    assert counters.served == FLUX.steps
    assert all("step cache" in graph["what"] for graph in counters.graphs)
    said = dict(line.split(": ", 1) for line in _said(result))
    assert said["MODEL"].startswith("compiled graph · 64×64 b1")
    assert said["Step Cache"] == f"{counters.reused} of {FLUX.steps} calls reused"


def test_an_output_without_its_input_says_what_to_connect(server: ComfyServer) -> None:
    workflow = _optimized(FLUX.workflow(3, size=64), "exact")
    workflow["decode"]["inputs"]["vae"] = ["optimize", 1]
    result = server.run(workflow)
    assert result.error is not None
    assert "the output vae is empty" in result.error["exception_message"]


def test_it_is_the_first_of_our_nodes(server: ComfyServer) -> None:
    """The editor's menu has the order in which the host names them."""
    ours = [name for name, info in server.get_json("/object_info").items() if info["category"] == "OneDiff"]
    assert ours[0] == "OneDiffOptimize"


@pytest.mark.parametrize("words", ["speed", "compile", "optimize", "faster", "fp8", "cache", "编译", "加速"])
def test_it_is_found_by_what_people_search_for(server: ComfyServer, words: str) -> None:
    assert words in server.get_json("/object_info/OneDiffOptimize")["OneDiffOptimize"]["search_aliases"]
