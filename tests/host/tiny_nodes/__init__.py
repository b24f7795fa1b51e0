"""Custom nodes for the host tests, installed into the test server beside the pack."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy.model_base
import comfy.model_management
import comfy.model_patcher
import torch
from comfy.patcher_extension import WrappersMP
from comfy_api.latest import ComfyExtension, io

from . import image_prompts, text_encoders, vaes


class TinyConditioning(io.ComfyNode):
    """Seeded random conditioning: stands in for text encoders of any size."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TinyConditioning",
            display_name="Tiny Conditioning",
            category="testing",
            inputs=[
                io.Int.Input("seed", default=0),
                io.Int.Input("tokens", default=77, min=1, max=4096),
                io.Int.Input("dim", default=768, min=1, max=8192),
                io.Int.Input("pooled_dim", default=0, min=0, max=8192, tooltip="0: no pooled output"),
            ],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(cls, seed: int, tokens: int, dim: int, pooled_dim: int) -> io.NodeOutput:
        generator = torch.Generator().manual_seed(seed)
        extra = {"pooled_output": torch.randn(1, pooled_dim, generator=generator)} if pooled_dim else {}
        return io.NodeOutput([[torch.randn(1, tokens, dim, generator=generator), extra]])


def _model_node(name: str, change: Callable[[Any], Any], inputs: list[Any] | None = None) -> type[io.ComfyNode]:
    """A node that takes a MODEL, and whatever ``inputs`` says, and gives what ``change`` makes of it."""

    class ModelNode(io.ComfyNode):
        @classmethod
        def define_schema(cls) -> io.Schema:
            return io.Schema(
                node_id=name,
                category="testing",
                inputs=[io.Model.Input("model"), *(inputs or [])],
                outputs=[io.Model.Output()],
            )

        @classmethod
        def execute(cls, model: Any, **values: Any) -> io.NodeOutput:
            return io.NodeOutput(change(model, **values))

    ModelNode.__name__ = name
    return ModelNode


def _scaled(model: Any, factor: float) -> Any:
    """Another extension's wrapper around the diffusion model, as EasyCache and others add them."""

    def wrapper(executor: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return executor(*args, **kwargs) * factor + 0.01

    clone = model.clone()
    clone.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, f"scale{factor}", wrapper)
    return clone


def _with_attention_patch(model: Any) -> Any:
    """A patch that changes the picture, written as a closure."""
    clone = model.clone()
    clone.set_model_attn1_patch(lambda q, k, v, extra_options: (q * 0.5, k, v))
    return clone


def _with_counting_patch(model: Any) -> Any:
    """A patch that keeps something between calls: no graph can do that."""
    calls: list[int] = []

    def patch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extra_options: Any) -> Any:
        calls.append(1)
        return q * 0.5, k, v

    clone = model.clone()
    clone.set_model_attn1_patch(patch)
    return clone


def _with_attention_override(model: Any) -> Any:
    """The host's own hook for another attention, which our captures use too."""

    def override(chosen: Any, q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return chosen(q * 0.5, *args, **kwargs)

    clone = model.clone()
    clone.model_options["transformer_options"]["optimized_attention_override"] = override
    return clone


def _compiled_by_torch(model: Any) -> Any:
    """What the host's TorchCompileModel does, without its slow backend."""
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    clone = model.clone()
    set_torch_compile_wrapper(clone, backend="eager")
    return clone


class _Plain(torch.nn.Module):
    """A diffusion model of a family that does not hand its calls to wrappers."""

    dtype = torch.float32

    def __init__(self, device: Any = None, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(0.5, device=device), requires_grad=False)
        # The host looks at these of any UNet that it runs on a GPU.
        self.input_blocks = self.middle_block = self.output_blocks = torch.nn.ModuleList()

    def forward(self, x: torch.Tensor, timesteps: torch.Tensor, **_: Any) -> torch.Tensor:
        return x * self.weight


def _plain(like: Any, disable_dynamic: bool = False) -> Any:
    """A MODEL of that family, made as a loader of another extension makes one.

    It is a model of its own, for a diffusion model cannot be exchanged by an object patch in Dynamic VRAM: there the
    host puts weights back by their names when the patch is already in place, or no longer.

    Args:
        like: a patcher whose latents, sampling and devices it has.
        disable_dynamic: what the host asks for when it wants the weights to stay in place.
    """
    patcher = comfy.model_patcher.ModelPatcher if disable_dynamic else comfy.model_patcher.CoreModelPatcher
    config, kind = like.model.model_config, like.model.model_type
    model = comfy.model_base.BaseModel(config, kind, like.offload_device, unet_model=_Plain)
    made = patcher(model, load_device=like.load_device, offload_device=like.offload_device)
    made.cached_patcher_init = (_plain, (like,))
    return made


def _held(model: Any, file: str) -> Any:
    """The same, once a file is there, or the person stops it."""
    while not Path(file).exists():
        comfy.model_management.throw_exception_if_processing_interrupted()
        time.sleep(0.02)
    return model


class _NotAModel:
    """What a careless extension may send down a MODEL wire."""

    model = None


class CollectGarbage(io.ComfyNode):
    """What nobody holds any more is gone after it; the host takes its time."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(node_id="CollectGarbage", category="testing", is_output_node=True)

    @classmethod
    def execute(cls) -> io.NodeOutput:
        gc.collect()
        return io.NodeOutput()


class ModelKind(io.ComfyNode):
    """Says what came down a MODEL wire, without running it."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(node_id="ModelKind", category="testing", inputs=[io.Model.Input("model")], is_output_node=True)

    @classmethod
    def execute(cls, model: Any) -> io.NodeOutput:
        return io.NodeOutput(ui={"kind": [type(model).__name__]})


NODES = [
    TinyConditioning,
    ModelKind,
    CollectGarbage,
    _model_node("ScaleWrapper", _scaled, [io.Float.Input("factor", default=0.9)]),
    _model_node("AttentionPatch", _with_attention_patch),
    _model_node("CountingPatch", _with_counting_patch),
    _model_node("AttentionOverride", _with_attention_override),
    _model_node("PlainModule", _plain),
    _model_node("NotAModel", lambda model: _NotAModel()),
    _model_node("NothingForAModel", lambda model: None),
    _model_node("HeldModel", _held, [io.String.Input("file")]),
    _model_node("CompiledByTorch", _compiled_by_torch),
    *image_prompts.NODES,
    *text_encoders.NODES,
    *vaes.NODES,
]


# What is imported by now stays: without it a search for garbage, of which a capture causes many, takes a seventh less.
gc.freeze()


class TestingExtension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return NODES


async def comfy_entrypoint() -> TestingExtension:
    return TestingExtension()
