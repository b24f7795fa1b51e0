"""OneFlow in a real ComfyUI: UNets, a transformer, a VAE and a ControlNet, equal to eager, one graph for each size."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("oneflow", reason="OneFlow is not in this Python; make test-oneflow runs these in one that has it")

import numpy as np
from controls import NET, install_controls
from pictures import FAMILIES, OTHER, Counters, assert_same_picture, latent_of
from PIL import Image

from dev.host import ComfyServer
from tools.models.checkpoints import checkpoint_file
from tools.workflows import Workflow

HINT = "hint.png"
VAE_BOUND = 1e-5  # relative error, as for the other engines


@pytest.mark.parametrize("name", ["sd15", "flux"])  # SDXL at one size is below, and slow
def test_a_size_is_one_graph_and_coming_back_is_none(
    server: ComfyServer, name: str, tally: Callable[[str], None]
) -> None:
    family = FAMILIES[name]
    counters = Counters(server)
    for size, graphs in (((128, 128), 1), ((192, 128), 2), ((128, 128), 2)):
        expected = latent_of(server.run(family.workflow(1, size=size)))
        assert_same_picture(latent_of(server.run(family.workflow(1, "oneflow", size=size))), expected)
        assert counters.compiled == graphs
    assert (counters.served, counters.fallbacks, counters.retired) == (3 * family.steps, {}, 0)
    seconds = [graph["seconds"] for graph in counters.graphs]
    tally(f"tiny {name}, OneFlow on the CPU: compiled in {seconds[0]} s")


@pytest.mark.parametrize("name", ["sd15", pytest.param("sdxl", marks=pytest.mark.slow)])
def test_a_new_process_builds_nothing_and_another_checkpoint_neither(
    server: ComfyServer, start_server: Callable[..., ComfyServer], tally: Callable[[str], None], name: str
) -> None:
    own = FAMILIES[name]
    other = dataclasses.replace(own, checkpoint=OTHER[name])
    size = (64, 128)  # which no other test asks for
    expected, of_other = (latent_of(server.run(family.workflow(2, size=size))) for family in (own, other))
    first = Counters(server)
    assert_same_picture(latent_of(server.run(own.workflow(2, "oneflow", size=size))), expected)
    assert (first.compiled, first.served, first.fallbacks, first.retired) == (1, own.steps, {}, 0)
    tally(f"tiny {name}, OneFlow on the CPU: compiled in {first.graphs[0]['seconds']} s")
    with start_server(server.base_dir) as second:
        counters = Counters(second)
        for family, picture in ((own, expected), (other, of_other), (own, expected)):  # weights elsewhere each time
            assert_same_picture(latent_of(second.run(family.workflow(2, "oneflow", size=size))), picture)
        assert (counters.captured, counters.compiled, counters.loaded) == (0, 0, 1)
        assert (counters.served, counters.fallbacks) == (3 * own.steps, {})
        tally(f"tiny {name}, OneFlow on the CPU: loaded in {counters.graphs[0]['seconds']} s")


def test_a_kl_vae_decodes(server: ComfyServer) -> None:
    counters = Counters(server)
    for size, graphs in (((128, 96), 1), ((192, 96), 2), ((128, 96), 2)):
        assert _decoded(server, *size) <= VAE_BOUND
        assert counters.compiled == graphs
    assert (counters.served, counters.fallbacks, counters.retired) == (3, {}, 0)


def _decoded(server: ComfyServer, width: int, height: int) -> float:
    """The relative error of decoding a latent."""

    def decode(vae: str) -> dict[str, Any]:
        return {"class_type": "VAEDecode", "inputs": {"samples": ["data", 0], "vae": [vae, 0]}}

    latent = {"seed": width, "width": width, "height": height, "batch": 1, "channels": 4}
    workflow: Workflow = {
        "loader": {"class_type": "TinyVAE", "inputs": {"kind": "sd", "dtype": "float32", "seed": 0}},
        "speedup": {
            "class_type": "OneDiffVAESpeedup",
            "inputs": {"vae": ["loader", 0], "engine": "oneflow", "compile": "wait"},
        },
        "data": {"class_type": "TinyLatent", "inputs": latent},
        "actual": decode("speedup"),
        "expected": decode("loader"),
        "error": {"class_type": "RelativeError", "inputs": {"actual": ["actual", 0], "expected": ["expected", 0]}},
    }
    result = server.run(workflow)
    assert result.status == "success", result.error
    (error,) = result.outputs["error"]["error"]
    return float(error)


def test_a_controlnet_and_its_unet(server: ComfyServer) -> None:
    install_controls(server)
    pixels = np.random.default_rng(1).integers(0, 256, (128, 128, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(server.base_dir / "input" / HINT)
    expected = latent_of(server.run(_controlled(None)))
    counters = Counters(server)
    assert_same_picture(latent_of(server.run(_controlled("oneflow"))), expected)
    assert (counters.compiled, counters.fallbacks) == (2, {})
    assert counters.served == 2 * FAMILIES["sd15"].steps
    assert_same_picture(latent_of(server.run(_controlled("oneflow"))), expected)
    assert counters.compiled == 2


def _controlled(engine: str | None) -> Workflow:
    """An image under a ControlNet; both networks with ``engine``, or neither accelerated."""
    workflow = FAMILIES["sd15"].workflow(1, engine)
    for name in ("decode", "save"):
        del workflow[name]
    workflow["hint"] = {"class_type": "LoadImage", "inputs": {"image": HINT}}
    workflow["net"] = {"class_type": "ControlNetLoader", "inputs": {"control_net_name": checkpoint_file(NET)}}
    if engine is not None:
        inputs = {"control_net": ["net", 0], "engine": engine, "compile": "wait"}
        workflow["fast"] = {"class_type": "OneDiffControlNetSpeedup", "inputs": inputs}
    applied = {
        "positive": ["positive", 0],
        "negative": ["negative", 0],
        "control_net": ["net" if engine is None else "fast", 0],
        "image": ["hint", 0],
        "strength": 1.0,
        "start_percent": 0.0,
        "end_percent": 1.0,
    }
    workflow["apply"] = {"class_type": "ControlNetApplyAdvanced", "inputs": applied}
    workflow["sampler"]["inputs"].update(positive=["apply", 0], negative=["apply", 1])
    return workflow
