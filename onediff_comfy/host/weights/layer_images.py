"""An image of a module and of all its layers, which holds weights of its own in their place.

The host's layers say where their weights are, and how they are to be brought. An image's layers simply have them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..adapters.module_image import ModuleImage

KEYS = ("weight", "bias")
"""What a layer's weights are called that the host moves."""

# What the host notes on a layer to move its weights. An image of the layer has its weights in place, and needs none.
_NOTES = frozenset(
    (
        *("comfy_cast_weights", "prev_comfy_cast_weights", "comfy_patched_weights", "seed_key"),
        *("_v", "_v_signature", "_v_weight", "_v_bias", "_prefetch", "_pins", "_pin_state"),
        *("_v_block", "_v_block_faulted", "_comfy_graph"),  # of hosts that record blocks as CUDA graphs
        *(f"{key}{function}" for key in KEYS for function in ("_function", "_lowvram_function")),
    )
)
# What nn.Module keeps weights, buffers and hooks in. An image has its own, of the same content.
_HOLDERS = {name: kept for name, kept in vars(torch.nn.Module()).items() if isinstance(kept, dict)}
del _HOLDERS["_modules"]


class LayerImages:
    """Images of a module and its layers, children first.

    Args:
        module: what they are images of.

    Attributes:
        root: the image of ``module``.
        parameters: of each layer's image, in the order of ``module.modules()``: its weights by name.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        layers = tuple(module.modules())
        self._held = [{name: type(holder)() for name, holder in _HOLDERS.items()} for _ in layers]
        images: dict[torch.nn.Module, ModuleImage] = {}
        for layer, held in reversed(list(zip(layers, self._held, strict=True))):  # children first
            children = {name: None if child is None else images[child].image for name, child in layer._modules.items()}
            images[layer] = ModuleImage(layer, _NOTES, {**held, "_modules": children})
        self._images = [images[layer] for layer in layers]
        self.root = self._images[0].image
        self.parameters: list[dict[str, Any]] = [held["_parameters"] for held in self._held]

    def show(self, layers: Sequence[torch.nn.Module]) -> None:
        """Show these layers, of a module of the same kind, as they are now, with the weights that they hold."""
        for layer, image, held in zip(layers, self._images, self._held, strict=True):
            theirs = vars(layer)
            for name, holder in held.items():
                if holder or theirs[name]:
                    holder.clear()
                    holder.update(theirs[name])
            image.show(layer)

    def put_back(self) -> None:
        """Set and delete on the layers what was set and deleted on their images since they were shown."""
        for image in self._images:
            image.put_back()

    def layers(self) -> list[torch.nn.Module]:
        """Return the image of each layer."""
        return [image.image for image in self._images]


def put(weights: dict[str, Any], found: tuple[Any, Any]) -> None:
    """Put a weight and a bias in the place of a layer's own, as parameters, which is what layers hold."""
    for key, value in zip(KEYS, found, strict=True):
        if key in weights:
            weights[key] = value if value is None else torch.nn.Parameter(value, requires_grad=False)


def convert(weights: dict[str, Any], layer: torch.nn.Module) -> None:
    """Give weights of a layer that the host leaves as they are in the file the dtype that the layer computes with."""
    for name, weight in weights.items():
        dtype = None if weight is None else stored_dtype(layer, name)
        if weight is not None and weight.dtype != dtype:
            weights[name] = torch.nn.Parameter(weight.to(dtype), requires_grad=False)


def stored_dtype(layer: torch.nn.Module, name: str) -> torch.dtype | None:
    """Return the dtype in which a layer computes with its weight ``name``, and Dynamic VRAM keeps it; None of none.

    The file may have another. What the host moves it converts on the way; small weights it leaves as they are, for the
    layer to convert in each call.
    """
    weight = getattr(layer, name)
    wanted: torch.dtype | None = vars(layer).get(f"{name}_comfy_model_dtype")
    return None if weight is None else wanted or weight.dtype
