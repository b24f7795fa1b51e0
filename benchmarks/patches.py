"""Functions that other nodes put into a UNet, for ``benchmarks.patched``: FreeU_V2, and an image prompt."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

_TOKENS = 16  # of an image, as the "plus" adapters have them
PACK = "COMFYUI_IPADAPTER_PLUS"
"""The variable that names a folder with ComfyUI_IPAdapter_plus."""


def freeu(model: Any) -> Any:
    """The MODEL behind ComfyUI's node FreeU_V2, with the node's own defaults."""
    from comfy_extras.nodes_freelunch import FreeU_V2

    return FreeU_V2.execute(model, b1=1.3, b2=1.4, s1=0.9, s2=0.2).args[0]


def image_prompt(model: Any) -> Any:
    """The MODEL with an image beside its prompt, in every cross-attention."""
    patched = model.clone()
    family, places = model.model, list(_cross_attentions(model.model.diffusion_model))
    device = model.load_device  # where it computes; its weights may be elsewhere now
    width = places[0][1].to_k.in_features
    generator = torch.Generator(device).manual_seed(7)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(family.get_dtype())

    adapter = Adapter({key: attention.to_k.weight for key, attention in places}, random)
    sigma = model.get_model_object("model_sampling").percent_to_sigma
    values = {"weight": 0.7, "sigma_start": sigma(0.0), "sigma_end": sigma(1.0)}
    tensors = {"cond": random(1, _TOKENS, width), "uncond": random(1, _TOKENS, width)}
    replacing, callback = _functions()
    for key, _ in places:
        block, number, index = key.split("_")
        patch = replacing(callback, module_key=key, ipadapter=adapter, **values, **tensors)
        patched.set_model_attn2_replace(patch, block, int(number), int(index))
    return patched


def sage_attention(model: Any) -> Any:
    """The MODEL that attends by SageAttention, as other packs' nodes have it."""
    from sageattention import sageattn

    def override(_chosen: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, **options: Any) -> Any:
        if options.get("skip_reshape"):
            return sageattn(q, k, v, tensor_layout="HND").transpose(1, 2).flatten(2)
        parts = (t.unflatten(-1, (heads, -1)) for t in (q, k, v))
        return sageattn(*parts, tensor_layout="NHD").flatten(2)

    patched = model.clone()
    patched.model_options["transformer_options"]["optimized_attention_override"] = override
    return patched


PATCHES: dict[str, Callable[[Any], Any]] = {"FreeU_V2": freeu, "image prompt": image_prompt}
if importlib.util.find_spec("sageattention") is not None:
    PATCHES["SageAttention"] = sage_attention


class Adapter(torch.nn.Module):
    """Layers that make an image's keys and values, with the attributes that ComfyUI_IPAdapter_plus asks for.

    Args:
        weights: of the layers that make those of the prompt, by the names of the attentions.
        random: makes values of a shape.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], random: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.ip_layers = torch.nn.Module()
        self.ip_layers.to_kvs = torch.nn.ModuleDict()
        for key, weight in weights.items():
            rows, columns = weight.shape
            for part in ("k", "v"):
                layer = torch.nn.Linear(columns, rows, bias=False, device="meta")
                layer.weight = torch.nn.Parameter(random(rows, columns) * columns**-0.5, requires_grad=False)
                self.ip_layers.to_kvs[f"{key}_to_{part}_ip"] = layer

    def get_multigpu_clone(self, _device: torch.device) -> Adapter:
        return self


def _cross_attentions(unet: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """The cross-attentions of a UNet by block, its number, and theirs in it: ``input_4_1``."""
    for path, layer in unet.named_modules():
        found = re.fullmatch(r"(input|middle|output)_blocks?\.(\d+)\.(?:1\.)?transformer_blocks\.(\d+)\.attn2", path)
        if found:
            block, number, index = found.groups()
            yield f"{block}_{0 if block == 'middle' else number}_{index}", layer


def _functions() -> tuple[Any, Any]:
    """What is called in place of an attention, and what that calls."""
    folder = os.environ.get(PACK)
    if folder is None:
        return ImagePrompt, image_attention
    # Its own __init__ would load what needs an environment of its own.
    spec = importlib.util.spec_from_file_location(
        "ipadapter_plus", Path(folder) / "CrossAttentionPatch.py", submodule_search_locations=[folder]
    )
    assert spec is not None and spec.loader is not None
    pack = sys.modules["ipadapter_plus"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pack)
    return pack.Attn2Replace, pack.ipadapter_attention


class ImagePrompt:
    """A stand-in for the pack's object in place of a cross-attention."""

    def __init__(self, callback: Callable[..., torch.Tensor], **values: Any) -> None:
        self.callback, self.values = callback, values

    def __call__(self, q: Any, k: Any, v: Any, extra_options: Any) -> torch.Tensor:
        from comfy.ldm.modules.attention import optimized_attention

        out: torch.Tensor = optimized_attention(q, k, v, extra_options["n_heads"])
        sigma = extra_options["sigmas"].detach().cpu()[0].item()
        if self.values["sigma_end"] <= sigma <= self.values["sigma_start"]:
            out = out + self.callback(q, extra_options, **self.values)
        return out


def image_attention(q: Any, extra_options: Any, *, module_key: str, ipadapter: Any, **values: Any) -> torch.Tensor:
    """A stand-in for the pack's attention to an image."""
    from comfy.ldm.modules.attention import optimized_attention

    which = extra_options["cond_or_uncond"]
    conds = [(values["cond"], values["uncond"])[i].repeat(q.shape[0] // len(which), 1, 1) for i in which]
    k, v = (ipadapter.ip_layers.to_kvs[f"{module_key}_to_{part}_ip"](torch.cat(conds)) for part in ("k", "v"))
    attention: torch.Tensor = optimized_attention(q, k, v, extra_options["n_heads"])
    return attention * values["weight"]
