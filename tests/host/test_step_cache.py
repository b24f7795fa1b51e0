"""The Step Cache node in a real ComfyUI: steps are reused, eager's picture is not far, and the rest still composes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from graph_files import put, saved_graph
from model_parts import LORA, install_model_parts
from pictures import FAMILIES, Counters, TinyFamily, assert_same_picture, assert_untouched, latent_of

from dev.host import ComfyServer
from onediff_comfy.store.graph_file import unpack
from onediff_comfy.store.trust import Trust
from tools.models.checkpoints import checkpoint_file
from tools.workflows import Workflow

SDXL = dataclasses.replace(FAMILIES["sdxl"], steps=12)
"""One of its blocks goes around the others; a brief call is a third of a whole one."""
FLUX = dataclasses.replace(FAMILIES["flux"], steps=12)
"""A chain of two blocks."""
SD15 = dataclasses.replace(FAMILIES["sd15"], steps=12)
TURBO = dataclasses.replace(SDXL, steps=3)
"""As distilled models are sampled."""
_SAVED = "with a step cache"


def _cached(
    threshold: float, seed: int = 1, engine: str | None = "eager", family: TinyFamily = SDXL, **more: Any
) -> Workflow:
    workflow: Workflow = family.workflow(seed, engine, **more)
    for name in ("decode", "save"):
        del workflow[name]
    model = workflow["sampler"]["inputs"]["model"]
    workflow["steps"] = {"class_type": "OneDiffStepCache", "inputs": {"model": model, "threshold": threshold}}
    workflow["sampler"]["inputs"]["model"] = ["steps", 0]
    return workflow


def _plain(seed: int = 1, family: TinyFamily = SDXL, **more: Any) -> Workflow:
    workflow: Workflow = family.workflow(seed, **more)
    for name in ("decode", "save"):
        del workflow[name]
    return workflow


def _texts(result: Any, node: str) -> list[str]:
    return [text for where, text in result.texts if where == node]


def _off(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square difference, as a share of the range."""
    return float((actual - expected).square().mean().sqrt() / (expected.max() - expected.min()))


@pytest.mark.parametrize(
    ("family", "engine"),
    [pytest.param(SDXL, "eager", marks=pytest.mark.slow), (FLUX, "inductor")],
    ids=["sdxl", "flux"],
)
def test_the_higher_the_threshold_the_more_is_reused_and_at_zero_it_is_eagers_picture(
    server: ComfyServer, family: TinyFamily, engine: str
) -> None:
    expected = latent_of(server.run(_plain(family=family)))
    counters = Counters(server)
    result = server.run(_cached(0.0, engine=engine, family=family))
    assert_same_picture(latent_of(result), expected)
    assert (counters.reused, counters.served) == (0, 12)

    first = Counters(server)
    reused, off = [], []
    for threshold in (0.2, 0.5, 1.0):
        counters = Counters(server)
        result = server.run(_cached(threshold, engine=engine, family=family))
        off.append(_off(latent_of(result), expected))
        reused.append(counters.reused)
        assert counters.served == 12 and counters.fallbacks == {}
        assert _texts(result, "steps")[-1] == f"{counters.reused} of 12 calls reused"
    assert 0 < reused[0] < reused[1] <= reused[2] <= 9
    assert 0 < off[0] < off[2] < 0.1
    assert first.compiled <= 1  # whole and brief are one graph; none for another threshold, or if a test had it before

    workflow = _cached(0.5, engine=engine, family=family)
    after = {"model": ["steps", 0], "after": ["sampler", 0]}
    workflow["report"] = {"class_type": "OneDiffReport", "inputs": after}
    (text,) = server.run(workflow).outputs["report"]["text"]
    # Of all images since the node was made: these three and one more like the second.
    assert f"{sum(reused) + reused[1]} of them by the step cache" in text

    again = Counters(server)
    for more in ({"size": (160, 96)}, {"batch": 2}, {"seed": 5}):
        latent_of(server.run(_cached(0.5, engine=engine, family=family, **more)))
    assert (again.captured, again.compiled, again.fallbacks) == (0, 0, {})
    assert again.reused >= 3


def test_a_saved_graph_serves_a_step_cache_on_a_machine_with_nothing_kept(
    server: ComfyServer, elsewhere: ComfyServer
) -> None:
    workflow = _cached(0.5, engine="inductor", family=FLUX)
    after = {"model": ["steps", 0], "filename": _SAVED, "after": ["sampler", 0]}
    workflow["keep"] = {"class_type": "OneDiffSaveCompiledGraph", "inputs": after}
    expected = latent_of(server.run(workflow))

    saved = saved_graph(server, _SAVED)
    for artifact in unpack(saved.read_bytes()):
        Trust(elsewhere.base_dir / "onediff-config").trust(artifact)
    loaded = _cached(0.5, engine="inductor", family=FLUX)
    file = {"model": ["loader", 0], "file": put(elsewhere, saved.name, saved.read_bytes()), "mismatch": "strict"}
    loaded["speedup"] = {"class_type": "OneDiffLoadCompiledGraph", "inputs": file}
    counters = Counters(elsewhere)
    try:
        assert_same_picture(latent_of(elsewhere.run(loaded)), expected)
    finally:
        saved_graph(elsewhere, _SAVED).unlink()
    assert (counters.captured, counters.compiled, counters.loaded) == (0, 0, 1)
    assert counters.reused > 0


def test_without_the_node_nothing_of_it_is_left(server: ComfyServer) -> None:
    def without(seed: int) -> Workflow:
        workflow = _cached(1.0, seed)
        workflow["sampler"]["inputs"]["model"] = workflow.pop("steps")["inputs"]["model"]
        return workflow

    expected = latent_of(server.run(_plain(seed=2)))
    latent_of(server.run(without(seed=5)))  # which has the graph made that it is to have afterwards
    latent_of(server.run(_cached(1.0, seed=2)))
    counters = Counters(server)
    assert_same_picture(latent_of(server.run(without(seed=2))), expected)
    assert (counters.reused, counters.compiled) == (0, 0)


def test_prompts_that_are_sampled_one_by_one_are_reused_in_the_same_steps(server: ComfyServer) -> None:
    # Prompts of 77 tokens and five times as many do not go into one call.
    workflow = _cached(0.5, seed=3)
    workflow["negative"]["inputs"]["tokens"] = 385
    counters = Counters(server)
    result = server.run(workflow)
    latent_of(result)
    assert counters.served == 24
    assert counters.reused > 0 and counters.reused % 2 == 0
    assert _texts(result, "steps")[-1] == f"{counters.reused} of 24 calls reused"


@pytest.mark.parametrize("keyframes", [1, 2])
def test_a_lora_of_one_prompt_is_reused_with_unless_its_strength_changes(server: ComfyServer, keyframes: int) -> None:
    install_model_parts(server)
    strengths = {"strength_model": 1.0, "strength_clip": 1.0}
    hooks = {
        "lora": {"class_type": "CreateHookLora", "inputs": {"lora_name": checkpoint_file(LORA), **strengths}},
        "frame": {"class_type": "CreateHookKeyframe", "inputs": {"strength_mult": 0.5, "start_percent": 0.0}},
        "hooks": {"class_type": "SetHookKeyframes", "inputs": {"hooks": ["lora", 0], "hook_kf": ["frame", 0]}},
        "hooked": {
            "class_type": "ConditioningSetProperties",
            "inputs": {"cond_NEW": ["positive", 0], "strength": 1.0, "set_cond_area": "default", "hooks": ["hooks", 0]},
        },
    }
    if keyframes == 2:
        later = {"strength_mult": -3.0, "start_percent": 0.5, "prev_hook_kf": ["frame", 0]}
        hooks["later"] = {"class_type": "CreateHookKeyframe", "inputs": later}
        hooks["hooks"]["inputs"] = {"hooks": ["lora", 0], "hook_kf": ["later", 0]}
    plain, workflow = _plain(seed=8, family=SD15), _cached(0.5, seed=8, family=SD15)
    for made in (plain, workflow):
        made.update(hooks)
        made["sampler"]["inputs"]["positive"] = ["hooked", 0]
    expected, counters = latent_of(server.run(plain)), Counters(server)
    result = server.run(workflow)
    assert counters.served == 24 and counters.fallbacks == {}  # hooks are of one prompt: two calls in a step
    if keyframes == 1:
        assert counters.reused > 0 and _off(latent_of(result), expected) < 0.1
        return
    assert counters.reused == 0
    assert_same_picture(latent_of(result), expected)
    said = "no step was reused: keyframes of a hook change the weights during the run"
    assert _texts(result, "steps")[-1] == said


def test_beside_the_hosts_own_cache_every_call_that_comes_is_answered(server: ComfyServer) -> None:
    workflow = _cached(0.5, seed=4)
    inputs = {
        "model": ["steps", 0],
        "reuse_threshold": 0.2,
        "start_percent": 0.15,
        "end_percent": 0.95,
        "verbose": False,
    }
    workflow["easy"] = {"class_type": "EasyCache", "inputs": inputs}
    workflow["sampler"]["inputs"]["model"] = ["easy", 0]
    expected, counters = latent_of(server.run(_plain(seed=4))), Counters(server)
    result = server.run(workflow)
    assert _off(latent_of(result), expected) < 0.1
    assert 3 <= counters.served <= 12 and counters.fallbacks == {}
    assert _texts(result, "steps")[-1] == f"{counters.reused} of {counters.served} calls reused"


def test_a_picture_of_few_steps_is_eagers_whatever_the_threshold(server: ComfyServer) -> None:
    expected = latent_of(server.run(_plain(6, TURBO)))
    result = server.run(_cached(1.0, 6, family=TURBO))
    assert_same_picture(latent_of(result), expected)
    assert _texts(result, "steps")[-1] == "0 of 3 calls reused"


def test_a_model_that_is_not_accelerated_passes_through_and_says_so(server: ComfyServer) -> None:
    expected = latent_of(server.run(_plain(seed=7)))
    result = server.run(_cached(1.0, seed=7, engine=None))
    assert_untouched(latent_of(result), expected)
    (text,) = _texts(result, "steps")
    assert "this model is not accelerated" in text


def test_the_node_explains_itself(server: ComfyServer) -> None:
    info = server.get_json("/object_info/OneDiffStepCache")["OneDiffStepCache"]
    assert info["category"] == "OneDiff" and info["description"] and all(info["output_tooltips"])
    assert list(info["input"]["required"]) == ["model", "threshold"]
    assert all(options["tooltip"] for _, options in info["input"]["required"].values())
