"""An image encoder for packs that prompt by images, and the patches of packs whose own nodes need models of faces.

Their attention is theirs, imported from the folder that a variable of the environment names; what their nodes take
from a face is random here.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import comfy.clip_vision
import torch
from comfy_api.latest import io

_CLIP = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 224,
    "patch_size": 56,
    "projection_dim": 32,
    "hidden_act": "quick_gelu",
    "num_channels": 3,
    "layer_norm_eps": 1e-5,
    "model_type": "clip_vision_model",
}
_NOT_NEEDED = ("insightface", "insightface.app", "facexlib", "facexlib.parsing", "facexlib.utils", "cv2", "onnxruntime")
_NOT_NEEDED += ("facexlib.utils.face_restoration_helper",)


class TinyClipVision(io.ComfyNode):
    """An image encoder of random weights."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(node_id="TinyClipVision", category="testing", inputs=[], outputs=[io.ClipVision.Output()])

    @classmethod
    def execute(cls) -> io.NodeOutput:
        encoder = comfy.clip_vision.ClipVisionModel(_CLIP)
        generator = torch.Generator().manual_seed(3)
        weights = {
            name: torch.randn(shape.shape, generator=generator) * 0.3 if shape.is_floating_point() else shape
            for name, shape in encoder.get_sd().items()
        }
        encoder.load_sd(weights)
        return io.NodeOutput(encoder)


class FacePrompt(io.ComfyNode):
    """What ApplyInstantID's and ApplyPulid's nodes put into a MODEL, for a face that is random."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FacePrompt",
            category="testing",
            inputs=[
                io.Model.Input("model"),
                io.Combo.Input("pack", options=["instantid", "pulid"]),
                io.Int.Input("face"),
                io.Float.Input("weight", min=-5.0),
                io.Float.Input("start_at"),
                io.Float.Input("end_at"),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model: Any, pack: str, face: int, weight: float, start_at: float, end_at: float) -> io.NodeOutput:
        generator = torch.Generator().manual_seed(face)
        places = list(_cross_attentions(model.model.diffusion_model))
        width = places[0][1].to_k.in_features
        cond, uncond = (torch.randn(1, 4, width, generator=generator) for _ in range(2))
        sigma = model.get_model_object("model_sampling").percent_to_sigma
        values = {"weight": weight, "cond": cond, "uncond": uncond, "mask": None}
        values |= {"sigma_start": sigma(start_at), "sigma_end": sigma(end_at)}
        replacing, attention, holder = _functions(pack)
        values |= {holder: _Adapter(dict(places))}
        if pack == "pulid":
            values |= {"ortho": False, "ortho_v2": True}
        patched = model.clone()
        for key, _ in places:
            patch = replacing(attention, **values, module_key=key)
            patched.set_model_attn2_replace(patch, *_place(key))
        return io.NodeOutput(patched)


class _Adapter(torch.nn.Module):
    """Layers that make a face's keys and values, as To_KV of both packs holds them."""

    def __init__(self, places: dict[str, Any]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.ip_layers = torch.nn.Module()
        self.ip_layers.to_kvs = torch.nn.ModuleDict()
        for key, attention in places.items():
            for part in ("k", "v"):
                rows, columns = attention.to_k.weight.shape
                layer = torch.nn.Linear(columns, rows, bias=False).requires_grad_(False)
                layer.weight.data = torch.randn(rows, columns, generator=generator) * columns**-0.5
                self.ip_layers.to_kvs[f"{key}_to_{part}_ip"] = layer


def _cross_attentions(unet: torch.nn.Module) -> Any:
    for path, layer in unet.named_modules():
        found = re.fullmatch(r"(input|middle|output)_blocks?\.(\d+)\.(?:1\.)?transformer_blocks\.(\d+)\.attn2", path)
        if found:
            block, number, index = found.groups()
            yield f"{block}_{0 if block == 'middle' else number}_{index}", layer


def _place(key: str) -> tuple[str, int, int]:
    block, number, index = key.split("_")
    return block, int(number), int(index)


def _functions(pack: str) -> tuple[Any, Any, str]:
    """What stands in place of an attention, the attention that it adds, and what that calls its adapter."""
    if pack == "instantid":
        module = _imported("COMFYUI_INSTANTID", "CrossAttentionPatch")
        return module.Attn2Replace, module.instantid_attention, "ipadapter"
    module = _imported("PULID_COMFYUI", "pulid")
    return module.Attn2Replace, module.pulid_attention, "pulid"


def _imported(variable: str, name: str) -> types.ModuleType:
    """A module of a pack. What it imports of models of faces is not there, and is not called."""
    package, folder = variable.lower(), Path(os.environ[variable])
    if f"{package}.{name}" in sys.modules:
        return sys.modules[f"{package}.{name}"]
    parent = sys.modules[package] = types.ModuleType(package)
    parent.__path__ = [str(folder)]
    spec = importlib.util.spec_from_file_location(f"{package}.{name}", folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[f"{package}.{name}"] = importlib.util.module_from_spec(spec)
    absent = {missing: mock.MagicMock() for missing in (*_NOT_NEEDED, f"{package}.encoders", f"{package}.eva_clip")}
    absent[f"{package}.eva_clip.constants"] = mock.MagicMock()
    absent = {missing: stands_in for missing, stands_in in absent.items() if missing not in sys.modules}
    sys.modules.update(absent)
    try:
        spec.loader.exec_module(module)
    finally:
        for missing in absent:
            del sys.modules[missing]
    return module


NODES = [TinyClipVision, FacePrompt]
