"""Small text encoders of the host's own classes, with seeded random weights, and their output as something to save."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import comfy.sd
import folder_paths
import torch
from comfy_api.latest import io


def _sd15() -> tuple[Any, Any, dict[str, Any]]:
    from comfy.sd1_clip import SD1ClipModel, SD1Tokenizer

    return SD1ClipModel, SD1Tokenizer, {"clip_l": _CLIP_L}


def _sdxl() -> tuple[Any, Any, dict[str, Any]]:
    from comfy.sdxl_clip import SDXLClipModel, SDXLTokenizer

    big = {"num_hidden_layers": 3, "hidden_size": 1280, "intermediate_size": 256, "num_attention_heads": 4}
    return SDXLClipModel, SDXLTokenizer, {"clip_l": _CLIP_L, "clip_g": big}


def _flux() -> tuple[Any, Any, dict[str, Any]]:
    from comfy.text_encoders.flux import FluxTokenizer, flux_clip

    t5 = {"num_layers": 3, "d_model": 64, "d_ff": 96, "d_kv": 16, "num_heads": 4}
    return flux_clip(dtype_t5=torch.float16), FluxTokenizer, {"clip_l": _CLIP_L, "t5xxl": t5}


def _z_image() -> tuple[Any, Any, dict[str, Any]]:
    """A language model (Qwen 3)."""
    from comfy.text_encoders.z_image import ZImageTokenizer, te

    qwen = {"num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    return te(), ZImageTokenizer, {"qwen3_4b": {**qwen, "num_key_value_heads": 2}}


_CLIP_L = {"num_hidden_layers": 3, "intermediate_size": 256}
_FAMILIES: dict[str, Callable[[], tuple[Any, Any, dict[str, Any]]]] = {
    "sd15": _sd15,
    "sdxl": _sdxl,
    "flux": _flux,
    "z_image": _z_image,
}


class TinyTextEncoder(io.ComfyNode):
    """A CLIP of a family's classes with few and narrow layers."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TinyTextEncoder",
            category="testing",
            inputs=[io.Combo.Input("family", options=list(_FAMILIES)), io.Int.Input("seed", default=0)],
            outputs=[io.Clip.Output()],
        )

    @classmethod
    def execute(cls, family: str, seed: int) -> io.NodeOutput:
        encoders, tokenizer, configs = _FAMILIES[family]()
        target = SimpleNamespace(params={}, clip=encoders, tokenizer=tokenizer)
        clip = comfy.sd.CLIP(
            target,
            embedding_directory=folder_paths.get_folder_paths("embeddings"),
            model_options={f"{name}_model_config": config for name, config in configs.items()},
        )
        generator = torch.Generator().manual_seed(seed)
        for name, weight in clip.cond_stage_model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim == 2:
                noise *= 0.02 if "embed" in name or "shared" in name else weight.shape[1] ** -0.5
            else:
                noise = noise * 0.05 + name.endswith("weight")
            weight.data.copy_(noise)
        return io.NodeOutput(clip)


class ConditioningAsLatent(io.ComfyNode):
    """All tensors of a conditioning as one, for SaveLatent."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ConditioningAsLatent",
            category="testing",
            inputs=[io.Conditioning.Input("conditioning")],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, conditioning: Any) -> io.NodeOutput:
        tensors = [
            value.float().flatten()
            for embedding, extras in conditioning
            for value in (embedding, *(extras[name] for name in sorted(extras)))
            if isinstance(value, torch.Tensor)
        ]
        return io.NodeOutput({"samples": torch.cat(tensors)})


class NotAClip(io.ComfyNode):
    """What a careless extension may send down a CLIP wire."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(node_id="NotAClip", category="testing", inputs=[], outputs=[io.Clip.Output()])

    @classmethod
    def execute(cls) -> io.NodeOutput:
        return io.NodeOutput(SimpleNamespace(cond_stage_model=None))


class ClipKind(io.ComfyNode):
    """Says what came down a CLIP wire."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(node_id="ClipKind", category="testing", inputs=[io.Clip.Input("clip")], is_output_node=True)

    @classmethod
    def execute(cls, clip: Any) -> io.NodeOutput:
        return io.NodeOutput(ui={"kind": [type(clip).__name__]})


NODES = [TinyTextEncoder, ConditioningAsLatent, NotAClip, ClipKind]
