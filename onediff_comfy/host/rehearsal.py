"""One sampling step, thrown away: what an image of that size needs is made, kept and proved."""

from __future__ import annotations

import contextlib
from typing import Any

import comfy.sample

from .model import find_dispatcher


def rehearse(model: Any, samples: Any, positive: Any, negative: Any = None, exact: bool = False) -> None:
    """Make one sampling step and throw it away, so that what it needs gets compiled or loaded, here and now.

    Args:
        model: an accelerated MODEL.
        samples: an empty latent, ``[batch, channels, (frames,) height, width]`` in latent units.
        positive: CONDITIONING.
        negative: CONDITIONING; None for a model that is sampled at cfg 1.
        exact: a graph for this size alone too, if the size is in the speedup node's buckets.
    """
    samples = comfy.sample.fix_empty_latent_channels(model, samples)
    noise = comfy.sample.prepare_noise(samples, 0)
    cfg = 1.0 if negative is None else 7.0
    dispatcher = find_dispatcher(model)
    with dispatcher.waiting(exact) if dispatcher is not None else contextlib.nullcontext():
        comfy.sample.sample(
            model, noise, 1, cfg, "euler", "simple", positive, negative or positive, samples, disable_pbar=True, seed=0
        )
