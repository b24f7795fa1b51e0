"""Shape Bucket and Warm Up in a real ComfyUI, and the warm-up without a screen."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from graph_files import error_of
from pictures import FAMILIES, Counters, TinyFamily, latent_of
from vae_bench import BOUND

from dev.environment import comfyui_path, repository
from dev.host import ComfyServer, PromptRejected, RunResult
from onediff_comfy import warmup_command
from tools.workflows import Workflow

SD15 = FAMILIES["sd15"]
FLUX = FAMILIES["flux"]


def _bucketed(workflow: Workflow, *, wired: bool = True, **inputs: Any) -> Workflow:
    """``workflow`` with a Shape Bucket in front of its empty latent."""
    values = {"preset": "custom", "buckets": "", "width": 64, "height": 64, "batch_size": 1, "snap": True, **inputs}
    workflow["shape"] = {"class_type": "OneDiffShapeBucket", "inputs": values}
    if wired:
        workflow["latent"]["inputs"] = {"width": ["shape", 1], "height": ["shape", 2], "batch_size": ["shape", 3]}
    return workflow


def _warmed(family: TinyFamily, buckets: str, seed: int = 1, **more: Any) -> Workflow:
    """Speedup → Warm Up → sampler, with the buckets of a Shape Bucket, which get graphs of their own."""
    workflow = _bucketed(family.workflow(seed, "eager", **more), wired=False, buckets=buckets)
    workflow["speedup"]["inputs"]["buckets"] = ["shape", 0]
    workflow["warm"] = {
        "class_type": "OneDiffWarmUp",
        "inputs": {"model": ["speedup", 0], "buckets": ["shape", 0], "positive": ["positive", 0]},
    }
    if family.cfg != 1.0:
        workflow["warm"]["inputs"]["negative"] = ["negative", 0]
    workflow["sampler"]["inputs"]["model"] = ["warm", 0]
    return workflow


def _only(workflow: Workflow, *names: str) -> Workflow:
    """The named nodes and what they need."""
    kept = list(names)
    for name in kept:
        kept += [
            wire[0] for wire in workflow[name]["inputs"].values() if isinstance(wire, list) and wire[0] not in kept
        ]
    return {name: workflow[name] for name in workflow if name in kept}


def _texts(result: RunResult, node: str) -> list[str]:
    return [text for name, text in result.texts if name == node]


# -- Shape Bucket ------------------------------------------------------------------------------

SNAPPED = {
    "portrait": ({"buckets": "64x64\n64x128 b1-2", "width": 50, "height": 90}, (1, 128, 64), "50×90 → 64×128 b1"),
    "batch": ({"buckets": "64X64 B2-3 # two", "batch_size": 9}, (3, 64, 64), "64×64 b9 → 64×64 b3"),
    "exact": ({"buckets": "64x64, 72x64"}, (1, 64, 64), "64×64 b1"),
    "off": (
        {"buckets": "128x128", "snap": False, "width": 64, "height": 72, "batch_size": 2},
        (2, 72, 64),
        "64×72 b2 is in no bucket; it runs on the general graph",
    ),
    "preset": (
        {"preset": "SD1.5", "buckets": "not read", "width": 100, "height": 151},
        (1, 768, 512),
        "100×151 → 512×768 b1",
    ),
}


@pytest.mark.parametrize("case", SNAPPED)
def test_the_snapped_size_is_the_pictures_and_is_said(server: ComfyServer, case: str) -> None:
    inputs, (batch, height, width), said = SNAPPED[case]
    workflow = _bucketed(SD15.workflow(1), **inputs)
    # The empty latent itself; a picture at full size would only take long.
    workflow["save_latent"]["inputs"]["samples"] = ["latent", 0]
    result = server.run(_only(workflow, "save_latent"))
    assert latent_of(result).shape == (batch, 4, height // 8, width // 8)
    assert _texts(result, "shape") == [said]
    assert result.outputs["shape"]["text"] == [said]


def test_a_picture_is_made_at_the_snapped_size(server: ComfyServer) -> None:
    result = server.run(_bucketed(SD15.workflow(1), buckets="64x72 b2", width=60, height=60))
    assert latent_of(result).shape == (2, 4, 9, 8)
    assert len(result.images) == 2


BAD = {
    "a line that is none": (
        "64x64\nbig please",
        'line 2, "big please": "big please" is not a size; write WIDTHxHEIGHT',
    ),
    "not a multiple of 8": ("# mine\n100x64", 'line 2, "100x64": 100 is not a multiple of 8; write 96 or 104'),
    "too small": ("64x64\n\n0x64", 'line 3, "0x64": width must be between 1 and 16384 pixels (got 0)'),
    "empty": ("# nothing", "there is no bucket in the list; write one per line"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_line_is_named_before_anything_runs(server: ComfyServer, case: str) -> None:
    text, said = BAD[case]
    with pytest.raises(PromptRejected) as refusal:
        server.run(_bucketed(SD15.workflow(1), buckets=text))
    errors = refusal.value.body["node_errors"]["shape"]["errors"]
    assert any(said in error["details"] for error in errors), errors


def test_an_unknown_preset_is_refused(server: ComfyServer) -> None:
    with pytest.raises(PromptRejected) as refusal:
        server.run(_bucketed(SD15.workflow(1), preset="SD9"))
    errors = refusal.value.body["node_errors"]["shape"]["errors"]
    assert any('there is no preset "SD9"; choose custom or one of SD1.5' in error["details"] for error in errors)


def test_a_connected_model_decides_which_sizes_can_be(server: ComfyServer) -> None:
    """Flux cuts latents into patches of 2, so its sizes are multiples of 16; SD1.5 takes 8."""
    for line, said in {
        "72x64": "72 is not a multiple of 16; write 64 or 80",
        "100x64": "100 is not a multiple of 16; write 96 or 112",  # and not of the 8 that counts without a model
    }.items():
        result = server.run(_bucketed(FLUX.workflow(1), buckets=f"64x64\n{line}", model=["loader", 0]))
        assert result.error is not None and result.error["node_id"] == "shape"
        assert f'line 2, "{line}": {said}' in result.error["exception_message"]

    sd15 = _bucketed(SD15.workflow(1), buckets="72x64", model=["loader", 0])
    assert latent_of(server.run(sd15)).shape == (1, 4, 8, 9)


def test_the_nodes_explain_themselves(server: ComfyServer) -> None:
    for name, inputs in {
        "OneDiffShapeBucket": ["preset", "buckets", "width", "height", "batch_size", "snap", "model"],
        "OneDiffWarmUp": ["buckets", "model", "positive", "negative", "vae"],
    }.items():
        info = server.get_json(f"/object_info/{name}")[name]
        assert info["category"] == "OneDiff" and info["description"] and all(info["output_tooltips"])
        declared = {**info["input"]["required"], **info["input"].get("optional", {})}
        assert list(declared) == inputs
        assert all(options["tooltip"] for _, options in declared.values())
    shape = server.get_json("/object_info/OneDiffShapeBucket")["OneDiffShapeBucket"]
    assert shape["output"] == ["ONEDIFF_BUCKETS", "INT", "INT", "INT"]
    assert "custom" in shape["input"]["required"]["preset"][1]["options"]


# -- Warm Up -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [SD15, FLUX], ids=["sd15", "flux"])
def test_after_a_warm_up_no_image_waits(elsewhere: ComfyServer, family: TinyFamily) -> None:
    buckets = "64x64 b1-2\n96x64"
    counters = Counters(elsewhere)
    result = elsewhere.run(_only(_warmed(family, buckets), "warm"))
    assert result.status == "success", result.error
    assert (counters.captured, counters.compiled, counters.fallbacks) == (4, 4, {})
    figures = result.outputs["warm"]["warm_up"]
    assert [figure["bucket"] for figure in figures] == ["64×64 b1", "64×64 b2", "96×64 b1"]
    assert [figure["compiled"] for figure in figures] == [2, 1, 1]  # with the first, one for any size
    assert all((figure["loaded"], figure["problem"]) == (0, None) for figure in figures)
    assert all(figure["seconds"] > 0 for figure in figures)
    (summary,) = result.outputs["warm"]["text"]
    assert summary.startswith("3 of 3 ready in ") and summary.endswith(": 4 compiled, 0 loaded")
    assert _texts(result, "warm") == [
        "1 of 3: 64×64 b1 …",
        "2 of 3: 64×64 b2 …",
        "3 of 3: 96×64 b1 …",
        summary,
    ]
    progress = [data["value"] for kind, data in result.events if kind == "progress" and data["node"] == "warm"]
    assert progress[0] == 1 and progress[-1] == 3
    assert "OneDiff: warm-up 2 of 3: 64×64 b2 in " in elsewhere.log_text()

    warm = Counters(elsewhere)
    for seed, (width, height, batch) in enumerate([(64, 64, 1), (64, 64, 2), (96, 64, 1)], start=50):
        workflow = _warmed(family, buckets, seed, batch=batch)
        workflow["latent"]["inputs"] |= {"width": width, "height": height}
        assert latent_of(elsewhere.run(workflow)).shape[0] == batch
    assert (warm.captured, warm.compiled, warm.fallbacks) == (0, 0, {})
    assert warm.served == 3 * family.steps

    # A size that is no bucket and a prompt of another length wait for nothing either.
    other = Counters(elsewhere)
    latent_of(elsewhere.run(_warmed(family, buckets, 60, size=80)))
    longer = _warmed(family, buckets, 61, size=64)
    for name in ("positive", "negative"):
        longer[name]["inputs"]["tokens"] *= 2
    longer["sampler"]["inputs"]["model"] = ["speedup", 0]  # or Warm Up would run again, for this prompt
    latent_of(elsewhere.run(_only(longer, "save_latent")))
    assert (other.captured, other.compiled, other.fallbacks) == (0, 0, {})
    assert other.served == 2 * family.steps


def test_without_graphs_of_their_own_all_buckets_share_one(elsewhere: ComfyServer) -> None:
    workflow = _only(_warmed(FLUX, "208x64\n192x64 b1-2\n64x208"), "warm")
    del workflow["speedup"]["inputs"]["buckets"]
    counters = Counters(elsewhere)
    result = elsewhere.run(workflow)
    assert result.status == "success", result.error
    figures = result.outputs["warm"]["warm_up"]
    assert [figure["problem"] for figure in figures] == [None] * 4
    assert sum(figure["compiled"] for figure in figures) == counters.compiled <= 1
    assert (counters.proved, counters.fallbacks) == (4, {})


def test_an_interrupted_warm_up_goes_on_where_it_stopped(elsewhere: ComfyServer) -> None:
    workflow = _only(_warmed(SD15, "104x64\n104x72\n104x80"), "warm")
    counters = Counters(elsewhere)

    def stop_after_the_first(kind: str, data: dict[str, Any]) -> None:
        if kind == "progress" and data["node"] == "warm" and data["value"] == 1:
            elsewhere.post("/interrupt")

    result = elsewhere.run(workflow, on_event=stop_after_the_first)
    assert result.interrupted
    done = counters.compiled
    assert 1 <= done < 3

    again = Counters(elsewhere)
    result = elsewhere.run(workflow)
    assert result.status == "success", result.error
    assert again.compiled == 3 - done
    figures = result.outputs["warm"]["warm_up"]
    assert [figure["compiled"] for figure in figures] == [0] * done + [1] * (3 - done)
    assert all(figure["problem"] is None for figure in figures)


@pytest.mark.slow
def test_a_restarted_server_loads_what_was_prepared(start_server: Callable[..., ComfyServer]) -> None:
    workflow = _warmed(FLUX, "64x64\n96x64")
    workflow["speedup"]["inputs"]["engine"] = "inductor"  # whose graphs are kept
    base = None
    for compiled, loaded in (([2, 1], 0), ([0, 0], 1)):
        with start_server(base) as running:
            base = running.base_dir
            result = running.run(_only(workflow, "warm"))
            assert result.status == "success", result.error
            figures = result.outputs["warm"]["warm_up"]
            assert [figure["compiled"] for figure in figures] == compiled
            assert all((figure["loaded"], figure["problem"]) == (loaded, None) for figure in figures)


def test_a_bucket_that_cannot_be_is_reported_and_the_others_go_on(elsewhere: ComfyServer) -> None:
    result = elsewhere.run(_only(_warmed(SD15, "112x64\n112x72 f9\n112x80"), "warm"))
    assert result.status == "success", result.error
    problems = [figure["problem"] for figure in result.outputs["warm"]["warm_up"]]
    assert problems == [None, "this model makes images, not videos; write the size without f9", None]
    first, second = result.outputs["warm"]["text"][0].splitlines()
    assert first.startswith("2 of 3 ready in ")
    assert second == f"112×72 b1 f9 is not: {problems[1]}"
    assert f"NOT READY: {problems[1]}" in elsewhere.log_text()


def test_a_bucket_that_is_served_by_no_graph_is_not_called_ready(elsewhere: ComfyServer) -> None:
    workflow = _warmed(SD15, "120x64")
    workflow["patch"] = {"class_type": "CountingPatch", "inputs": {"model": ["loader", 0]}}
    workflow["speedup"]["inputs"]["model"] = ["patch", 0]
    result = elsewhere.run(_only(workflow, "warm"))
    (figure,) = result.outputs["warm"]["warm_up"]
    assert "changes what it keeps" in figure["problem"]
    assert result.outputs["warm"]["text"][0].startswith("0 of 1 ready")


def test_a_model_that_is_not_accelerated_is_an_error(elsewhere: ComfyServer) -> None:
    workflow = _warmed(SD15, "64x64")
    workflow["warm"]["inputs"]["model"] = ["loader", 0]
    result = elsewhere.run(_only(workflow, "warm"))
    assert result.error is not None and result.error["node_id"] == "warm"
    message = result.error["exception_message"]
    assert "not accelerated: connect the output of OneDiff Model Speedup" in message


# -- Warm Up for a VAE -------------------------------------------------------------------------


def _warmed_vae(buckets: str, kind: str = "sd", **speedup: Any) -> Workflow:
    """VAE → VAE Speedup with the buckets of a Shape Bucket → Warm Up."""
    values = {"preset": "custom", "buckets": buckets, "width": 64, "height": 64, "batch_size": 1, "snap": True}
    inputs = {"vae": ["vae", 0], "engine": "eager", "buckets": ["shape", 0], **speedup}
    return {
        "shape": {"class_type": "OneDiffShapeBucket", "inputs": values},
        "vae": {"class_type": "TinyVAE", "inputs": {"kind": kind, "dtype": "float32", "seed": 0}},
        "vae_speedup": {"class_type": "OneDiffVAESpeedup", "inputs": inputs},
        "warm": {"class_type": "OneDiffWarmUp", "inputs": {"vae": ["vae_speedup", 0], "buckets": ["shape", 0]}},
    }


def test_every_bucket_of_a_vae_is_prepared(elsewhere: ComfyServer) -> None:
    workflow, counters = _warmed_vae("96x64 b1-2\n64x96", "taesd"), Counters(elsewhere)
    result = elsewhere.run(workflow)
    assert result.status == "success", result.error
    figures = result.outputs["warm"]["warm_up"]
    assert [figure["bucket"] for figure in figures] == ["96×64 b1", "96×64 b2", "64×96 b1"]
    # Decoding and encoding, for each size; with the first come those for any size.
    assert [figure["compiled"] for figure in figures] == [4, 2, 2]
    assert all(figure["problem"] is None for figure in figures)
    assert (counters.compiled, counters.fallbacks) == (8, {})

    later = Counters(elsewhere)
    workflow["data"] = {
        "class_type": "TinyLatent",
        "inputs": {"seed": 1, "width": 96, "height": 64, "batch": 2, "channels": 4},
    }
    workflow["decode"] = {"class_type": "VAEDecode", "inputs": {"samples": ["data", 0], "vae": ["warm", 1]}}
    workflow["plain"] = {"class_type": "VAEDecode", "inputs": {"samples": ["data", 0], "vae": ["vae", 0]}}
    compared = {"actual": ["decode", 0], "expected": ["plain", 0]}
    workflow["error"] = {"class_type": "RelativeError", "inputs": compared}
    result = elsewhere.run(workflow)
    assert result.status == "success", result.error
    assert result.outputs["error"]["error"][0] <= BOUND
    assert (later.captured, later.compiled, later.served, later.fallbacks) == (0, 0, 1, {})


def test_only_what_is_switched_on_of_a_vae_is_prepared(elsewhere: ComfyServer) -> None:
    workflow, counters = _warmed_vae("72x64", "sd", encode=False), Counters(elsewhere)
    (figure,) = elsewhere.run(workflow).outputs["warm"]["warm_up"]
    assert (figure["compiled"], figure["problem"]) == (2, None)
    assert (counters.served, counters.fallbacks) == (2, {})


def test_a_model_and_its_vae_are_prepared_together(elsewhere: ComfyServer) -> None:
    workflow = _warmed(SD15, "168x64\n168x72")
    workflow |= {name: node for name, node in _warmed_vae("", "taesd").items() if name.startswith("vae")}
    workflow["warm"]["inputs"]["vae"] = ["vae_speedup", 0]
    result = elsewhere.run(_only(workflow, "warm"))
    assert result.status == "success", result.error
    figures = result.outputs["warm"]["warm_up"]
    assert [figure["bucket"] for figure in figures] == ["168×64 b1", "168×72 b1"]
    assert [figure["problem"] for figure in figures] == [None, None]
    assert figures[1]["compiled"] == 3  # sampling, decoding and encoding, at this size


def test_warm_up_says_what_to_connect(elsewhere: ComfyServer) -> None:
    workflow = _warmed_vae("64x64")
    workflow["warm"]["inputs"]["vae"] = ["vae", 0]
    assert "not accelerated: connect the output of OneDiff VAE Speedup" in error_of(elsewhere.run(workflow))
    del workflow["warm"]["inputs"]["vae"]
    assert "connect at least one of model, vae" in error_of(elsewhere.run(_only(workflow, "warm")))
    model = _only(_warmed(FLUX, "64x64"), "warm")
    del model["warm"]["inputs"]["positive"]
    assert "connect the positive conditioning" in error_of(elsewhere.run(model))
    (figure,) = elsewhere.run(_warmed_vae("64x64 f9")).outputs["warm"]["warm_up"]
    assert figure["problem"] == "ComfyUI itself decodes and encodes videos; disconnect the VAE"


LATENTS = """
import json, sys
from types import SimpleNamespace
sys.path[:0] = sys.argv[1:]
from comfy.cli_args import args
args.cpu = True
import comfy.latent_formats as formats
from comfy_extras.nodes_hunyuan import EmptyHunyuanLatentVideo
from comfy_extras.nodes_lt import EmptyLTXVLatentVideo
from comfy_extras.nodes_mochi import EmptyMochiLatentVideo
from nodes import EmptyLatentImage
from onediff_comfy.buckets import Bucket
from onediff_comfy.host.preparation.latents import empty_latent, size_factor

def case(latent_format, host, frames, **diffusion_model):
    objects = {"latent_format": latent_format, "diffusion_model": SimpleNamespace(**diffusion_model)}
    model = SimpleNamespace(get_model_object=objects.get)
    ours = empty_latent(model, Bucket(832, 480, 2, 2, frames))
    latent = host["samples"]
    same = latent.shape == ours.shape and latent.dtype == ours.dtype and latent.device == ours.device
    return [same and not ours.any().item(), list(latent.shape), size_factor(model)]

def video(node, frames):
    return node.execute(832, 480, frames, 2).args[0]

print(json.dumps({
    "sdxl": case(formats.SDXL(), EmptyLatentImage().generate(832, 480, 2)[0], None),
    "wan": case(formats.Wan21(), video(EmptyHunyuanLatentVideo, 81), 81, patch_size=(1, 2, 2)),
    "hunyuan": case(formats.HunyuanVideo(), video(EmptyHunyuanLatentVideo, 25), 25, patch_size=[1, 2, 2]),
    "ltx": case(formats.LTXV(), video(EmptyLTXVLatentVideo, 97), 97),
    "mochi": case(formats.Mochi(), video(EmptyMochiLatentVideo, 30), 30, patch_size=2),
    "wan still": case(formats.Wan21(), video(EmptyHunyuanLatentVideo, 1), None, patch_size=(1, 2, 2)),
}))
"""


def test_latents_are_those_of_the_hosts_own_nodes() -> None:
    """No tiny video checkpoint here: the shapes, against the host's nodes, for models of its latent formats."""
    done = subprocess.run(
        [sys.executable, "-c", LATENTS, str(comfyui_path()), str(repository())],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "sdxl": [True, [2, 4, 60, 104], 8],
        "wan": [True, [2, 16, 21, 60, 104], 16],
        "hunyuan": [True, [2, 16, 7, 60, 104], 16],
        "ltx": [True, [2, 128, 13, 15, 26], 32],
        "mochi": [True, [2, 12, 5, 60, 104], 16],
        "wan still": [True, [2, 16, 1, 60, 104], 16],
    }


# -- without a screen --------------------------------------------------------------------------


def _command(workflow: Workflow | str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    file = folder / "workflow.json"
    file.write_text(workflow if isinstance(workflow, str) else json.dumps(workflow))
    return subprocess.run(
        [sys.executable, "-m", "onediff_comfy", "warmup", "--workflow", str(file), *arguments],
        cwd=repository(),
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def test_the_command_warms_a_server_up_and_makes_no_image(elsewhere: ComfyServer, tmp_path: Path) -> None:
    workflow = _warmed(SD15, "128x64 b1-2\n128x72")
    counters = Counters(elsewhere)
    done = _command(workflow, tmp_path, "--server", elsewhere.url)
    assert done.returncode == 0, done.stderr
    assert counters.compiled == 3
    assert counters.served == 2 * 4  # two steps each, and of one more for any size; no image
    lines = done.stdout.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["128×64 b1", "128×64 b2", "128×72 b1"]
    assert all(line.endswith("1 compiled, 0 loaded  ready") for line in lines)
    assert "2 of 3: 128×64 b2 …" in done.stderr.splitlines()

    elsewhere.free()
    again = _command(workflow, tmp_path, "--server", f"{elsewhere.url}/", "--json")
    assert again.returncode == 0, again.stderr
    figures = json.loads(again.stdout)
    assert [figure["bucket"] for figure in figures] == ["128×64 b1", "128×64 b2", "128×72 b1"]
    assert all(figure["problem"] is None for figure in figures)


def test_the_command_says_when_the_server_did_it_before(elsewhere: ComfyServer, tmp_path: Path) -> None:
    workflow = _warmed(SD15, "136x64")
    first = _command(workflow, tmp_path, "--server", elsewhere.url, "--json")
    second = _command(workflow, tmp_path, "--server", elsewhere.url, "--json")
    assert (first.returncode, second.returncode) == (0, 0), second.stderr
    assert json.loads(second.stdout) == json.loads(first.stdout)
    assert "prepared these buckets before" in second.stderr and "prepared these buckets before" not in first.stderr


def test_the_command_fails_when_a_bucket_is_not_ready(elsewhere: ComfyServer, tmp_path: Path) -> None:
    done = _command(_warmed(SD15, "144x64\n144x72 f9"), tmp_path, "--server", elsewhere.url)
    assert done.returncode == 1
    good, bad = done.stdout.splitlines()
    assert good.endswith("ready") and "NOT READY: this model makes images, not videos" in bad


def test_the_command_passes_on_what_the_server_refuses_or_fails_at(elsewhere: ComfyServer, tmp_path: Path) -> None:
    refused = _command(_warmed(SD15, "64x64\nbig"), tmp_path, "--server", elsewhere.url)
    assert refused.returncode == 1
    assert "ComfyUI refused" in refused.stderr and 'line 2, "big": "big" is not a size' in refused.stderr
    workflow = _warmed(SD15, "64x64")
    workflow["warm"]["inputs"]["model"] = ["loader", 0]
    failed = _command(workflow, tmp_path, "--server", elsewhere.url)
    assert failed.returncode == 1
    assert "node warm (OneDiffWarmUp): this MODEL is not accelerated" in failed.stderr
    assert "Traceback" not in refused.stderr + failed.stderr


def test_stopping_the_command_stops_the_server_too_and_keeps_what_is_done(
    elsewhere: ComfyServer, tmp_path: Path
) -> None:
    file = tmp_path / "workflow.json"
    buckets = [f"152x{height}" for height in range(64, 384, 8)]  # many: the server is too busy to answer at once
    file.write_text(json.dumps(_only(_warmed(SD15, "\n".join(buckets)), "warm")))
    counters = Counters(elsewhere)
    command = subprocess.Popen(
        [sys.executable, "-m", "onediff_comfy", "warmup", "--workflow", str(file), "--server", elsewhere.url],
        cwd=repository(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # What is started in the background of a shell, as these tests may be, is told to ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert command.stderr is not None
    for line in command.stderr:
        if line.startswith("3 of 40"):
            command.send_signal(signal.SIGINT)
            break
    printed, said = command.communicate(timeout=900)
    assert command.returncode == 1
    assert printed == "" and said.splitlines()[-1] == "stopped; what was prepared by then is kept"
    _wait_until_idle(elsewhere)
    assert 2 <= counters.compiled < len(buckets)


def test_the_command_notices_that_its_prompt_was_taken_off_the_queue(
    elsewhere: ComfyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(warmup_command, "_LOOK_EVERY_S", 0.5)
    file = tmp_path / "workflow.json"
    file.write_text(json.dumps(_warmed(SD15, "160x64")))
    busy = _only(SD15.workflow(9), "save")
    busy["sampler"]["inputs"]["steps"] = 10_000
    busy_id = elsewhere.post("/prompt", {"prompt": busy})["prompt_id"]
    while not elsewhere.get_json("/queue")["queue_running"]:  # until then it is itself a waiting one
        time.sleep(0.1)
    with ThreadPoolExecutor() as threads:
        options = argparse.Namespace(workflow=file, server=elsewhere.url, json=False)
        command = threads.submit(warmup_command.warm_up, options)
        while not (waiting := elsewhere.get_json("/queue")["queue_pending"]):
            time.sleep(0.1)
        time.sleep(1)  # it has looked by then: waiting for its turn is no reason to give up
        assert not command.done()
        elsewhere.post("/queue", {"delete": [waiting[0][1]]})
        assert command.result(timeout=120) == 1
    assert "somebody took it off ComfyUI's queue" in capsys.readouterr().err
    elsewhere.post("/interrupt", {"prompt_id": busy_id})
    _wait_until_idle(elsewhere)


def _wait_until_idle(server: ComfyServer) -> None:
    for _ in range(300):
        queue = server.get_json("/queue")
        if not queue["queue_running"] and not queue["queue_pending"]:
            return
        time.sleep(0.1)
    raise AssertionError("the server is still at work")


FILES = {
    "no JSON": ("{", "is no JSON"),
    "the editor's form": ('{"nodes": [], "links": []}', "is in the editor's form"),
    "something else": ('{"a": 1}', "is no workflow in API form"),
    "without the node": ('{"1": {"class_type": "SaveImage", "inputs": {}}}', "has no OneDiff Warm Up node"),
}


@pytest.mark.parametrize("case", FILES)
def test_the_command_says_what_is_wrong_with_a_file(tmp_path: Path, case: str) -> None:
    text, said = FILES[case]
    done = _command(text, tmp_path)
    assert done.returncode == 1
    assert said in done.stderr and str(tmp_path) in done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_says_how_to_start_a_server_where_none_answers(tmp_path: Path) -> None:
    workflow = _warmed(SD15, "64x64")
    nobody = _command(workflow, tmp_path, "--server", "http://127.0.0.1:9")
    assert nobody.returncode == 1
    assert "no ComfyUI answers at http://127.0.0.1:9" in nobody.stderr and "python main.py" in nobody.stderr
    nonsense = _command(workflow, tmp_path, "--server", "no:sense")
    assert nonsense.returncode == 1
    assert "no:sense is no address of a server" in nonsense.stderr
    assert "Traceback" not in nobody.stderr + nonsense.stderr
