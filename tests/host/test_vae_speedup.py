"""The VAE Speedup node in a real ComfyUI: any size and batch, tiled or not, the same picture, one compilation each."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from pictures import Counters, compiled_twice
from vae_bench import BOUND, FAMILIES, SD, Bench, TinyFamily

from dev.host import ComfyServer
from dev.workflows import Workflow


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
    sizes = [*_sizes(dice, 384, 4), (1024, 256, 1)]
    errors = [bench.decoded(*size, seed) for seed, size in enumerate(sizes)]
    errors.append(bench.decoded(264, 184, 1, 10, tile_size=128, overlap=32))
    assert counters.compiled <= 1  # none if an earlier test had one of this family
    sizes = [*_sizes(dice, family.largest_encoded, 4), (256, 512, 1)]
    errors += [bench.encoded(*size, 20 + seed) for seed, size in enumerate(sizes)]
    errors.append(bench.encoded(200, 136, 1, 30, tile_size=128, overlap=32))
    errors.append(bench.inpainted(136, 200, 31))
    assert max(errors) <= BOUND, errors
    assert counters.compiled <= 2
    assert counters.served > len(errors)  # a tile is a call
    assert (counters.retired, counters.fallbacks) == (0, {})
    assert compiled_twice(server) == []


def test_a_new_process_serves_new_sizes_without_capturing_or_compiling(
    server: ComfyServer, start_process: Callable[[ComfyServer], ComfyServer]
) -> None:
    assert Bench(server, SD).decoded(128, 96, 1, 40) <= BOUND
    assert Bench(server, SD).encoded(128, 96, 1, 40) <= BOUND
    with start_process(server) as other:
        bench, counters = Bench(other, SD), Counters(other)
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
    assert off(104, 96, 1, 60) == 0  # the host's own code on the same weights, on either side
    assert (counters.served, counters.fallbacks) == (0, {})
    assert on(104, 96, 1, 60) <= BOUND
    assert (counters.served, counters.fallbacks) == (1, {})


def test_in_bfloat16_it_is_as_exact_as_eager(server: ComfyServer) -> None:
    """Both against float32: an error is no larger than a tenth more than eager's own in the same dtype."""
    loaders = {"exact": ("float32", None), "eager": ("bfloat16", None), "ours": ("bfloat16", "inductor")}
    data = {"seed": 70, "width": 192, "height": 256, "batch": 2, "channels": 4}
    workflow: Workflow = {"data": {"class_type": "TinyLatent", "inputs": data}}
    for name, (dtype, engine) in loaders.items():
        loader = {"kind": "sd", "dtype": dtype, "seed": 0}
        workflow[f"{name}_vae"] = {"class_type": "TinyVAE", "inputs": loader}
        if engine is not None:
            workflow[f"{name}_loader"] = workflow[f"{name}_vae"]
            speedup = {"vae": [f"{name}_loader", 0], "engine": engine, "encode": False}
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
    assert defaults == {"engine": "auto", "compile": "wait", "decode": True, "encode": True}


def test_an_engine_that_cannot_run_here_says_so_and_the_picture_is_made(server: ComfyServer) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has an NVIDIA GPU, so the cudagraph engine is available")
    counters = Counters(server)
    assert Bench(server, SD, "cudagraph").decoded(72, 80, 1, 80) == 0
    (reason,) = counters.fallbacks
    assert reason.startswith("the cudagraph engine is not available: ")
    assert counters.compiled == 0
