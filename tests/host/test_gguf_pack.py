"""GGUF checkpoints through the real pack ComfyUI-GGUF, installed as a custom node beside ours.

Its source is no package of any registry: ``COMFYUI_GGUF`` names a folder that has it, else it is cloned.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pictures import FAMILIES, Counters, assert_same_picture, assert_untouched, latent_of

from dev.environment import comfyui_path, repository
from dev.host import ComfyServer
from tools.models.gguf_files import RANKS, TYPES, gguf_file, lora_file
from tools.workflows import Workflow

pytestmark = pytest.mark.slow  # eight minutes, and a clone from the network where no folder is named

SOURCE = "https://github.com/city96/ComfyUI-GGUF"
FLUX = FAMILIES["flux"]


def _ran(*command: str, **environment: str) -> str | None:
    """None, or with what a command ended that did not do what it should."""
    try:
        done = subprocess.run(
            command,
            cwd=repository(),
            env={**os.environ, "GIT_TERMINAL_PROMPT": "0", **environment},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["nothing said"])[-1]


@pytest.fixture(scope="module")
def gguf_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package gguf in a folder of its own."""
    folder = tmp_path_factory.mktemp("packages")
    failed = _ran(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), "gguf")
    if failed:
        pytest.skip(f"the package gguf cannot be installed: {failed}")
    return folder


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if named := os.environ.get("COMFYUI_GGUF"):
        return Path(named)
    folder = tmp_path_factory.mktemp("pack") / "ComfyUI-GGUF"
    if failed := _ran("git", "clone", "--quiet", "--depth", "1", SOURCE, str(folder)):
        pytest.skip(f"ComfyUI-GGUF cannot be cloned ({failed}); COMFYUI_GGUF may name a folder that has it")
    return folder


@pytest.fixture(scope="module")
def own_server(
    pack: Path,
    gguf_package: Path,
    start_server: Callable[..., ComfyServer],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[ComfyServer]:
    base, files = tmp_path_factory.mktemp("gguf_host"), tmp_path_factory.mktemp("gguf_files")
    path = os.pathsep.join((str(gguf_package), os.environ.get("PYTHONPATH", "")))
    made = _ran(
        sys.executable, "-m", "tools.models.gguf_files", str(comfyui_path()), str(files), *TYPES, PYTHONPATH=path
    )
    assert made is None, made
    for folder, names in (("unet", map(gguf_file, TYPES)), ("loras", map(lora_file, RANKS))):
        (base / "models" / folder).mkdir(parents=True)
        for name in names:
            (files / name).rename(base / "models" / folder / name)
    (base / "custom_nodes").mkdir()
    (base / "custom_nodes" / "ComfyUI-GGUF").symlink_to(pack, target_is_directory=True)
    with start_server(base, PYTHONPATH=path) as running:
        yield running


def _image(kind: str, engine: str | None, lora: tuple[int, float] | None = None, **more: Any) -> Workflow:
    """An image of a GGUF checkpoint, without being decoded.

    Args:
        kind: type of its blocks.
        engine: of the Model Speedup node; None leaves it out.
        lora: rank and strength.
    """
    workflow = FLUX.workflow(1, engine, **{"size": 64, **more})
    for name in ("decode", "save"):
        del workflow[name]
    workflow["loader"] = {"class_type": "UnetLoaderGGUF", "inputs": {"unet_name": gguf_file(kind)}}
    if lora is not None:
        inputs = {"model": ["loader", 0], "lora_name": lora_file(lora[0]), "strength_model": lora[1]}
        workflow["lora"] = {"class_type": "LoraLoaderModelOnly", "inputs": inputs}
        user = "sampler" if engine is None else "speedup"
        workflow[user]["inputs"]["model"] = ["lora", 0]
    return workflow


def _same_as_eager(server: ComfyServer, kind: str, engine: str = "eager", **more: Any) -> Counters:
    expected = latent_of(server.run(_image(kind, None, **more)))
    counters = Counters(server)
    actual = latent_of(server.run(_image(kind, engine, **more)))
    (assert_untouched if engine == "eager" else assert_same_picture)(actual, expected)
    assert (counters.served, counters.fallbacks) == (FLUX.steps, {})
    return counters


@pytest.mark.parametrize("kind", TYPES)
def test_one_graph_for_a_type_of_blocks(own_server: ComfyServer, kind: str) -> None:
    assert _same_as_eager(own_server, kind).captured == 1
    assert _same_as_eager(own_server, kind, size=(96, 64)).captured == 0


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_a_lora_is_one_graph_for_each_rank_and_none_for_a_strength(own_server: ComfyServer, kind: str) -> None:
    plain = latent_of(own_server.run(_image(kind, None)))
    for rank in RANKS:
        for strength, captured in ((1.0, 1), (0.4, 0), (-0.7, 0)):
            patched = latent_of(own_server.run(_image(kind, None, (rank, strength))))
            assert not torch.allclose(patched, plain, rtol=1e-2)
            assert _same_as_eager(own_server, kind, lora=(rank, strength)).captured == captured
    _same_as_eager(own_server, kind)


def test_inductor_compiles_blocks_of_bytes(own_server: ComfyServer) -> None:
    counters = _same_as_eager(own_server, "Q4_K", "inductor")
    assert counters.compiled == 1
    assert _same_as_eager(own_server, "Q4_K", "inductor", size=(96, 64)).compiled == 0
