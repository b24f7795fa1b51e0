"""The kinds of the host's objects that can be accelerated, and what is asked of any of them alike.

Each kind imports what it needs of the host only when it is used: the host may have changed for another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...messages import Message, message
from ...serving.dispatcher import Dispatcher
from ..compatibility import KINDS, host_changed


def node_of(kind: str) -> Message:
    """The display name of the node that accelerates objects of a kind.

    Args:
        kind: a key of ``drift.KINDS``; so it is in all functions here.
    """
    if kind == "model":
        return message("OneDiff Model Speedup")
    if kind == "vae":
        return message("OneDiff VAE Speedup")
    if kind == "clip":
        return message("OneDiff CLIP Speedup")
    return message("OneDiff ControlNet Speedup")


def accelerated_by(kind: str, thing: Any, engine: str, node_id: str | None) -> Any:
    """An accelerated copy of ``thing``; or ``thing`` itself, after a warning, where nothing of it can be captured.

    Args:
        kind: of ``thing``.
        thing: the host's object.
        engine: one of ``settings.ENGINE_NAMES``.
        node_id: the node that shows what is going on.
    """
    if kind == "model":
        from .model import accelerate

        return accelerate(thing, engine, node_id)
    if kind == "vae":
        from .vae import accelerate_vae

        return accelerate_vae(thing, engine, node_id)
    if kind == "clip":
        from .text_encoder import accelerate_clip

        return accelerate_clip(thing, engine, node_id)
    from .controlnet import accelerate_control

    return accelerate_control(thing, engine, node_id)


def dispatcher_of(kind: str, thing: Any) -> Dispatcher | None:
    """What serves the calls of ``thing``; None if it is not accelerated."""
    if host_changed(KINDS[kind]) is not None:
        return None
    if kind == "model":
        from .model import find_dispatcher

        return find_dispatcher(thing)
    if kind == "vae":
        from .vae import find_vae_dispatcher

        return find_vae_dispatcher(thing)
    if kind == "clip":
        from .text_encoder import find_clip_dispatcher

        return find_clip_dispatcher(thing)
    from .controlnet import find_control_dispatcher

    return find_control_dispatcher(thing)


def modules_of(kind: str, thing: Any) -> Sequence[torch.nn.Module]:
    """The modules whose calls are served once ``thing`` is accelerated.

    None for a ControlLora, whose network is built anew for each image, and for what cannot be accelerated.
    """
    if kind == "clip":
        from .text_encoder import stacks_of

        return stacks_of(thing)
    if kind == "model":
        found = getattr(getattr(thing, "model", None), "diffusion_model", None)
    else:
        found = getattr(thing, "first_stage_model" if kind == "vae" else "control_model", None)
    return [found] if isinstance(found, torch.nn.Module) else []


def device_of(kind: str, thing: Any) -> torch.device:
    """Where ``thing`` computes."""
    import comfy.model_management

    patcher = thing if kind == "model" else getattr(thing, "patcher", None)
    device: torch.device = getattr(patcher, "load_device", None) or comfy.model_management.get_torch_device()
    return device


def dtype_of(kind: str, thing: Any) -> torch.dtype | None:
    """What images, or latents, are when they come to the modules of ``thing``; None where that does not tell it."""
    if kind == "model":
        found: torch.dtype = thing.model.get_dtype_inference()
        return found
    if kind == "vae":
        dtype: torch.dtype = thing.vae_dtype
        return dtype
    return None
