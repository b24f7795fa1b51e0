"""Which sizes a MODEL or a VAE takes, and latents of such sizes."""

from __future__ import annotations

from typing import Any

import comfy.model_management
import torch

from ...buckets import Bucket, BucketError
from ...messages import message


def latent_ratio(model: Any) -> int:
    """Return how many pixels of an image's side one latent pixel stands for; 8 where a host does not say."""
    ratio: int = getattr(model.get_model_object("latent_format"), "spacial_downscale_ratio", 8)
    return ratio


def patch_side(module: Any) -> int:
    """Return the side of a diffusion model's square patches, in latent pixels; 1 if it cuts none."""
    patch = getattr(module, "patch_size", 1)
    if isinstance(patch, (tuple, list)) and patch:  # (frames, height, width)
        patch = patch[-1]
    return patch if isinstance(patch, int) and patch > 0 else 1


def size_factor(model: Any) -> int:
    """Return the number of pixels of which a width or height that needs no padding is a multiple.

    It is what one latent pixel stands for, times the side of the diffusion model's patches.
    """
    ratio = latent_ratio(model)
    return ratio * patch_side(model.get_model_object("diffusion_model"))


def empty_latent(model: Any, bucket: Bucket) -> torch.Tensor:
    """Return zeros, ``[least_batch, channels, (frames,) height, width]``, as the host's own nodes make them.

    Args:
        model: a MODEL; says how many channels and dimensions.
        bucket: the size in pixels.

    Raises:
        BucketError: the model does not make images, or not videos.
    """
    latent_format = model.get_model_object("latent_format")
    ratio = latent_ratio(model)
    shape = [bucket.least_batch, latent_format.latent_channels, bucket.height // ratio, bucket.width // ratio]
    if latent_format.latent_dimensions == 3:
        # The first frame is a latent frame by itself, in every video format of the host.
        every = getattr(latent_format, "temporal_downscale_ratio", 1)
        shape.insert(2, ((bucket.frames or 1) - 1) // every + 1)
    elif latent_format.latent_dimensions != 2:
        raise BucketError(message("this model's latents have no width and height"))
    elif bucket.frames is not None:
        raise BucketError(
            message("this model makes images, not videos; write the size without f{frames}", frames=bucket.frames)
        )
    # The dtype is a setting of newer hosts.
    dtype = getattr(comfy.model_management, "intermediate_dtype", lambda: torch.float32)()
    return torch.zeros(shape, device=comfy.model_management.intermediate_device(), dtype=dtype)


def empty_vae_latent(vae: Any, bucket: Bucket) -> torch.Tensor:
    """Return zeros, ``[least_batch, channels, (1,) height, width]``, that ``vae`` decodes to images of a bucket's size.

    Args:
        vae: a VAE; says how many channels and dimensions.
        bucket: the size in pixels.

    Raises:
        BucketError: what the VAE makes has no width and height, or the bucket is a video's.
    """
    if bucket.frames is not None:
        raise BucketError(message("ComfyUI itself decodes and encodes videos; disconnect the VAE"))
    if vae.latent_dim not in (2, 3):
        raise BucketError(message("this VAE's latents have no width and height"))
    ratio = vae.spacial_compression_decode()
    frames = [1] if vae.latent_dim == 3 else []
    return torch.zeros(bucket.least_batch, vae.latent_channels, *frames, bucket.height // ratio, bucket.width // ratio)
