"""Keep prompts on the GPU for the length of a run.

The host keeps what a text encoder gives in CPU memory. For every step it joins it there, converts it and copies it to
the GPU, and that copy waits for all that the GPU has been told to do. So the CPU can never prepare a step while the GPU
computes the one before: of 18.2 ms a step of SD1.5, 7.2 were the GPU's and 14 the joining, on a machine of many slow
cores. If the prompts are copied once, before the first step, they are joined and converted on the GPU.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from comfy.patcher_extension import WrapperExecutor

log = logging.getLogger(__name__)

_Prompts = Mapping[str, Sequence[Mapping[str, Any]]]

# Of one argument, in all prompts together. Text is some megabytes; the video that some models are prompted with is
# hundreds, which the host does not count as memory that a step needs.
_MOST_BYTES = 64 << 20


def keep_on_device(executor: WrapperExecutor, *args: Any, **kwargs: Any) -> Any:
    """Run a sampler with its prompts on the device.

    A wrapper for SAMPLER_SAMPLE: by then the host has made a model's arguments out of the run's prompts."""
    try:
        guider = args[0]
        before, moved = guider.conds, on_device(guider.conds, guider.model_patcher.load_device)
    except Exception as error:  # another extension's guider, of which we know nothing; or there is no memory
        log.info("OneDiff: prompts stay where they are (%s: %s)", type(error).__name__, error)
        return executor(*args, **kwargs)
    guider.conds = moved
    try:
        return executor(*args, **kwargs)
    finally:
        guider.conds = before  # a run that was stopped leaves its guider as it is


def on_device(prompts: _Prompts, device: torch.device) -> dict[str, list[dict[str, Any]]]:
    """Return a guider's prompts with the model's arguments on ``device``.

    Args:
        prompts: by name ("positive", ...), the conditionings of each. ``model_conds`` of a conditioning are the
            model's arguments by name, each an object that holds a tensor, a list of tensors, or something else.

    Returns:
        New lists and dicts. Everything but the tensors of ``model_conds`` is the same objects. Arguments that are too
        large stay where they are, in all prompts, for the host joins only what is on one device.
    """
    nbytes: Counter[str] = Counter()
    for conditioning in (each for conditionings in prompts.values() for each in conditionings):
        for name, cond in conditioning["model_conds"].items():
            nbytes[name] += sum(tensor.nbytes for tensor in _tensors(cond))

    def moved(conditioning: Mapping[str, Any]) -> dict[str, Any]:
        conds = conditioning["model_conds"].items()
        return {
            **conditioning,
            "model_conds": {name: cond if nbytes[name] > _MOST_BYTES else _moved(cond, device) for name, cond in conds},
        }

    return {name: list(map(moved, conditionings)) for name, conditionings in prompts.items()}


def _tensors(cond: Any) -> Iterator[torch.Tensor]:
    held = getattr(cond, "cond", None)
    return (each for each in (held if isinstance(held, list) else [held]) if isinstance(each, torch.Tensor))


def _moved(cond: Any, device: torch.device) -> Any:
    """Return one argument on ``device``. What the host does not convert for a call, such as a number, stays."""
    if all(tensor.device == device for tensor in _tensors(cond)):
        return cond
    if isinstance(cond.cond, list):
        return cond._copy_with([each.to(device) if isinstance(each, torch.Tensor) else each for each in cond.cond])
    return cond._copy_with(cond.cond.to(device))
