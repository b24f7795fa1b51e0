"""Compile once, ever: a graph travels as a file. (That it outlives its process: ``test_any_size.py``.)"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from graph_files import command_line, doctored, error_of, put
from pictures import FAMILIES, Counters, assert_same_picture, latent_of

from dev.host import ComfyServer
from onediff_comfy.store.graph_file import pack, unpack
from onediff_comfy.store.trust import Trust
from tools.workflows import Workflow

FLUX = FAMILIES["flux"]


# -- Save and Load Compiled Graph --------------------------------------------------------------


def with_save(workflow: Workflow, filename: str = "a graph für 図", **inputs: Any) -> Workflow:
    """``workflow`` with a Save node on the accelerated model."""
    inputs = {"model": ["speedup", 0], "filename": filename, **inputs}
    return {**workflow, "keep": {"class_type": "OneDiffSaveCompiledGraph", "inputs": inputs}}


def with_load(workflow: Workflow, file: str, mismatch: str = "compile") -> Workflow:
    """``workflow`` with a Load node between loader and sampler."""
    inputs = {"model": ["loader", 0], "file": file, "mismatch": mismatch}
    loaded = {**workflow, "load": {"class_type": "OneDiffLoadCompiledGraph", "inputs": inputs}}
    loaded["sampler"]["inputs"]["model"] = ["load", 0]
    return loaded


@dataclasses.dataclass(frozen=True)
class Saved:
    """What the first installation saved."""

    path: Path
    shown: str
    expected: torch.Tensor


@pytest.fixture(scope="module")
def saved(server: ComfyServer) -> Saved:
    """A saved file of the shared server: Flux, compiled for all sizes."""
    expected = latent_of(server.run(FLUX.workflow(5)))
    result = server.run(with_save(FLUX.workflow(5, "inductor"), latent=["sampler", 0]))
    assert_same_picture(latent_of(result), expected)
    assert any(node == "keep" and "Flux, all sizes" in text for node, text in result.texts), "nothing shown on the node"
    folder = server.base_dir / "models" / "onediff_graphs"
    return Saved(folder / "a graph für 図.graph", result.outputs["keep"]["text"][0], expected)


def test_save_writes_one_file_and_says_what_is_inside(saved: Saved) -> None:
    (artifact,) = unpack(saved.path.read_bytes())
    assert "Flux, all sizes" in saved.shown
    assert "inductor" in saved.shown and f"torch {torch.__version__}" in saved.shown
    assert artifact.manifest.target == "Flux all sizes"
    weights = FAMILIES["flux"].checkpoint
    assert saved.path.stat().st_size < 3_000_000, f"megabytes, while {weights} alone has seven"


def test_save_before_anything_is_compiled_says_what_to_connect(server: ComfyServer) -> None:
    workflow = with_save(FLUX.workflow(1, "eager", size=192))
    nothing = {name: workflow[name] for name in ("loader", "speedup", "keep")}
    message = error_of(server.run(nothing))
    assert "connect a latent" in message and "positive conditioning" in message


def test_save_compiles_for_a_latent_and_conditioning(server: ComfyServer) -> None:
    # For a bucket, whose graph cannot be there yet, as the one for all sizes can.
    workflow = with_save(
        FLUX.workflow(1, "inductor", size=64, batch=3, buckets="64x64 b3"),
        "compiled here",
        latent=["latent", 0],
        positive=["positive", 0],
    )
    wanted = ("loader", "shape", "speedup", "latent", "positive", "keep")
    counters = Counters(server)
    result = server.run({name: workflow[name] for name in wanted})
    assert result.status == "success", result.error
    assert counters.compiled == 1
    assert "Flux, 64×64 b3 · inductor" in result.outputs["keep"]["text"][0]


@pytest.mark.parametrize("name", ["", "../outside", "/tmp/outside", "  "])
def test_save_refuses_a_name_outside_its_folder(server: ComfyServer, name: str) -> None:
    workflow = with_save(FLUX.workflow(5, "inductor"), name, latent=["sampler", 0])
    assert "cannot be the name of a file" in error_of(server.run(workflow))


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 300])
def test_save_refuses_a_name_that_no_file_has_before_it_compiles(server: ComfyServer, name: str) -> None:
    workflow = with_save(FLUX.workflow(5, "inductor"), name, latent=["latent", 0], positive=["positive", 0])
    wanted = ("loader", "shape", "speedup", "latent", "positive", "keep")
    counters = Counters(server)
    message = error_of(server.run({node: workflow[node] for node in wanted if node in workflow}))
    assert "characters" in message
    assert (counters.compiled, counters.captured) == (0, 0)


def test_save_refuses_a_model_that_is_not_accelerated(server: ComfyServer) -> None:
    workflow = with_save(FLUX.workflow(1, "inductor"))
    workflow["keep"]["inputs"]["model"] = ["loader", 0]
    assert "connect the output of OneDiff Model Speedup" in error_of(server.run(workflow))


def test_load_without_any_file_says_what_to_do(elsewhere: ComfyServer) -> None:
    options = elsewhere.get_json("/object_info/OneDiffLoadCompiledGraph")["OneDiffLoadCompiledGraph"]["input"]
    (none,) = options["required"]["file"][1]["options"]
    assert none == "none yet: use OneDiff Save Compiled Graph"
    message = error_of(elsewhere.run(with_load(FLUX.workflow(5), none)))
    assert "has no compiled graph yet: use OneDiff Save Compiled Graph first" in message


def test_load_on_another_machine(saved: Saved, elsewhere: ComfyServer) -> None:
    expected = latent_of(elsewhere.run(FLUX.workflow(5)))
    file = put(elsewhere, "from a friend.graph", saved.path.read_bytes())

    # A compiled graph is code: nobody's is run without a person's word.
    message = error_of(elsewhere.run(with_load(FLUX.workflow(5), file)))
    assert "was not compiled by this installation" in message
    assert "graphs import --trust" in message

    folder = elsewhere.base_dir / "models" / "onediff_graphs"
    refused = command_line(elsewhere, "graphs", "import", str(folder / file))
    assert refused.returncode == 1 and "--trust" in refused.stderr
    trusted = command_line(elsewhere, "graphs", "import", "--trust", str(folder / file))
    assert trusted.returncode == 0, trusted.stderr

    counters = Counters(elsewhere)
    assert_same_picture(latent_of(elsewhere.run(with_load(FLUX.workflow(5), file, "strict"))), expected)
    assert (counters.compiled, counters.captured, counters.loaded) == (0, 0, 1)
    assert counters.served == FLUX.steps


@pytest.mark.slow
def test_a_mismatch_is_explained_and_compiled_for_again_or_refused(saved: Saved, elsewhere: ComfyServer) -> None:
    (friends,) = unpack(saved.path.read_bytes())
    other = {"torch": "2.10.0", "architecture": "sm_35"}
    artifact = doctored(friends, lambda manifest: manifest["environment"].update(other))
    Trust(elsewhere.base_dir / "onediff-config").trust(artifact)
    file = put(elsewhere, "other machine.graph", pack([artifact]))
    message = error_of(elsewhere.run(with_load(FLUX.workflow(6), file, "strict")))
    assert "architecture: compiled for sm_35, here it is " in message
    # Patches of two do not fill these sides, so the friend's graph does not serve them.
    expected = latent_of(elsewhere.run(FLUX.workflow(6, size=104)))
    counters = Counters(elsewhere)
    assert_same_picture(latent_of(elsewhere.run(with_load(FLUX.workflow(6, size=104), file))), expected)
    assert counters.compiled >= 1
    assert "compiled again on first use" in elsewhere.log_text()


def test_a_graph_of_another_architecture_is_named(saved: Saved, server: ComfyServer) -> None:
    file = put(server, saved.path.name, saved.path.read_bytes())
    message = error_of(server.run(with_load(FAMILIES["sd15"].workflow(1), file, "strict")))
    assert "architecture: compiled for Flux" in message and "has no weight" in message


def test_load_refuses_what_is_no_model(saved: Saved, server: ComfyServer) -> None:
    file = put(server, saved.path.name, saved.path.read_bytes())
    workflow: Workflow = {
        "loader": FLUX.workflow(1)["loader"],
        "broken": {"class_type": "NotAModel", "inputs": {"model": ["loader", 0]}},
        "load": {
            "class_type": "OneDiffLoadCompiledGraph",
            "inputs": {"model": ["broken", 0], "file": file, "mismatch": "compile"},
        },
        "kind": {"class_type": "ModelKind", "inputs": {"model": ["load", 0]}},
    }
    assert "this _NotAModel cannot be accelerated as a MODEL" in error_of(server.run(workflow))


def test_load_names_an_engine_that_cannot_run_here(saved: Saved, server: ComfyServer) -> None:
    (artifact,) = unpack(saved.path.read_bytes())
    other = doctored(artifact, lambda manifest: manifest.update(engine="oneflow"))
    Trust(server.base_dir / "onediff-config").trust(other)
    file = put(server, "oneflow.graph", pack([other]))
    message = error_of(server.run(with_load(FLUX.workflow(1), file, "strict")))
    assert "engine: compiled with oneflow" in message


@pytest.mark.parametrize("content", [b"", b"rubbish" * 100])
def test_a_damaged_file_is_refused_in_one_sentence(server: ComfyServer, content: bytes) -> None:
    file = put(server, "damaged.graph", content)
    message = error_of(server.run(with_load(FLUX.workflow(1), file)))
    assert "damaged.graph was not loaded" in message


def test_the_command_line_lists_shows_verifies_exports_and_prunes(saved: Saved, server: ComfyServer) -> None:
    listed = json.loads(command_line(server, "graphs", "list", "--json").stdout)
    assert listed and all(row["problem"] is None and row["mb"] > 0 for row in listed)
    key = next(row["key"] for row in listed if row["target"].startswith("Flux"))
    assert key[:12] in command_line(server, "graphs", "list").stdout
    shown = command_line(server, "graphs", "show", key[:16]).stdout
    assert "torch" in shown and "sha256" in shown and "transformer_options" in shown
    assert command_line(server, "graphs", "verify").returncode == 0
    exported = saved.path.with_name("exported.graph")
    assert command_line(server, "graphs", "export", key, str(exported)).returncode == 0
    assert unpack(exported.read_bytes())[0].manifest.key == key
    assert command_line(server, "graphs", "show", str(exported)).returncode == 0
    missing = command_line(server, "graphs", "show", "0123")
    assert missing.returncode == 1 and "begins with 0123" in missing.stderr
