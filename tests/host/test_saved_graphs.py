"""Save and Load Compiled Graph for a VAE, and for everything that a workflow accelerates at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from controls import NET, install_controls
from graph_files import doctored, error_of, put
from pictures import FAMILIES, Counters, assert_same_picture, latent_of
from PIL import Image
from vae_bench import BOUND

from dev.host import ComfyServer, RunResult
from onediff_comfy.store.artifact import Artifact
from onediff_comfy.store.graph_file import pack, unpack
from onediff_comfy.store.trust import Trust
from tools.models.checkpoints import checkpoint_file
from tools.workflows import Workflow

SD15 = FAMILIES["sd15"]
Wire = list[Any]


def _node(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}


def _tiny(kind: str = "sd", dtype: str = "float32") -> dict[str, Any]:
    return _node("TinyVAE", kind=kind, dtype=dtype, seed=0)


def _used(vae: Wire, seed: int, width: int = 128, height: int = 96, channels: int = 4) -> Workflow:
    """A latent that ``vae`` decodes and encodes again, against what the VAE of the node "loader" makes of the same."""
    plain = ["loader", 0]
    return {
        "data": _node("TinyLatent", seed=seed, width=width, height=height, batch=1, channels=channels),
        "image": _node("VAEDecode", samples=["data", 0], vae=vae),
        "plain_image": _node("VAEDecode", samples=["data", 0], vae=plain),
        "image_error": _node("RelativeError", actual=["image", 0], expected=["plain_image", 0]),
        "again": _node("VAEEncode", pixels=["image", 0], vae=vae),
        "plain_again": _node("VAEEncode", pixels=["image", 0], vae=plain),
        "again_error": _node("RelativeError", actual=["again", 0], expected=["plain_again", 0]),
    }


def _decoded(vae: Wire, seed: int, **size: int) -> Workflow:
    """As ``_used``, without encoding."""
    return {name: node for name, node in _used(vae, seed, **size).items() if "again" not in name}


def _errors(result: RunResult) -> list[float]:
    assert result.status == "success", result.error
    return [float(output["error"][0]) for output in result.outputs.values() if "error" in output]


def _loaded(file: str, mismatch: str = "strict", **things: Wire) -> dict[str, Any]:
    return _node("OneDiffLoadCompiledGraph", file=file, mismatch=mismatch, **things)


@pytest.fixture(scope="module")
def saved(server: ComfyServer) -> Path:
    """A file of the shared server: the tiny SD VAE, decoding and encoding, compiled for all sizes in float32."""
    workflow = {
        "loader": _tiny(),
        "speedup": _node("OneDiffVAESpeedup", vae=["loader", 0], engine="inductor", compile="wait"),
        **_used(["speedup", 0], 1),
        "keep": _node("OneDiffSaveCompiledGraph", vae=["speedup", 0], filename="a vae", after=["again", 0]),
    }
    result = server.run(workflow)
    assert max(_errors(result)) <= BOUND
    (inside,) = result.outputs["keep"]["text"]
    assert not set("[]{}'@") & set(inside), "for people, not Python's repr"
    assert "VAE decode, all sizes · inductor" in inside and "VAE encode, all sizes · inductor" in inside
    return server.base_dir / "models" / "onediff_graphs" / "a vae.graph"


def _without_a_store(server: ComfyServer, start_server: Callable[..., ComfyServer], folder: Path) -> ComfyServer:
    """Another process of an installation that finds no kept graphs: only files can spare it a compilation."""
    other = start_server(server.base_dir, ONEDIFF_CACHE_DIR=str(folder / "empty"))
    other.log_file = folder / "server.log"
    return other


@pytest.mark.slow
def test_a_saved_vae_is_loaded_by_a_process_with_nothing_kept(
    saved: Path, server: ComfyServer, start_server: Callable[..., ComfyServer], tmp_path: Path
) -> None:
    with _without_a_store(server, start_server, tmp_path) as other:
        counters = Counters(other)
        workflow = {"loader": _tiny(), "load": _loaded(saved.name, vae=["loader", 0])}
        assert max(_errors(other.run({**workflow, **_used(["load", 1], 2)}))) <= BOUND
        assert (counters.captured, counters.compiled, counters.loaded) == (0, 0, 2)
        assert max(_errors(other.run({**workflow, **_used(["load", 1], 3, width=200, height=264)}))) <= BOUND
        assert (counters.captured, counters.compiled, counters.loaded) == (0, 0, 2)
        assert (counters.served, counters.proved, counters.fallbacks) == (4, 4, {})
        assert "WARNING OneDiff" not in other.log_text()


@pytest.mark.slow
def test_a_graph_for_another_dtype_is_explained(saved: Path, server: ComfyServer) -> None:
    there: Workflow = {"loader": _tiny(dtype="bfloat16"), "load": _loaded(saved.name, vae=["loader", 0])}
    failed = server.run({**there, **_decoded(["load", 1], 4)})
    assert "a vae.graph does not fit this VAE: dtype: compiled for float32, here it is bfloat16" in error_of(failed)

    # The same the other way round, and without strict: compiled, or found, for the dtype that there is.
    here: Workflow = {
        "loader": _tiny(dtype="bfloat16"),
        "speedup": _node("OneDiffVAESpeedup", vae=["loader", 0], engine="inductor", compile="wait", encode=False),
        **_decoded(["speedup", 0], 5),
        "keep": _node("OneDiffSaveCompiledGraph", vae=["speedup", 0], filename="half a vae", after=["image", 0]),
    }
    assert max(_errors(server.run(here))) <= 2e-2
    counters = Counters(server)
    workflow = {"loader": _tiny(), "load": _loaded("half a vae.graph", "compile", vae=["loader", 0])}
    workflow["show"] = _node("PreviewAny", source=["load", 1])  # its own text is shown with it
    result = server.run({**workflow, **_decoded(["load", 1], 6)})
    assert max(_errors(result)) <= BOUND
    assert (counters.served, counters.fallbacks) == (1, {})
    problem = "half a vae.graph does not fit this VAE: dtype: compiled for bfloat16, here it is float32"
    assert problem in result.outputs["load"]["text"][0]
    assert f"{problem}; it will be compiled again on first use" in server.log_text()


def _changed(server: ComfyServer, saved: Path, name: str, change: Callable[[dict[str, Any]], None]) -> str:
    """A file with graphs whose manifests say something else, trusted by a server's installation."""
    artifacts: list[Artifact] = [doctored(artifact, change) for artifact in unpack(saved.read_bytes())]
    for artifact in artifacts:
        Trust(server.base_dir / "onediff-config").trust(artifact)
    return put(server, name, pack(artifacts))


@pytest.mark.slow
def test_a_graph_for_another_torch_is_explained(saved: Path, server: ComfyServer) -> None:
    file = _changed(server, saved, "old torch.graph", lambda manifest: manifest["environment"].update(torch="2.10.0"))
    workflow = {"loader": _tiny(), "load": _loaded(file, vae=["loader", 0])}
    message = error_of(server.run({**workflow, **_decoded(["load", 1], 7)}))
    assert "old torch.graph does not fit this VAE: torch: compiled for 2.10.0, here it is " in message


@pytest.mark.slow
def test_a_graph_that_what_is_connected_would_not_use_is_explained(saved: Path, server: ComfyServer) -> None:
    workflow: Workflow = {
        "loader": _tiny(),
        "speedup": _node("OneDiffVAESpeedup", vae=["loader", 0], engine="eager", compile="wait"),
        "load": _loaded(saved.name, vae=["speedup", 0]),
    }
    message = error_of(server.run({**workflow, **_decoded(["load", 1], 7)}))
    assert "engine: compiled for inductor, and what is connected is eager; choose inductor on OneDiff VAE" in message

    file = _changed(server, saved, "fp8.graph", lambda manifest: manifest["options"].update(precision="fp8"))
    workflow = {"loader": _tiny(), "load": _loaded(file, "compile", vae=["loader", 0])}
    workflow["show"] = _node("PreviewAny", source=["load", 1])
    counters = Counters(server)
    result = server.run({**workflow, **_decoded(["load", 1], 7)})
    assert max(_errors(result)) <= BOUND
    assert "precision: compiled for fp8, and what is connected is lossless" in result.outputs["load"]["text"][0]
    assert (counters.served, counters.fallbacks) == (1, {})


@pytest.mark.slow
def test_a_graph_of_another_architecture_is_explained(saved: Path, server: ComfyServer) -> None:
    flux: Workflow = {"loader": _tiny("flux"), "load": _loaded(saved.name, vae=["loader", 0])}
    message = error_of(server.run({**flux, **_decoded(["load", 1], 8, channels=16)}))
    assert "architecture: compiled for AutoencoderKL decode all sizes, and this VAE has no weight quant_conv" in message

    # Where all weights have the same names, the number of channels tells.
    def wider(manifest: dict[str, Any]) -> None:
        if "decode" in manifest["target"]:
            manifest["shapes"]["axes"][0][1] = 16

    (decode,) = (a for a in unpack(saved.read_bytes()) if "decode" in a.manifest.target)
    one = saved.with_name("decode.graph")
    one.write_bytes(pack([decode]))
    file = _changed(server, one, "wide.graph", wider)
    workflow = {"loader": _tiny(), "load": _loaded(file, vae=["loader", 0])}
    message = error_of(server.run({**workflow, **_decoded(["load", 1], 9)}))
    assert "with latents of 16 channels, and this VAE's have 4" in message

    model = FAMILIES["flux"].workflow(1)
    model["load"] = _loaded(saved.name, model=["loader", 0])
    model["sampler"]["inputs"]["model"] = ["load", 0]
    assert "and this MODEL has no weight " in error_of(server.run(model))


@pytest.mark.slow
def test_the_nodes_say_what_to_connect(saved: Path, server: ComfyServer) -> None:
    everything = "connect at least one of model, vae, clip, control_net"
    load: Workflow = {"load": _loaded(saved.name), "show": _node("PreviewAny", source=["load", 1])}
    assert everything in error_of(server.run(load))
    keep: Workflow = {"keep": _node("OneDiffSaveCompiledGraph", filename="nothing")}
    assert everything in error_of(server.run(keep))
    # An output whose input is not connected: who uses it is told, instead of failing at None.
    half = {"loader": _tiny(), "load": _loaded(saved.name, vae=["loader", 0])}
    half["kind"] = _node("ModelKind", model=["load", 0])
    assert "the output model is empty because nothing is connected to the input model" in error_of(server.run(half))


@pytest.mark.slow
def test_save_says_what_is_missing_for_a_vae_and_compiles_it_for_a_latent(saved: Path, server: ComfyServer) -> None:
    workflow: Workflow = {
        "loader": _tiny(),
        "keep": _node("OneDiffSaveCompiledGraph", vae=["loader", 0], filename="early"),
    }
    assert "this VAE is not accelerated: connect the output of OneDiff VAE Speedup" in error_of(server.run(workflow))
    workflow["speedup"] = _node("OneDiffVAESpeedup", vae=["loader", 0], engine="inductor", compile="wait")
    workflow["keep"]["inputs"]["vae"] = ["speedup", 0]
    message = error_of(server.run(workflow))
    assert "nothing is compiled yet for this VAE" in message and "connect a latent" in message
    workflow["latent"] = _node("EmptyLatentImage", width=128, height=96, batch_size=1)
    workflow["keep"]["inputs"]["latent"] = ["latent", 0]
    result = server.run(workflow)
    assert result.status == "success", result.error
    (inside,) = result.outputs["keep"]["text"]
    assert "VAE decode, all sizes · inductor" in inside and "VAE encode, all sizes · inductor" in inside


@pytest.mark.slow
def test_everything_that_a_workflow_accelerates_goes_into_one_file(
    server: ComfyServer, start_server: Callable[..., ComfyServer], tmp_path: Path
) -> None:
    install_controls(server)
    pixels = np.random.default_rng(1).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((64, 64)).save(server.base_dir / "input" / "any.png")
    wires = {"model": ["loader", 0], "vae": ["vae", 0], "clip": ["clip", 0], "control_net": ["net", 0]}
    expected = latent_of(server.run(_everything(wires)))

    nodes = {"model": "Model", "vae": "VAE", "clip": "CLIP", "control_net": "ControlNet"}
    workflow = _everything({kind: [f"{kind}_speedup", 0] for kind in nodes})
    for kind, name in nodes.items():
        more = {"encode": False} if kind == "vae" else {}
        inputs = {kind: wires[kind], "engine": "inductor", "compile": "wait", **more}
        workflow[f"{kind}_speedup"] = _node(f"OneDiff{name}Speedup", **inputs)
    things: dict[str, Any] = {kind: [f"{kind}_speedup", 0] for kind in nodes}
    workflow["keep"] = _node("OneDiffSaveCompiledGraph", filename="everything", after=["image", 0], **things)
    # The prompt's text encoder is not seen in the image: the tiny model has conditioning of its own.
    workflow["keep"]["inputs"]["positive"] = ["prompt", 0]
    counters = Counters(server)
    assert_same_picture(latent_of(server.run(workflow)), expected)
    assert (counters.served, counters.fallbacks) == (2 * SD15.steps + 2, {})

    with _without_a_store(server, start_server, tmp_path) as other:
        counters = Counters(other)
        loaded = _everything({kind: ["load", number] for number, kind in enumerate(nodes)})
        loaded["load"] = _loaded("everything.graph", **wires)
        assert_same_picture(latent_of(other.run(loaded)), expected)
        assert (counters.captured, counters.compiled, counters.loaded) == (0, 0, 4)
        assert (counters.served, counters.fallbacks) == (2 * SD15.steps + 2, {})

        # What is not connected is left alone.
        only = _everything({**wires, "vae": ["load", 1]})
        only["load"] = _loaded("everything.graph", vae=wires["vae"])
        counters = Counters(other)
        assert_same_picture(latent_of(other.run(only)), expected)
        assert (counters.captured, counters.compiled, counters.served, counters.fallbacks) == (0, 0, 1, {})


def _everything(wires: dict[str, Wire]) -> Workflow:
    """A controlled image, decoded, and a prompt encoded beside it, by the objects that come down ``wires``."""
    workflow = SD15.workflow(1, size=64)
    for name in ("decode", "save"):
        del workflow[name]
    prompts = {"positive": ["positive", 0], "negative": ["negative", 0]}
    workflow |= {
        "vae": _tiny(),
        "clip": _node("TinyTextEncoder", family="sd15", seed=0),
        "net": _node("ControlNetLoader", control_net_name=checkpoint_file(NET)),
        "hint": _node("LoadImage", image="any.png"),
        "apply": _node(
            "ControlNetApplyAdvanced",
            **prompts,
            control_net=wires["control_net"],
            image=["hint", 0],
            strength=1.0,
            start_percent=0.0,
            end_percent=1.0,
        ),
        "image": _node("VAEDecode", samples=["sampler", 0], vae=wires["vae"]),
        "shown": _node("PreviewImage", images=["image", 0]),
        "prompt": _node("CLIPTextEncode", clip=wires["clip"], text="a lighthouse"),
        "embedded": _node("PreviewAny", source=["prompt", 0]),
    }
    workflow["sampler"]["inputs"] |= {"model": wires["model"], "positive": ["apply", 0], "negative": ["apply", 1]}
    return workflow
