"""Nodes behind ours that do as they like with the host's tables of wrappers, and with the options that hold them.

    python replaced_tables.py COMFY_DIR FAMILY

Prints as JSON, by node, how far each of three pictures is off from ComfyUI's own, how many calls graphs answered for
each, and how many runs the dispatcher has had. For the second picture an extension has replaced a function that the
model calls; for the third there is ours alone, with the model as it was.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

COMFY_DIR, name = sys.argv[1:]
sys.path[:0] = [COMFY_DIR, str(Path(__file__).resolve().parents[2])]
sys.argv = sys.argv[:1]

import comfy.cli_args  # noqa: E402

comfy.cli_args.args.cpu = True

import comfy.ldm.modules.diffusionmodules.openaimodel as openai  # noqa: E402
import comfy.sample  # noqa: E402
import torch  # noqa: E402

from onediff_comfy.host.adapters.model import accelerate, find_dispatcher  # noqa: E402
from onediff_comfy.host.process.process import metrics  # noqa: E402
from tools.models.families import FAMILIES  # noqa: E402

FAMILY = FAMILIES[name]
PLAIN = FAMILY.load()


def hands_on(executor: Any, *args: Any, **kwargs: Any) -> Any:
    return executor(*args, **kwargs)


def replaces(*places: str) -> Callable[[Any], Any]:
    """Return a node that puts tables of its own in the place of the host's, whoever has wrappers in them."""

    def node(model: Any) -> Any:
        changed = model.clone()
        changed.wrappers.update({place: {None: [hands_on]} for place in places})
        return changed

    return node


def answers_first(model: Any) -> Any:
    """Add a wrapper that calls the model itself in its first call, and nothing that is behind it."""
    changed, calls = model.clone(), list[int]()

    def wrapper(executor: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return executor.original(*args, **kwargs) if len(calls) == 1 else executor(*args, **kwargs)

    table = changed.wrappers.setdefault("diffusion_model", {})
    changed.wrappers["diffusion_model"] = {"theirs": [wrapper], **table}
    return changed


def copies_options(model: Any) -> Any:
    """Add a function that asks for one more prediction, with a copy of the options that it changes."""
    changed = model.clone()

    def more(arguments: Any) -> Any:
        options = copy.deepcopy(arguments["model_options"])
        asked = arguments["model"], arguments["conds"][:1], arguments["input"], arguments["timestep"], options
        (again,) = comfy.samplers.calc_cond_batch(*asked)
        first, *others = arguments["conds_out"]
        return [first * 0.75 + again * 0.25, *others]

    changed.set_model_sampler_pre_cfg_function(more)
    return changed


NODES: dict[str, Callable[[Any], Any]] = {
    "runs": replaces("outer_sample"),
    "runs and calls": replaces("outer_sample", "apply_model"),
    "runs and samplers": replaces("outer_sample", "sampler_sample"),
    "forwards": replaces("diffusion_model"),
    "answers first": answers_first,
    "copies options": copies_options,
}


def picture(model: Any) -> torch.Tensor:
    latent = FAMILY.latent()
    noise = torch.randn(latent.shape, generator=torch.Generator().manual_seed(1))
    prompts = FAMILY.conditioning(1), FAMILY.conditioning(2)
    return comfy.sample.sample(model, noise, 3, 3.0, "euler", "simple", *prompts, latent, disable_pbar=True, seed=1)


def with_another_function(model: Any) -> torch.Tensor:
    embedded = openai.timestep_embedding
    with mock.patch.object(openai, "timestep_embedding", lambda *args, **kwargs: embedded(*args, **kwargs) * 0.5):
        return picture(model)


def compared(node: Callable[[Any], Any]) -> dict[str, Any]:
    ours = accelerate(PLAIN, "eager")
    dispatcher, changed = find_dispatcher(ours), node(ours)
    pairs = ((picture, changed, node(PLAIN)), (with_another_function, changed, node(PLAIN)), (picture, ours, PLAIN))
    off, served = [], []
    for made_of, accelerated, plain in pairs:
        before, expected = metrics().snapshot()["served"], made_of(plain)
        off.append(float((made_of(accelerated) - expected).abs().max() / expected.abs().max()))
        served.append(metrics().snapshot()["served"] - before)
    return {"off": off, "served": served, "runs": dispatcher.runs if dispatcher else 0}


def row(node: Callable[[Any], Any]) -> dict[str, Any]:
    try:
        return compared(node)
    except Exception as error:  # of the node's own code, which ours must not break
        return {"error": repr(error), "off": [float("inf")], "served": [0], "runs": 0}


with torch.inference_mode():
    sys.stdout.write(json.dumps({each: row(node) for each, node in NODES.items()}))
