"""Keep prompts on the GPU for the length of a run.

The host keeps what a text encoder gives in CPU memory. For every step it joins it there, converts it and copies it to
the GPU, and that copy waits for all that the GPU has been told to do. So the CPU can never prepare a step while the GPU
computes the one before: of 18.2 ms a step of SD1.5, 7.2 were the GPU's and 14 the joining, on a machine of many slow
cores. If the prompts are copied once, before the first step, they are joined and converted on the GPU.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

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
        moved = arguments_on(args[0].conds, args[0].model_patcher.load_device)
    except Exception as error:  # another extension's guider, of which we know nothing; or there is no memory
        log.info("OneDiff: prompts stay where they are (%s: %s)", type(error).__name__, error)
        return executor(*args, **kwargs)
    with put_in_place(moved):
        return executor(*args, **kwargs)


class Moved(NamedTuple):
    """An argument of a model's that is to be on another device.

    Attributes:
        arguments: of a conditioning, by name.
        name: of the argument.
        own: what is there.
        moved: the same on the other device.
    """

    arguments: dict[str, Any]
    name: str
    own: Any
    moved: Any


@contextlib.contextmanager
def put_in_place(moved: Sequence[Moved]) -> Iterator[None]:
    """Have conditionings hold what was moved until the context ends; then what they held, unless somebody changed it.

    They are the very dicts that a guider has, for another extension may change an argument between two steps.
    """
    for each in moved:
        each.arguments[each.name] = each.moved
    try:
        yield
    finally:
        for each in moved:
            if each.arguments.get(each.name) is each.moved:
                each.arguments[each.name] = each.own


def arguments_on(prompts: _Prompts, device: torch.device) -> list[Moved]:
    """Return the model's arguments of a guider's prompts that are not on ``device`` yet, with copies that are.

    Args:
        prompts: by name ("positive", ...), the conditionings of each. ``model_conds`` of a conditioning are the
            model's arguments by name, each an object that holds a tensor, a list of tensors, or something else.

    Returns:
        Those whose tensors are elsewhere. Arguments that are too large are left out, in all prompts, for the host joins
        only what is on one device.
    """
    nbytes, found = Counter[str](), list[Moved]()
    every = [each["model_conds"] for conditionings in prompts.values() for each in conditionings]
    for arguments in every:
        for name, cond in arguments.items():
            nbytes[name] += sum(tensor.nbytes for tensor in _tensors(cond))
    for arguments in {id(each): each for each in every if isinstance(each, dict)}.values():
        for name, cond in arguments.items():
            if nbytes[name] <= _MOST_BYTES and any(tensor.device != device for tensor in _tensors(cond)):
                found.append(Moved(arguments, name, cond, _moved(cond, device)))
    return found


def _tensors(cond: Any) -> Iterator[torch.Tensor]:
    held = getattr(cond, "cond", None)
    return (each for each in (held if isinstance(held, list) else [held]) if isinstance(each, torch.Tensor))


def _moved(cond: Any, device: torch.device) -> Any:
    """Return a copy of an argument on ``device``. What the host does not convert for a call, as a number, stays."""
    if isinstance(cond.cond, list):
        return cond._copy_with([each.to(device) if isinstance(each, torch.Tensor) else each for each in cond.cond])
    return cond._copy_with(cond.cond.to(device))
