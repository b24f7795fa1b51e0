"""What the nodes do that stand in old workflows in place of nodes of the earlier OneDiff (see ``replacements``).

The loaders are made of ComfyUI's own loader and our speedup nodes: the host runs these in place of the one node.
"""

from __future__ import annotations

import logging
from typing import Any

import folder_paths

from ...messages import message
from ..actions import speed_up
from ..compatibility import host_changed
from ..report.status import status_of

log = logging.getLogger(__name__)

Link = list[Any]
"""A wire: the id of a node and the number of its output."""

Graph = dict[str, dict[str, Any]]
"""Nodes by id, in the host's API format."""


def model_files(folder: str) -> list[str]:
    """Return the files that ComfyUI finds in one of its model folders now."""
    if host_changed("files") is not None:  # the list is part of a node's schema, and the node is to load
        return []
    return folder_paths.get_filename_list(folder)


def checkpoint_loader(node_id: str, ckpt_name: str, speed_up_vae: bool, note: str) -> tuple[list[Link], Graph]:
    """Return nodes that load a checkpoint and accelerate its MODEL, and VAE if wanted; wires MODEL, CLIP, VAE."""
    _log(note)
    loader, model, vae = (f"{node_id}.{name}" for name in ("loader", "model", "vae"))
    graph = {
        loader: _node("CheckpointLoaderSimple", ckpt_name=ckpt_name),
        model: _node("OneDiffModelSpeedup", model=[loader, 0], engine="auto", compile="wait"),
    }
    if speed_up_vae:
        graph[vae] = _node("OneDiffVAESpeedup", vae=[loader, 2], engine="auto", compile="wait")
    return [[model, 0], [loader, 1], [vae, 0] if speed_up_vae else [loader, 2]], graph


def diffusion_model_loader(node_id: str, unet_name: str, note: str) -> tuple[list[Link], Graph]:
    """Return nodes that load a diffusion model and accelerate it; one wire."""
    _log(note)
    loader, model = f"{node_id}.loader", f"{node_id}.model"
    graph = {
        loader: _node("UNETLoader", unet_name=unet_name, weight_dtype="default"),
        model: _node("OneDiffModelSpeedup", model=[loader, 0], engine="auto", compile="wait"),
    }
    return [[model, 0]], graph


def control_net_loader(node_id: str, control_net_name: str) -> tuple[list[Link], Graph]:
    """Return nodes that load a ControlNet and accelerate it; one wire."""
    loader, control_net = f"{node_id}.loader", f"{node_id}.control_net"
    graph = {
        loader: _node("ControlNetLoader", control_net_name=control_net_name),
        control_net: _node("OneDiffControlNetSpeedup", control_net=[loader, 0], engine="auto", compile="wait"),
    }
    return [[control_net, 0]], graph


def _node(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}


def speed_up_only(model: Any, note: str, node_id: str | None) -> Any:
    """Return ``model`` as OneDiff Model Speedup gives it, and write the note into the log."""
    _log(note)
    return speed_up("model", model, "auto", node_id, budget_mb=0)


def _log(note: str) -> None:
    if note:
        log.warning("OneDiff: %s", note)


def handed_on(note: str, passed: Any, node_id: str | None) -> Any:
    """Return ``passed`` as it is, and put the note into the log and on the node ``node_id``.

    Raises:
        ValueError: there is nothing to hand on, so what is connected to the node cannot be made; with the note.
    """
    if passed is None:
        raise ValueError(note or message("this node of an old workflow makes nothing; delete it"))
    _log(note)
    status_of(node_id)(note)
    return passed
