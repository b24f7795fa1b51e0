"""The workflows that the pack ships, on tiny files and for tiny pictures."""

from __future__ import annotations

import json
from collections.abc import Mapping

from controls import NET
from model_parts import LORA, WAN, WAN_VAE
from pictures import FAMILIES

from dev.environment import repository
from tools.models.checkpoints import checkpoint_file
from tools.workflows import Workflow

FOLDER = repository() / "workflows"
SD15, FLUX = FAMILIES["sd15"], FAMILIES["flux"]
_WAN_CONDITIONING = {"tokens": 16, "dim": 4096, "pooled_dim": 0}


def small(name: str, seed: int) -> Workflow:
    """A shipped workflow's API form, on tiny files and for a tiny picture.

    ``controls.install_controls`` and ``model_parts.install_model_parts`` give a server the files.
    """
    workflow: Workflow = json.loads((FOLDER / "api" / f"{name}.json").read_text())
    conditioning = SD15.conditioning
    if name == "text_to_image_flux":
        conditioning = _as_flux(workflow)
    elif name == "video":
        conditioning = _as_wan(workflow)
    else:
        workflow["loader"]["inputs"]["ckpt_name"] = checkpoint_file(SD15.checkpoint)
    if "shape" in workflow:  # which goes to the nearest of its buckets
        workflow["shape"]["inputs"] |= {"buckets": "128x128 b1", "width": 100, "height": 120}
        workflow["speedup"]["inputs"]["engine"] = "eager"  # the bucket gets a graph of its own, here in no time
    elif "image" in workflow:
        workflow["image"] = {"class_type": "TinyImage", "inputs": {"width": 128, "height": 96, "batch": 1, "seed": 0}}
    else:
        workflow["latent"]["inputs"] |= {"width": 128, "height": 128}
    # A seed of its own, or the host answers from its cache and runs nothing.
    for sampler in ("sampler", "second_sampler"):
        if "seed" in workflow.get(sampler, {"inputs": {}})["inputs"]:
            workflow[sampler]["inputs"] |= {"steps": SD15.steps, "seed": seed}
    if "noise" in workflow:
        workflow["noise"]["inputs"]["noise_seed"] = seed
        workflow["steps"]["inputs"]["steps"] = FLUX.steps
    if "vae_speedup" in workflow:
        workflow["vae_speedup"]["inputs"]["engine"] = "eager"
    if "net" in workflow:
        workflow["net"]["inputs"]["control_net_name"] = checkpoint_file(NET)
        workflow["hint"] = {
            "class_type": "EmptyImage",
            "inputs": {"width": 128, "height": 128, "batch_size": 1, "color": 0x8040C0},
        }
        # Of the model too, whose graph takes control as inputs.
        workflow["speedup"]["inputs"]["engine"] = workflow["net_speedup"]["inputs"]["engine"] = "eager"
    if "step_cache" in workflow:  # for which the model gets two graphs more, here in no time
        workflow["speedup"]["inputs"]["engine"] = "eager"
    if "lora" in workflow:
        workflow["lora"]["inputs"]["lora_name"] = checkpoint_file(LORA)
    if "clip_speedup" in workflow:  # the tiny checkpoints have no text encoder; test_clip_speedup.py has one
        del workflow["clip_speedup"], workflow["report"]["inputs"]["clip"]
    for node in workflow.values():
        if "compile" in node["inputs"]:
            node["inputs"]["compile"] = "wait"
    for number, prompt in enumerate(("positive", "negative")):
        if prompt in workflow:
            workflow[prompt] = {"class_type": "TinyConditioning", "inputs": {"seed": number, **conditioning}}
    return workflow


def _as_flux(workflow: Workflow) -> Mapping[str, int]:
    """Load the tiny Flux, whose VAE is in the same file; its conditioning's sizes."""
    file = checkpoint_file(FLUX.checkpoint)
    workflow["loader"]["inputs"]["unet_name"] = file
    workflow["speedup"]["inputs"]["engine"] = "eager"
    workflow["vae"] = {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": file}}
    workflow["decode"]["inputs"]["vae"] = ["vae", 2]
    del workflow["clip"]
    return FLUX.conditioning


def _as_wan(workflow: Workflow) -> Mapping[str, int]:
    """Load the tiny Wan and its VAE; its conditioning's sizes."""
    workflow["loader"]["inputs"]["unet_name"] = checkpoint_file(WAN)
    workflow["speedup"]["inputs"]["engine"] = "eager"
    workflow["vae"]["inputs"]["vae_name"] = checkpoint_file(WAN_VAE)
    workflow["latent"]["inputs"]["length"] = 5
    del workflow["clip"]
    return _WAN_CONDITIONING
