"""What compiled graphs are for, in the words of people who use models: SDXL, not UNetModel.

A graph knows the class of its module and the sizes of its inputs, no file and no checkpoint. Several families share a
class and differ in the width of their text conditioning or in the channels of their latents.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .messages import message

_UNETS = {768: "SD 1.5", 1024: "SD 2", 1280: "SDXL Refiner", 2048: "SDXL"}
"""Families of the class UNetModel by the width of their text conditioning."""

_VIDEO_UNETS = {1024: "SVD"}
"""The same, of those whose latents have eight channels: the first image is half of them."""

_NEXT = {2304: "Lumina 2", 2560: "Z-Image"}
"""Families of the class NextDiT, by the same."""

FAMILIES: Mapping[str, str] = {
    "AsymmDiTJoint": "Mochi",
    "ACEStepTransformer2DModel": "ACE-Step",
    "Chroma": "Chroma",
    "ErnieImageModel": "ERNIE-Image",
    "Flux": "Flux",
    "GeneralDIT": "Cosmos",
    "HiDreamImageTransformer2DModel": "HiDream",
    "HunYuanDiT": "HunyuanDiT",
    "HunyuanVideo": "Hunyuan Video",
    "Kandinsky5": "Kandinsky 5",
    "LTXAVModel": "LTX-Video",
    "LTXVModel": "LTX-Video",
    "MiniTrainDIT": "Cosmos Predict 2",
    "MMDiT": "AuraFlow",
    "NextDiT": message("Lumina 2 or Z-Image"),
    "OpenAISignatureMMDITWrapper": "SD 3",
    "PixArtMS": "PixArt",
    "QwenImageTransformer2DModel": "Qwen-Image",
    "StageB": "Stable Cascade B",
    "StageC": "Stable Cascade C",
    "UNetModel": "Stable Diffusion",
    "WanModel": "Wan",
    "CameraWanModel": "Wan Camera",
    "VaceWanModel": "Wan VACE",
    "AutoencoderKL": "VAE",
    "AutoencodingEngine": "VAE",
    "AutoencodingEngineLegacy": "VAE",
    "ControlNet": "ControlNet",
    "ControlNetFlux": "Flux ControlNet",
    "ControlNetSD35": "SD 3.5 ControlNet",
    "CLIPEncoder": message("CLIP text encoder"),
    "T5Stack": message("T5 text encoder"),
    "Llama2_": message("LLM text encoder"),
}
"""Families by the class of the module; further classes are called by their own names. Words are messages."""

_FLUX_2_CHANNELS = 128
_SVD_CHANNELS = 8
_METHODS = ("decode", "encode")

ALL_SIZES = "all sizes"
"""What is said of a graph that serves any size inside its range."""

_SIZES = re.compile(r"\[(\d+(?:x\d+)*)\]")

_PIXELS = 8
"""A latent pixel's side in pixels; with the families that have another, sizes are told as they are."""
_OTHER_PIXELS = ("Flux 2", "Stable Cascade", "Wan", "LTX-Video", "Hunyuan Video")


@dataclass(frozen=True)
class GraphWords:
    """What a graph is for, for people.

    Attributes:
        family: ``SDXL``, ``VAE decode``; the class, where no more is known. A message, where it is more than a name.
        sizes: ``all sizes``, ``1024×1024 b2``.
        variant: what was given up for speed: ``fp8, step cache``, or nothing.
    """

    family: str
    sizes: str
    variant: str = ""

    def __str__(self) -> str:
        return ", ".join(filter(None, (f"{self.family} {self.sizes}", self.variant)))


def describe(target: str, axes: Sequence[Sequence[Any]] = ()) -> GraphWords:
    """Return what a graph is for.

    Args:
        target: what was compiled, as ``store.artifact.Manifest`` has it: ``UNetModel all sizes``, ``AutoencoderKL
            decode float16[1x4x128x128]@cuda:0, fp8``.
        axes: sizes of the inputs, as the manifest's ``shapes`` have them: integers are fixed.
    """
    what, _, variant = target.partition(", ")
    name, *others = what.split(" ")
    method = next((word for word in others if word in _METHODS), "")
    family = _of_method(_family(name, axes), method)
    return GraphWords(family, _sizes(" ".join(word for word in others if word != method), family), variant)


def _family(name: str, axes: Sequence[Sequence[Any]]) -> str:
    width = next((sizes[-1] for sizes in axes if len(sizes) == 3 and isinstance(sizes[-1], int)), 0)
    channels = next((sizes[1] for sizes in axes if len(sizes) in (4, 5)), 0)
    if name == "UNetModel":
        return (_VIDEO_UNETS if channels == _SVD_CHANNELS else _UNETS).get(width, FAMILIES[name])
    if name == "NextDiT":
        return _NEXT.get(width, FAMILIES[name])
    if name == "Flux" and channels == _FLUX_2_CHANNELS:
        return "Flux 2"
    return FAMILIES.get(name, name)


def _of_method(family: str, method: str) -> str:
    if method == "decode":
        return message("{family} decode", family=family)
    return message("{family} encode", family=family) if method == "encode" else family


def _sizes(what: str, family: str) -> str:
    found = _SIZES.search(what)
    if found is None:
        return what or ALL_SIZES
    batch, *others = map(int, found[1].split("x"))
    if len(others) != 3 or family.startswith(_OTHER_PIXELS):
        return f"one size ({found[1]})"
    pixels = 1 if family.endswith(" encode") else _PIXELS
    height, width = (side * pixels for side in others[1:])
    return f"{width}×{height} b{batch}"
