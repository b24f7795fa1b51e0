"""Diffusion models of real size with random weights, in each of the forms in which people have them.

What a form is called says what it is to ComfyUI: ``fp8`` multiplies in 8 bits where the GPU can, ``fp8-full`` has a
mark in its file that it must not, ``fp8-cast`` is the loader's weight_dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tools.models.formats import FORMATS, is_quantised, quantised

if TYPE_CHECKING:
    import torch

    from .models import Family

FORMATTED = ("bf16", "fp8-cast", *FORMATS)
"""Their names; ``bf16`` stands for the family's own dtype."""


def load(family: Family, device: torch.device, form: str) -> Any:
    """Return a ComfyUI MODEL with random weights in one of the formats.

    Args:
        family: what to build.
        device: where the weights are made, and stay.
        form: one of ``FORMATTED``.
    """
    import comfy.sd
    import torch

    from . import models

    if form == "bf16":
        return models.load(family, device)
    options = {"dtype": torch.float8_e4m3fn} if form == "fp8-cast" else {}
    return comfy.sd.load_diffusion_model_state_dict(dict(weights_of(family, device, form)), model_options=options)


def weights_of(family: Family, device: torch.device, form: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the random weights of a diffusion model by name, as a file in one of the formats has them."""
    from . import models

    for name, weight in models.random_weights(family, device):
        if form in FORMATS and is_quantised(name, weight, form):
            yield from quantised(name, weight, form).items()
        else:
            yield name, weight
