"""One step, or one image, thrown away: what an image of that size needs is made, kept and proved."""

from __future__ import annotations

from typing import Any

import comfy.sample
import torch

from ..adapters.kinds import dispatcher_of
from ..adapters.module_proxy import serves
from .latents import vae_latent_shape


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
    model = preparing_model(model, exact)
    comfy.sample.sample(
        model, noise, 1, cfg, "euler", "simple", positive, negative or positive, samples, disable_pbar=True, seed=0
    )


def preparing_model(model: Any, exact: bool = False) -> Any:
    """Return a clone of an accelerated MODEL whose calls wait for their graphs, whatever was chosen on the node.

    Args:
        exact: also for those of its own that a size is to have.
    """
    from ..adapters.model import serve_by

    dispatcher = dispatcher_of("model", model)
    if dispatcher is None:
        return model
    clone = model.clone()
    serve_by(clone, dispatcher.preparing(exact))
    return clone


def rehearse_vae(vae: Any, width: int, height: int, batch: int, exact: bool = False) -> None:
    """Decode and encode one image, as far as these are accelerated, and throw it away; as ``rehearse``.

    Args:
        vae: an accelerated VAE.
        width: of the image, in pixels.
        height: likewise.
        batch: how many at once.
        exact: a graph for this size alone too, if the size is in the speedup node's buckets.

    Raises:
        BucketError: what the VAE makes has no width and height.
    """
    noise = torch.Generator().manual_seed(0)
    shape = vae_latent_shape(vae, width, height, batch)
    vae = preparing_vae(vae, exact)
    if serves(vae.first_stage_model, "decode"):
        vae.decode(torch.randn(shape, generator=noise))
    if serves(vae.first_stage_model, "encode"):
        vae.encode(torch.rand((batch, height, width, 3), generator=noise))


def preparing_vae(vae: Any, exact: bool = False) -> Any:
    """Return a copy of an accelerated VAE; as ``preparing_model``."""
    from ..adapters.vae import vae_served_by

    dispatcher = dispatcher_of("vae", vae)
    return vae if dispatcher is None else vae_served_by(vae, dispatcher.preparing(exact))
