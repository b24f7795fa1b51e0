"""The Model Speedup node in a real ComfyUI: the same picture, one compilation, no trace left."""

from __future__ import annotations

import pytest
import torch
from pictures import FAMILIES, Counters, TinyFamily, assert_same_picture, assert_untouched, compiled_twice, latent_of

from dev.host import ComfyServer, PromptRejected
from onediff_comfy.capture.rewrites.fp8_linear import fp8_unavailable
from tools.workflows import Workflow

SD15 = FAMILIES["sd15"]
SDXL = FAMILIES["sdxl"]
FLUX = FAMILIES["flux"]
OWN_SIZE = (288, 64)
"""A size that no other test asks the shared server for, so that what is proved for it is counted here alone."""


@pytest.mark.parametrize(
    ("family", "engine"),
    [
        *((SD15, "inductor"), (FLUX, "inductor"), (SDXL, "eager")),
        pytest.param(SDXL, "inductor", marks=pytest.mark.slow),  # a capture as the eager engine's, minutes of kernels
    ],
    ids=["sd15", "flux", "sdxl-eager", "sdxl"],
)
def test_the_picture_is_the_same_and_is_compiled_for_once(server: ComfyServer, family: TinyFamily, engine: str) -> None:
    # The first run of a size may choose other kernels than later ones (cuDNN tries several), so the
    # pictures to compare with come from runs after it. Another seed between keeps the host from
    # answering out of its cache.
    latent_of(server.run(family.workflow(1, size=OWN_SIZE)))
    plain = [latent_of(server.run(family.workflow(seed, size=OWN_SIZE))) for seed in (2, 1)][::-1]

    first = Counters(server)
    assert_same_picture(latent_of(server.run(family.workflow(1, engine, size=OWN_SIZE))), plain[0])
    assert first.proved == 1
    assert first.compiled == first.captured <= 1  # none if an earlier test had an image of this family, of any size
    assert first.served == family.steps
    assert first.fallbacks == {}

    second = Counters(server)
    assert_same_picture(latent_of(server.run(family.workflow(2, engine, size=OWN_SIZE))), plain[1])
    assert (second.compiled, second.captured, second.served) == (0, 0, family.steps)

    # Everything is thrown away and made again: loader, node, model object. The graph stays.
    server.free()
    again = Counters(server)
    assert_same_picture(latent_of(server.run(family.workflow(1, engine, size=OWN_SIZE))), plain[0])
    assert (again.compiled, again.captured, again.served) == (0, 0, family.steps)
    assert compiled_twice(server) == []

    # Without the node nothing of it is left: not one bit.
    assert_untouched(latent_of(server.run(family.workflow(1, size=OWN_SIZE))), plain[0])
    assert second.fallbacks == {}


def test_fp8_serves_where_it_can_be_had_and_is_lossless_elsewhere_and_says_so(server: ComfyServer) -> None:
    reason = fp8_unavailable(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    expected = latent_of(server.run(SD15.workflow(4)))
    counters = Counters(server)
    workflow = SD15.workflow(4, "eager")
    workflow["speedup"]["inputs"]["precision"] = "fp8"
    result = server.run(workflow)
    actual = latent_of(result)
    assert (counters.served, counters.fallbacks) == (SD15.steps, {})
    last = [text for node, text in result.texts if node == "speedup"][-1]
    if reason is None:  # another picture, and how far off a call may be is proved against eager
        assert counters.retired == 0 and bool(actual.isfinite().all())
        assert [graph["what"].endswith(", fp8") for graph in counters.graphs] == [True]
        assert "lossless" not in last
    else:
        assert_same_picture(actual, expected)
        assert last.endswith(f"lossless instead of fp8: {reason}")


def test_auto_uses_inductor(server: ComfyServer) -> None:
    server.run(SD15.workflow(1, "inductor"))
    counters = Counters(server)
    latent_of(server.run(SD15.workflow(3, "auto")))
    assert counters.served == SD15.steps
    assert counters.compiled == 0  # the same engine, so the same graph


def test_the_node_explains_itself(server: ComfyServer) -> None:
    info = server.get_json("/object_info/OneDiffModelSpeedup")["OneDiffModelSpeedup"]
    assert info["category"] == "OneDiff"
    assert info["display_name"] == "OneDiff Model Speedup"
    assert info["description"]
    assert list(info["input"]["required"]) == ["model", "engine"]
    assert list(info["input"]["optional"]) == ["compile", "cache_budget_mb", "buckets", "precision"]
    inputs = {**info["input"]["required"], **info["input"]["optional"]}
    assert all(options["tooltip"] for _, options in inputs.values())
    assert all(info["output_tooltips"])
    assert inputs["engine"][1]["options"] == ["auto", "inductor", "oneflow", "cudagraph", "eager"]
    assert inputs["compile"][1]["options"] == ["auto", "background", "wait"]
    assert inputs["cache_budget_mb"][1]["min"] == 0
    defaults = {name: options["default"] for name, (_, options) in inputs.items() if "default" in options}
    assert inputs["precision"][1]["options"] == ["lossless", "fp8"]
    assert defaults == {"engine": "auto", "compile": "auto", "cache_budget_mb": 0, "precision": "lossless"}


def test_a_workflow_from_before_the_node_had_options_still_runs(server: ComfyServer) -> None:
    expected = latent_of(server.run(FLUX.workflow(1)))
    workflow = FLUX.workflow(1, "inductor")
    workflow["speedup"]["inputs"] = {"model": ["loader", 0], "engine": "inductor"}
    counters = Counters(server)
    assert_same_picture(latent_of(server.run(workflow)), expected)
    assert (counters.served, counters.fallbacks) == (FLUX.steps, {})


def test_an_unknown_engine_is_refused_before_anything_runs(server: ComfyServer) -> None:
    with pytest.raises(PromptRejected) as refusal:
        server.run(SD15.workflow(1, "warp-drive"))
    (error,) = refusal.value.body["node_errors"]["speedup"]["errors"]
    assert error["type"] == "value_not_in_list"
    assert "warp-drive" in error["details"] and "inductor" in error["details"]


@pytest.mark.parametrize("engine", ["oneflow", "cudagraph"])
def test_an_engine_that_cannot_run_here_says_so_and_the_picture_is_made(server: ComfyServer, engine: str) -> None:
    if engine == "cudagraph" and torch.cuda.is_available():
        pytest.skip("this machine has an NVIDIA GPU, so the cudagraph engine is available")
    plain = latent_of(server.run(FLUX.workflow(1)))
    counters, said_before = Counters(server), len(server.log_text())
    result = server.run(FLUX.workflow(1, engine))
    assert torch.equal(latent_of(result), plain)
    (reason,) = counters.fallbacks
    assert reason.startswith(f"the {engine} engine is not available: ")
    assert counters.fallbacks[reason] == FLUX.steps
    assert counters.compiled == 0
    assert ("speedup", f"not accelerated: {reason}") in result.texts
    log = server.log_text()[said_before:].splitlines()
    assert len([line for line in log if reason in line and "WARNING" in line]) == 1  # once, not once a step


def _behind(workflow: Workflow, node: str, class_type: str, **inputs: object) -> Workflow:
    """``workflow`` with a node of ``class_type`` between ``node`` and the sampler."""
    workflow["sampler"]["inputs"]["model"] = ["extra", 0]
    workflow["extra"] = {"class_type": class_type, "inputs": {"model": [node, 0], **inputs}}
    return workflow


def _before(workflow: Workflow, class_type: str, **inputs: object) -> Workflow:
    """``workflow`` with a node of ``class_type`` between the loader and the speedup node."""
    workflow["speedup"]["inputs"]["model"] = ["extra", 0]
    workflow["extra"] = {"class_type": class_type, "inputs": {"model": ["loader", 0], **inputs}}
    return workflow


@pytest.mark.parametrize("place", ["before", "behind"])
def test_other_extensions_wrappers_still_run(server: ComfyServer, place: str) -> None:
    plain = latent_of(server.run(FLUX.workflow(1)))
    expected = latent_of(server.run(_behind(FLUX.workflow(1), "loader", "ScaleWrapper", factor=0.9)))
    assert not torch.allclose(plain, expected, rtol=1e-2)
    workflow = FLUX.workflow(1, "inductor")
    if place == "before":
        workflow = _before(workflow, "ScaleWrapper", factor=0.9)
    else:
        workflow = _behind(workflow, "speedup", "ScaleWrapper", factor=0.9)
    counters = Counters(server)
    assert_same_picture(latent_of(server.run(workflow)), expected)
    assert counters.served == FLUX.steps


@pytest.mark.parametrize("patch", ["AttentionPatch", "AttentionOverride"])
@pytest.mark.parametrize("place", ["before", "behind"])
def test_a_function_that_a_node_puts_into_the_model_is_compiled_along(
    server: ComfyServer, place: str, patch: str
) -> None:
    plain = latent_of(server.run(SD15.workflow(1)))
    expected = latent_of(server.run(_behind(SD15.workflow(1), "loader", patch)))
    assert not torch.allclose(plain, expected, rtol=1e-2)
    workflow = SD15.workflow(1, "eager")  # the same capture as Inductor's, in no time
    workflow = _before(workflow, patch) if place == "before" else _behind(workflow, "speedup", patch)
    counters = Counters(server)
    assert_same_picture(latent_of(server.run(workflow)), expected)
    assert (counters.served, counters.fallbacks) == (SD15.steps, {})


@pytest.mark.parametrize("place", ["before", "behind"])
def test_a_patch_that_no_graph_can_take_runs_eager_and_unchanged(server: ComfyServer, place: str) -> None:
    expected = latent_of(server.run(_behind(SD15.workflow(1), "loader", "CountingPatch")))
    workflow = SD15.workflow(1, "inductor")
    workflow = (
        _before(workflow, "CountingPatch") if place == "before" else _behind(workflow, "speedup", "CountingPatch")
    )
    counters = Counters(server)
    result = server.run(workflow)
    assert_untouched(latent_of(result), expected)
    assert counters.served == 0
    assert "which the options hold, changes what it keeps" in server.log_text()
    # People are told whose it is, and what it does.
    told = [text for node, text in result.texts if node == "speedup"][-1]
    assert told.startswith("not accelerated: tiny_nodes adds code to the model") and "transformer_options" not in told


def test_a_node_of_the_hosts_is_named_by_what_it_is_called(server: ComfyServer) -> None:
    patch = {"tile_size": 64, "swap_size": 2, "max_depth": 0, "scale_depth": False}
    result = server.run(_before(SD15.workflow(1, "eager"), "HyperTile", **patch))
    told = [text for node, text in result.texts if node == "speedup"][-1]
    assert told.startswith("not accelerated: HyperTile adds code to the model, with which it cannot be captured")


def test_calls_that_torch_compile_takes_are_counted_one_by_one_and_its_node_is_named(server: ComfyServer) -> None:
    counters = Counters(server)
    result = server.run(_behind(FLUX.workflow(1, "eager"), "speedup", "CompiledByTorch"))
    reason = "TorchCompileModel, behind OneDiff Model Speedup, runs the model in a way of its own; use one of the two"
    assert (counters.served, counters.fallbacks) == (0, {reason: FLUX.steps})
    assert [text for node, text in result.texts if node == "speedup"][-1] == f"not accelerated: {reason}"


def test_a_model_that_torch_compile_had_before_is_served_by_the_graph_that_there_is(server: ComfyServer) -> None:
    """What PyTorch's compiler notes on weights and layers stays there when its node is taken out of the workflow."""
    latent_of(server.run(FLUX.workflow(1, "eager")))
    latent_of(server.run(_behind(FLUX.workflow(1), "loader", "TorchCompileModel", backend="cudagraphs")))
    counters = Counters(server)
    assert_same_picture(latent_of(server.run(FLUX.workflow(2, "eager"))), latent_of(server.run(FLUX.workflow(2))))
    assert (counters.captured, counters.served, counters.fallbacks) == (0, FLUX.steps, {})


@pytest.mark.parametrize("place", ["model1", "model2"])
def test_a_model_that_is_merged_away_is_said_not_to_be_used(server: ComfyServer, place: str) -> None:
    workflow = _behind(SD15.workflow(1, "eager"), "speedup", "ModelMergeSimple")
    models = {"model1": ["loader", 0], "model2": ["loader", 0], place: ["speedup", 0]}
    workflow["extra"]["inputs"] = {**models, "ratio": 0.5}
    workflow["speedup"]["inputs"]["compile"] = "wait" if place == "model1" else "background"  # so that it runs anew
    counters = Counters(server)
    result = server.run(workflow)
    said = [text for node, text in result.texts if node == "speedup" and text.startswith("not used")]
    if place == "model1":
        assert (counters.served, said) == (SD15.steps, [])
    else:
        assert counters.served == 0
        assert len(said) == 1 and "“ModelMergeSimple” makes one model of two" in said[0]


def test_a_model_whose_forward_asks_for_no_wrappers_is_served_too(server: ComfyServer) -> None:
    expected = latent_of(server.run(_behind(SD15.workflow(1), "loader", "PlainModule")))
    counters = Counters(server)
    assert_same_picture(latent_of(server.run(_before(SD15.workflow(1, "eager"), "PlainModule"))), expected)
    assert counters.served == SD15.steps - 1
    assert counters.fallbacks == {"the first call of a model of this kind is ComfyUI's": 1}


def test_something_that_is_no_model_passes_through_with_a_reason(server: ComfyServer) -> None:
    workflow = {
        "loader": SD15.workflow(1)["loader"],
        "broken": {"class_type": "NotAModel", "inputs": {"model": ["loader", 0]}},
        "speedup": {"class_type": "OneDiffModelSpeedup", "inputs": {"model": ["broken", 0], "engine": "auto"}},
        "kind": {"class_type": "ModelKind", "inputs": {"model": ["speedup", 0]}},
    }
    counters = Counters(server)
    result = server.run(workflow)
    assert result.status == "success"
    assert result.outputs["kind"]["kind"] == ["_NotAModel"]
    reason = "what the node before this one gave to the input model is not a model with a diffusion model in it"
    assert counters.fallbacks == {f"{reason} (its type is _NotAModel)": 1}
    assert ("speedup", f"not accelerated: {reason} (its type is _NotAModel)") in result.texts


def test_nothing_in_place_of_a_model_is_called_nothing(server: ComfyServer) -> None:
    workflow = {
        "loader": SD15.workflow(1)["loader"],
        "broken": {"class_type": "NothingForAModel", "inputs": {"model": ["loader", 0]}},
        "speedup": {"class_type": "OneDiffModelSpeedup", "inputs": {"model": ["broken", 0], "engine": "auto"}},
        "kind": {"class_type": "ModelKind", "inputs": {"model": ["speedup", 0]}},
    }
    counters = Counters(server)
    assert server.run(workflow).status == "success"
    assert counters.fallbacks == {"the node before this one gave nothing to the input model": 1}


def test_another_size_and_batch_need_no_other_graph(server: ComfyServer) -> None:
    expected = latent_of(server.run(FLUX.workflow(1, size=64, batch=2)))
    latent_of(server.run(FLUX.workflow(1, "inductor")))
    counters = Counters(server)
    assert_same_picture(latent_of(server.run(FLUX.workflow(1, "inductor", size=64, batch=2))), expected)
    assert (counters.captured, counters.compiled, counters.served) == (0, 0, FLUX.steps)


def test_nobody_waits_for_the_graph_of_a_bucket(server: ComfyServer) -> None:
    expected = {size: latent_of(server.run(FLUX.workflow(1, size=size))) for size in (80, 112)}
    counters = Counters(server)

    def picture(size: int, seed: int = 1) -> torch.Tensor:
        # The eager engine, because it makes a graph in no time.
        return latent_of(server.run(FLUX.workflow(seed, "eager", size=size, buckets="80x80 b1\n96x96 b1-2")))

    assert_same_picture(picture(80), expected[80])
    assert_same_picture(picture(112), expected[112])
    picture(80, seed=2)
    # None if it was there before; a bucket's own is another process's work.
    assert [graph["what"] for graph in counters.graphs] in ([], ["Flux all sizes"])
    assert counters.served == 3 * FLUX.steps
    assert counters.fallbacks == {}
