"""The VAE Speedup node in a real ComfyUI: any size and batch, tiled or not, the same picture, one compilation each."""

from __future__ import annotations

import json
import random
import subprocess
import sys

import pytest
import torch
from pictures import Counters, compiled_twice
from vae_bench import BOUND, FAMILIES, SD, UNTOUCHED, Bench, TinyFamily

from dev.environment import comfyui_path, repository
from dev.host import ComfyServer
from tools.workflows import Workflow


def _sizes(dice: random.Random, largest: int, count: int) -> list[tuple[int, int, int]]:
    """Width, height and batch; no two alike, the sides any multiple of eight."""
    return [(dice.randrange(96, largest + 1, 8), dice.randrange(96, largest + 1, 8), 1 + i) for i in range(count)]


@pytest.mark.parametrize(
    "family",
    [FAMILIES[0], *(pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES[1:])],
    ids=lambda family: family.kind,
)
def test_any_size_is_decoded_and_encoded_by_one_graph_each(server: ComfyServer, family: TinyFamily) -> None:
    bench, dice, counters = Bench(server, family), random.Random(6), Counters(server)
    sizes = [*_sizes(dice, 384, 3), (1024, 256, 1)]
    errors = [bench.decoded(*size, seed) for seed, size in enumerate(sizes)]
    errors.append(bench.decoded(264, 184, 1, 10, tile_size=128, overlap=32))
    assert counters.compiled <= 1  # none if an earlier test had one of this family
    sizes = [*_sizes(dice, family.largest_encoded, 2), (256, 512, 1)]
    errors += [bench.encoded(*size, 20 + seed) for seed, size in enumerate(sizes)]
    errors.append(bench.encoded(200, 136, 1, 30, tile_size=128, overlap=32))
    errors.append(bench.inpainted(136, 200, 31))
    assert max(errors) <= BOUND, errors
    assert counters.compiled <= 2
    assert counters.served > len(errors)  # a tile is a call
    assert (counters.retired, counters.fallbacks) == (0, {})
    assert compiled_twice(server) == []


def test_a_new_process_serves_new_sizes_without_capturing_or_compiling(
    server: ComfyServer, restarted: ComfyServer
) -> None:
    assert Bench(server, SD).decoded(128, 96, 1, 40) <= BOUND
    assert Bench(server, SD).encoded(128, 96, 1, 40) <= BOUND
    bench, counters = Bench(restarted, SD), Counters(restarted)
    assert bench.decoded(128, 96, 1, 41) <= BOUND
    assert bench.encoded(128, 96, 1, 41) <= BOUND
    assert (counters.captured, counters.compiled, counters.loaded, counters.proved) == (0, 0, 2, 0)
    assert bench.decoded(264, 120, 3, 42) <= BOUND
    assert bench.encoded(120, 264, 3, 42) <= BOUND
    assert (counters.captured, counters.compiled, counters.loaded, counters.proved) == (0, 0, 2, 2)
    assert (counters.served, counters.fallbacks) == (4, {})


def test_the_vae_is_loaded_anew_and_its_graphs_stay(server: ComfyServer) -> None:
    bench = Bench(server, SD, "eager")
    assert bench.decoded(128, 96, 1, 50) <= BOUND
    server.free()
    counters = Counters(server)
    assert bench.decoded(128, 96, 1, 50) <= BOUND
    assert (counters.captured, counters.compiled, counters.served, counters.fallbacks) == (0, 0, 1, {})


@pytest.mark.parametrize("method", ["decode", "encode"])
def test_what_is_switched_off_is_left_to_the_host(server: ComfyServer, method: str) -> None:
    bench, counters = Bench(server, SD, "eager", **{method: False}), Counters(server)
    off, on = (bench.decoded, bench.encoded) if method == "decode" else (bench.encoded, bench.decoded)
    assert off(104, 96, 1, 60) <= UNTOUCHED  # the host's own code on the same weights, on either side
    assert (counters.served, counters.fallbacks) == (0, {})
    assert on(104, 96, 1, 60) <= BOUND
    assert (counters.served, counters.fallbacks) == (1, {})


# Slow: unit/test_inductor.py holds Inductor to what eager rounds; compiling the VAE takes a minute and a half.
@pytest.mark.parametrize("engine", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_in_bfloat16_it_is_as_exact_as_eager(server: ComfyServer, engine: str) -> None:
    """Both against float32: an error is no larger than a tenth more than eager's own in the same dtype."""
    loaders = {"exact": ("float32", None), "eager": ("bfloat16", None), "ours": ("bfloat16", engine)}
    data = {"seed": 70, "width": 192, "height": 256, "batch": 2, "channels": 4}
    workflow: Workflow = {"data": {"class_type": "TinyLatent", "inputs": data}}
    for name, (dtype, accelerated_by) in loaders.items():
        loader = {"kind": "sd", "dtype": dtype, "seed": 0}
        workflow[f"{name}_vae"] = {"class_type": "TinyVAE", "inputs": loader}
        if accelerated_by is not None:
            workflow[f"{name}_loader"] = workflow[f"{name}_vae"]
            speedup = {"vae": [f"{name}_loader", 0], "engine": accelerated_by, "compile": "wait", "encode": False}
            workflow[f"{name}_vae"] = {"class_type": "OneDiffVAESpeedup", "inputs": speedup}
        decode = {"samples": ["data", 0], "vae": [f"{name}_vae", 0]}
        workflow[name] = {"class_type": "VAEDecode", "inputs": decode}
        compared = {"actual": [name, 0], "expected": ["exact", 0]}
        workflow[f"{name}_error"] = {"class_type": "RelativeError", "inputs": compared}
    counters = Counters(server)
    result = server.run(workflow)
    assert result.status == "success", result.error
    error = {name: result.outputs[f"{name}_error"]["error"][0] for name in loaders}
    assert counters.served == 1
    assert 1e-4 < error["eager"] < 0.1
    assert error["ours"] <= 1.1 * error["eager"], error


_VIDEO = """
import json, logging, sys
sys.path[:0] = sys.argv[1:]
sys.argv[1:] = ["--cpu"]
import comfy.options
comfy.options.enable_args_parsing()
import torch
from comfy.model_patcher import ModelPatcher
from onediff_comfy.host.adapters import attach
from onediff_comfy.host.process.process import metrics
from onediff_comfy.host.adapters.vae import accelerate_vae

class Module(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
    def decode(self, x):
        return self.layer(x)

class VAE:
    vae_dtype = torch.float32
    def __init__(self):
        self.first_stage_model = Module()
        self.patcher = ModelPatcher(self.first_stage_model, torch.device("cpu"), torch.device("cpu"))
    def decode(self, x):
        return self.first_stage_model.decode(x)

shown, logged = [], []
attach.status_of = lambda node: shown.append
handler = logging.Handler(logging.WARNING)
handler.emit = lambda record: logged.append(record.getMessage())
logging.getLogger("onediff_comfy").addHandler(handler)
vae = accelerate_vae(VAE(), "eager", "7")
with torch.no_grad():
    for _ in range(2):
        vae.decode(torch.randn(1, 4, 3, 2, 4))
print(json.dumps([shown, logged, metrics().snapshot()["fallbacks"]]))
"""


def test_a_video_says_why_it_is_not_accelerated_and_counts_once() -> None:
    """Without a server: a VAE of one layer, in a process of its own with the host's classes."""
    command = [sys.executable, "-c", _VIDEO, str(comfyui_path()), str(repository())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    shown, logged, fallbacks = json.loads(done.stdout.splitlines()[-1])
    reason = "this VAE has code that is not ComfyUI's, so its videos are made by that code alone"
    assert fallbacks == {reason: 2}
    assert set(shown) == {f"not accelerated: {reason}"}
    assert [reason in line for line in logged] == [True]


def test_the_node_explains_itself(server: ComfyServer) -> None:
    info = server.get_json("/object_info/OneDiffVAESpeedup")["OneDiffVAESpeedup"]
    assert info["category"] == "OneDiff"
    assert info["display_name"] == "OneDiff VAE Speedup"
    assert info["description"]
    assert list(info["input"]["required"]) == ["vae", "engine"]
    assert list(info["input"]["optional"]) == ["compile", "decode", "encode", "buckets"]
    inputs = {**info["input"]["required"], **info["input"]["optional"]}
    assert all(options["tooltip"] for _, options in inputs.values())
    assert all(info["output_tooltips"])
    defaults = {name: options["default"] for name, (_, options) in inputs.items() if "default" in options}
    assert defaults == {"engine": "auto", "compile": "auto", "decode": True, "encode": True}


@pytest.mark.parametrize("engine", ["oneflow", "cudagraph"])
def test_an_engine_that_cannot_run_here_says_so_and_the_picture_is_made(server: ComfyServer, engine: str) -> None:
    if engine == "cudagraph" and torch.cuda.is_available():
        pytest.skip("this machine has an NVIDIA GPU, so the cudagraph engine is available")
    counters = Counters(server)
    assert Bench(server, SD, engine).decoded(72, 80, 1, 80) <= UNTOUCHED
    (reason,) = counters.fallbacks
    assert reason.startswith(f"the {engine} engine is not available: ")
    assert counters.compiled == 0
