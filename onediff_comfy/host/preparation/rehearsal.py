"""Rehearse an image: run two steps, or decode and encode once, so that what a size needs is compiled and proved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import comfy.sample
import torch

from ...buckets import Bucket
from ...messages import Message, message
from ..adapters.adapter import adapter_of
from ..adapters.module_proxy import serves
from .latents import empty_latent, empty_vae_latent


@dataclass(frozen=True)
class Rehearsal:
    """How objects of one kind are called before their first real call.

    Attributes:
        empty_latent: return a latent for an object and a bucket. Raises ``BucketError`` if it takes no such size.
        run: call an accelerated object as an image of a latent's size would, wait for the graphs that it needs, and
            throw the result away. Arguments: the object; the latent, ``[batch, channels, (frames,) height, width]``;
            positive and negative CONDITIONING, or None; and ``exact``: make a graph for this size alone too, if the
            size is in the node's buckets.
        needs_prompt: ``run`` needs the positive CONDITIONING.
        nothing_compiled: what Save Compiled Graph says where it lacks what ``run`` needs.
    """

    empty_latent: Callable[[Any, Bucket], torch.Tensor]
    run: Callable[..., None]
    needs_prompt: bool
    nothing_compiled: Message


_STEPS = 2
"""The first shows how some models are to be served (``adapters/model.py``), and the second is."""


def _sample_once(model: Any, samples: Any, positive: Any, negative: Any, exact: bool) -> None:
    samples = comfy.sample.fix_empty_latent_channels(model, samples)
    noise = comfy.sample.prepare_noise(samples, 0)
    cfg = 1.0 if negative is None else 7.0  # a model that is sampled at cfg 1 has no negative prompt
    model = adapter_of("model").preparing(model, exact)
    comfy.sample.sample(
        model, noise, _STEPS, cfg, "euler", "simple", positive, negative or positive, samples, disable_pbar=True, seed=0
    )


def _decode_and_encode_once(vae: Any, samples: torch.Tensor, _positive: Any, _negative: Any, exact: bool) -> None:
    ratio = vae.spacial_compression_decode()
    bucket = Bucket(samples.shape[-1] * ratio, samples.shape[-2] * ratio, len(samples), len(samples))
    noise = torch.Generator().manual_seed(0)
    latent = torch.randn(empty_vae_latent(vae, bucket).shape, generator=noise)  # of as many channels as the VAE's
    vae = adapter_of("vae").preparing(vae, exact)
    if serves(vae.first_stage_model, "decode"):
        vae.decode(latent)
    if serves(vae.first_stage_model, "encode"):
        vae.encode(torch.rand((len(samples), bucket.height, bucket.width, 3), generator=noise))


REHEARSALS: Mapping[str, Rehearsal] = {
    "model": Rehearsal(
        empty_latent,
        _sample_once,
        needs_prompt=True,
        nothing_compiled=message(
            "nothing is compiled yet for this model, and compiling needs sizes and a prompt: connect a latent "
            "and the positive conditioning (and the negative one, unless you sample at cfg 1), or connect the "
            "sampler's LATENT output here, so that saving waits for the first image."
        ),
    ),
    "vae": Rehearsal(
        empty_vae_latent,
        _decode_and_encode_once,
        needs_prompt=False,
        nothing_compiled=message(
            "nothing is compiled yet for this VAE: connect what was decoded or encoded with it to after, so "
            "that saving waits for it, or connect a latent of the size to compile for."
        ),
    ),
}
"""By keys of ``compatibility.KINDS``. A CLIP and a CONTROL_NET are called only with a person's prompt or picture."""
