"""Wrappers around a sampling run and around the sampler in it, through the host's own patcher API.

A run begins with a look at what extensions have changed since the last. So it is begun by whatever of ours is still
called where an extension has put a table of its own wrappers in the place of one with ours.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from comfy.patcher_extension import WrapperExecutor

from ...messages import Message, message
from ...runtime.step_cache import StepCache
from ...serving.dispatcher import Dispatcher
from ..preparation.latents import latent_ratio
from ..report.status import status_of
from ..weights.dynamic_vram import resident_over_gpus
from .attach import KEY
from .conditioning import keep_on_device

log = logging.getLogger(__name__)

STEP_CACHE = f"{KEY}_step_cache"
"""By this name a patcher keeps its ``StepCacheRequest``."""


@dataclass(frozen=True)
class StepCacheRequest:
    """A wish on a patcher: its runs are to reuse what deep layers computed."""

    threshold: float
    node_id: str | None


class SharedWrapper:
    """A wrapper that copies of the host's tables share: nodes deep-copy the options that a run hands them."""

    def __deepcopy__(self, _memo: dict[int, Any]) -> SharedWrapper:
        return self


class RunWrapper(SharedWrapper):
    """Begin and end a run of the dispatcher around each sampling run.

    Attributes:
        dispatcher: whose runs they are.
        open: how many have begun, and not ended. An extension may have put a table of its own in the place of that
            with this wrapper; then another of ours begins the run.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher, self.open = dispatcher, 0
        self._split: Any = None

    def __call__(self, executor: WrapperExecutor, *args: Any, **kwargs: Any) -> Any:
        guider = executor.class_obj
        own, split = guider.model_patcher, resident_over_gpus(guider.model_patcher)
        if split.others:
            log.info("OneDiff: a run over %d GPUs; its CUDA graphs are recorded when it is over", split.others + 1)
        try:
            with _running(guider, split.patcher):  # before the host loads what it runs
                return self.around(guider, functools.partial(executor, *args, **kwargs))
        finally:
            # The host manages models' memory by a clone of ours, and by what it has made of that for other GPUs. The
            # run before had another, which was needed until the host had loaded this.
            self._split = self._split if split.patcher is own else split.patcher

    def around(self, guider: Any, sample: Callable[[], Any]) -> Any:
        """Return what ``sample`` gives, in a run of its own."""
        patcher = guider.model_patcher
        asked: StepCacheRequest | None = patcher.get_attachment(STEP_CACHE)
        step_cache = StepCache(asked.threshold) if asked is not None and asked.threshold else None
        if step_cache is not None and _strengths_change(guider.conds):
            step_cache.refuse(message("keyframes of a hook change the weights during the run"))
        self.dispatcher.begin_run(step_cache)
        self.open += 1
        try:
            result = sample()
        finally:
            self.open -= 1
            if asked is not None and step_cache is not None:
                self.dispatcher.end_step_cache()
                status_of(asked.node_id)(_reused(step_cache))
        self.dispatcher.end_run(patcher.model.diffusion_model, _size_of(result, latent_ratio(patcher)))
        return result


class SamplerWrapper(SharedWrapper):
    """Keep prompts on the device, and begin the run where ``around_run`` was not called for it."""

    def __init__(self, around_run: RunWrapper) -> None:
        self._around_run = around_run

    def __call__(self, executor: WrapperExecutor, *args: Any, **kwargs: Any) -> Any:
        sample = functools.partial(keep_on_device, executor, *args, **kwargs)
        if self._around_run.open or not args or not hasattr(args[0], "model_patcher"):
            return sample()
        return self._around_run.around(args[0], sample)


@contextlib.contextmanager
def _running(guider: Any, patcher: Any) -> Iterator[None]:
    """Have a guider of the host's run ``patcher``, a clone of its own or that itself, until the context ends."""
    own = guider.model_patcher
    if patcher is own:
        yield
        return
    guider.model_patcher = patcher
    try:
        yield
    finally:
        guider.model_patcher = own


def _strengths_change(conditionings: Mapping[str, Sequence[Mapping[str, Any]]]) -> bool:
    """Return True if hooks change the weights from one step to another.

    All keyframes but the first are for later steps. The hooks that the host has registered do not tell: of two of one
    origin, of which one has keyframes, it keeps the first.
    """
    groups = [conditioning.get("hooks") for of_one_name in conditionings.values() for conditioning in of_one_name]
    return any(len(hook.hook_keyframe.keyframes) > 1 for group in groups if group is not None for hook in group.hooks)


def _reused(step_cache: StepCache) -> Message:
    """Return what a step cache did in a run, for people."""
    if not step_cache.reused and (step_cache.others or not step_cache.calls):
        reason = max(step_cache.others, key=step_cache.others.__getitem__, default="")
        return message("no step was reused: {reason}", reason=reason or message("no compiled graph answered a call"))
    return message("{reused} of {calls} calls reused", reused=step_cache.reused, calls=step_cache.calls)


def _size_of(latent: Any, ratio: int) -> str:
    """Return the image size of a latent ``[batch, channels, (frames,) height, width]``: ``1024×1024 b1``."""
    if not isinstance(latent, torch.Tensor) or latent.ndim < 4:
        return ""
    height, width = (side * ratio for side in latent.shape[-2:])
    return f"{width}×{height} b{len(latent)}"
