"""ComfyUI's answers to what the core needs of a host."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Mapping, Sized
from typing import Any

import comfy.model_management
import torch
from comfy.cli_args import args
from comfy.ldm.modules import attention as attention_layers
from comfy.ldm.modules.diffusionmodules import model as vae_layers

from ...capture.call import NotCovered
from ...capture.fingerprint.code_ownership import HostCode
from ...compilation.compile_graph import HostServices
from ...messages import message
from ..preparation.latents import patch_side
from ..weights.layer_images import NOTES_ON_MODELS
from ..weights.quantised import RECORDABLE_OPERATORS, fused_operators, kernels, layer_factory, weight_formats
from .host_code import host_code
from .host_compiler import tracing, unplanned
from .host_settings import settings

log = logging.getLogger(__name__)

OPTIONS = "transformer_options"
"""The argument of a model, and of its blocks, in which the host says whatever else a call is for."""
OF_A_PART = " of a part"
"""At the end of the name of a function that is a part's, and not a whole model's. It is another text where what such a
function gives has another form: a graph that is kept for the old one must not be found."""
_ATTENTION = "optimized_attention_override"  # the option by which a node chooses a model's attention
_VAE_LEVELS = 4  # of those that do not say: eight pixels to a latent one


def _attention(_chosen: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Keep attention whole in the capture, whichever implementation the host was started with.

    The engine picks the kernel. The others cannot be captured: some read free memory while they
    run, some call libraries that tracing cannot see into. What a person has chosen for its own sake, as
    --use-sage-attention, a graph calls as the host does (``HostServices.opaque``).
    """
    output: torch.Tensor = attention_layers.attention_pytorch(*args, **kwargs)
    return output


def _refuse_patched_layers(layers: Iterable[torch.nn.Module]) -> None:
    """Refuse layers of ComfyUI that change their weight while they run, as a LoRA on an offloaded layer does.

    Raises:
        NotCovered: some layer carries weight functions, or its weights live in Dynamic VRAM.
    """
    for layer in layers:
        state = layer.__dict__
        if state.get("weight_function") or state.get("bias_function"):
            raise NotCovered(message("layers patch their weights while running (a LoRA on offloaded weights)"))
        if "_v" in state:
            raise NotCovered(
                message("weights live in ComfyUI's Dynamic VRAM, and this loader has no resident form of them")
            )


def _weight_functions(layers: Iterable[torch.nn.Module]) -> list[Sized]:
    """Return the lists in which the host puts what changes a layer's weight: it appends to them in place."""
    held = (layer.__dict__.get(name) for layer in layers for name in ("weight_function", "bias_function"))
    return [functions for functions in held if isinstance(functions, Sized)]


def _whole_vae_attention(layers: Iterable[torch.nn.Module]) -> None:
    """Do as ``_attention`` for VAEs, where each layer holds the implementation that the host was started with.

    One that somebody else has put there stays, and is captured or refused as it is.
    """
    for layer in layers:
        if layer.__dict__.get("optimized_attention") in _VAE_ATTENTION:
            layer.optimized_attention = vae_layers.pytorch_attention


_VAE_ATTENTION = (vae_layers.normal_attention, vae_layers.xformers_attention, vae_layers.pytorch_attention)


def _side_multiple(module: torch.nn.Module, function: str) -> int:
    """Return what a module's sides are best multiples of: a UNet halves its image at each level but the first, a
    transformer cuts it into square patches.

    A block is given no image, but tokens; a video VAE's decoder, for a piece, what each of its levels kept, each twice
    as large. A VAE's encoder halves it too, and the host crops images for it; its decoder takes latents of any size.
    """
    if function.endswith(OF_A_PART):
        widths = getattr(module, "dim_mult", None)  # of each level
        return 2 ** (len(widths) - 1) if isinstance(widths, (list, tuple)) and widths else 0
    if function.endswith(".encode"):
        levels = getattr(getattr(module, "encoder", None), "num_resolutions", _VAE_LEVELS)
        if getattr(module, "bn", None) is not None:  # Flux 2: latents are put together two by two
            levels += 1
        return int(2 ** (levels - 1))
    if function.endswith(".decode"):
        return 1
    levels = getattr(module, "channel_mult", None)
    if isinstance(levels, (list, tuple)) and levels:
        return 2 ** (len(levels) - 1)
    return patch_side(module)


def prompts_of(options: Mapping[str, Any]) -> Hashable:
    """Return which conditionings a call is for, in its batch's order, and which frames; None if it does not say."""
    if not options.get("uuids"):
        return None
    window = getattr(options.get("context_window"), "index_list", ())  # of a long video, computed piece by piece
    return tuple(options["uuids"]), tuple(options.get("cond_or_uncond") or ()), tuple(window)


# Where weights lie, and when they come and go: callbacks and caches that are others in every process. So is what
# einops, which some layers are from, has noted of the libraries and types that it was used with.
_MACHINERY = frozenset(
    f"comfy.{name}"
    for name in ("model_management", "memory_management", "pinned_memory", "model_patcher", "model_prefetch")
) | {"einops._backends"}


def _untraceable_attention() -> str:
    """Return the name of the attention that the host was started with, if no trace can look into it; else nothing."""
    return next((name for name in ("sage", "flash", "ck") if getattr(args, f"use_{name}_attention", False)), "")


def _refuse_attention_of_a_file(layers: Iterable[torch.nn.Module]) -> None:
    """Refuse layers whose attention the model's file chooses. What is put into a capture's options would replace it.

    Raises:
        NotCovered: there is such a layer.
    """
    kind = getattr(attention_layers, "ComfyAttention", ())  # of hosts since autumn 2026
    if any(isinstance(layer, kind) and layer.function is not None for layer in layers):
        raise NotCovered(
            message(
                "the model's file chooses the attention of its layers, and this ComfyUI was started with another than "
                "PyTorch's; start it with --use-pytorch-cross-attention"
            )
        )


def host_services() -> HostServices:
    """Return the services of the ComfyUI that this process runs."""
    chosen = _untraceable_attention()
    # A capture keeps PyTorch's whole anyway.
    as_it_is = not chosen and attention_layers.optimized_attention is attention_layers.attention_pytorch

    def refuse(layers: Iterable[torch.nn.Module]) -> None:
        _refuse_patched_layers(layers)
        if not as_it_is:
            _refuse_attention_of_a_file(layers)

    return HostServices(
        identity=f"{host_code()} {kernels()}{chosen and f' attention by {chosen}'}",
        options_name=OPTIONS,
        capture_options={} if as_it_is else {_ATTENTION: _attention},
        check_interrupted=comfy.model_management.throw_exception_if_processing_interrupted,
        refuse=refuse,
        watched=_weight_functions,
        side_multiple=_side_multiple,
        prepare=_whole_vae_attention,
        settings=settings,
        stream=prompts_of,
        interruption=comfy.model_management.InterruptProcessingException,
        code=HostCode(comfy.__name__, _MACHINERY, NOTES_ON_MODELS),
        recordable=RECORDABLE_OPERATORS,
        formats=weight_formats(),
        layer_factory=layer_factory(),
        fused=fused_operators,
        unplanned=unplanned,
        tracing=tracing,
        opaque=frozenset((_ATTENTION,)) if chosen else frozenset(),
    )
