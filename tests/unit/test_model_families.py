"""model_families.py: what a graph is for, as a person who uses models says it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from dev.environment import comfyui_path
from onediff_comfy.model_families import FAMILIES, describe

BATCH, HEIGHT, WIDTH, TOKENS = (([1, name]) for name in ("s0", "s2", "s3", "s1"))


def axes(context: int, channels: int = 4) -> list[list[Any]]:
    """Sizes of a general graph's inputs: text conditioning, time, latent."""
    return [[BATCH, TOKENS, context], [BATCH], [BATCH, channels, HEIGHT, WIDTH]]


@pytest.mark.parametrize(
    ("target", "inputs", "said"),
    [
        ("UNetModel all sizes", axes(768), "SD 1.5 all sizes"),
        ("UNetModel all sizes", axes(1024), "SD 2 all sizes"),
        ("UNetModel all sizes", axes(1024, 8), "SVD all sizes"),
        ("UNetModel all sizes, fp8, step cache", axes(2048), "SDXL all sizes, fp8, step cache"),
        ("UNetModel all sizes", axes(64), "Stable Diffusion all sizes"),
        ("UNetModel all sizes", [], "Stable Diffusion all sizes"),
        ("UNetModel float16[2x4x96x128]@cuda:0", axes(2048), "SDXL 1024×768 b2"),
        ("Flux all sizes", axes(4096, 16), "Flux all sizes"),
        ("Flux all sizes", axes(15360, 128), "Flux 2 all sizes"),
        ("NextDiT all sizes", axes(2560, 16), "Z-Image all sizes"),
        ("AutoencoderKL decode float16[1x4x64x64]@cuda:0", [], "VAE decode 512×512 b1"),
        ("AutoencoderKL encode float16[1x3x512x640]@cuda:0", [], "VAE encode 640×512 b1"),
        ("WanModel float16[1x16x21x60x104]@cuda:0", [], "Wan one size (1x16x21x60x104)"),
        ("SomebodysModel all sizes", [], "SomebodysModel all sizes"),
        ("Net float32[2x4]@cpu", [], "Net one size (2x4)"),
    ],
)
def test_a_graph_is_called_by_its_family_and_size(target: str, inputs: list[list[Any]], said: str) -> None:
    assert str(describe(target, inputs)) == said


def test_every_class_of_the_table_is_one_of_the_hosts() -> None:
    if not (comfyui_path() / "comfy").is_dir():
        pytest.skip("no ComfyUI here; make setup fetches one")
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (comfyui_path() / "comfy").rglob("*.py"))
    assert FAMILIES.keys() - set(re.findall(r"^class (\w+)", sources, re.MULTILINE)) == set()
