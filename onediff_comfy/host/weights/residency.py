"""Weights that do not stay on the device: the host brings them when a module is about to run, and takes them back.

In ``--lowvram`` and wherever a model does not fit, layers copy their weights in their own forward. In Dynamic VRAM all
layers do, and what they copied may still be there the next time. Either way a graph, which takes all weights of a
module at once, finds them elsewhere. So here the host is asked for all weights of a module together, by its own
functions and on its own streams, and an image of the module holds what they gave.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from typing import Any

import comfy.model_management as memory
import comfy.ops
import torch

from ...capture.call import NotCovered
from ...messages import message
from ..adapters.module_image import ModuleImage

_KEYS = ("weight", "bias")
# What the host notes on a layer to move its weights. An image of the layer has its weights in place, and needs none.
_NOTES = frozenset(
    (
        *("comfy_cast_weights", "prev_comfy_cast_weights", "comfy_patched_weights", "seed_key"),
        *("_v", "_v_signature", "_v_weight", "_v_bias", "_prefetch", "_pins", "_pin_state"),
        *(f"{key}{function}" for key in _KEYS for function in ("_function", "_lowvram_function")),
    )
)


def is_streamed(model: Any) -> bool:
    """Return True if some weights of a model of the host's (a BaseModel) are not on the device while it runs."""
    return bool(getattr(model, "model_lowvram", False)) or bool(getattr(model, "dynamic_vbars", None))


def fits(patcher: Any) -> bool:
    """Return True if all weights of a model would fit on its device, if the host took every other model off it."""
    device = patcher.load_device
    loaded = (entry.model_loaded_memory() for entry in memory.current_loaded_models if entry.device == device)
    room = memory.get_free_memory(device) + sum(loaded) - memory.minimum_inference_memory()
    return bool(patcher.model_size() < room)


class StreamedModule:
    """A module of a streamed model, and its image with the weights in place.

    Args:
        module: part of the model, or all of its diffusion model.
        compute_dtype: what the model computes in.
    """

    def __init__(self, module: torch.nn.Module, compute_dtype: torch.dtype) -> None:
        self.module, self._dtype = module, compute_dtype
        self._layers = tuple(module.modules())
        self._weights: list[dict[str, Any]] = [{} for _ in self._layers]
        images: dict[torch.nn.Module, ModuleImage] = {}
        for layer, weights in reversed(list(zip(self._layers, self._weights, strict=True))):  # children first
            children = {name: None if child is None else images[child].image for name, child in layer._modules.items()}
            images[layer] = ModuleImage(layer, _NOTES, {"_parameters": weights, "_modules": children})
        self._images = [images[layer] for layer in self._layers]

    def is_current(self) -> bool:
        """Return True if the module still has the layers that the image was made of."""
        layers = tuple(self.module.modules())
        return len(layers) == len(self._layers) and all(map(operator.is_, layers, self._layers))

    @contextlib.contextmanager
    def in_place(self, device: torch.device) -> Iterator[torch.nn.Module]:
        """Yield the image, with all weights on ``device`` until the context ends.

        Raises:
            NotCovered: the host has a weight in a form that no layer can hold in place.
        """
        for image, weights in zip(self._images, self._weights, strict=True):
            weights.clear()
            weights.update(image.module._parameters)
            image.show()
        with self._brought(device):
            try:
                yield self._images[0].image
            finally:
                for image, weights in zip(self._images, self._weights, strict=True):
                    weights.clear()
                    image.put_back()

    @contextlib.contextmanager
    def _brought(self, device: torch.device) -> Iterator[None]:
        """Have the host bring what is not there, and take it back in the end."""
        dynamic = [layer for layer in self._layers if "_v" in vars(layer)]
        if not dynamic:
            self._cast(device)
            yield
            return
        import comfy.model_prefetch  # hosts without it have no Dynamic VRAM, or another one

        stream = comfy.ops.cast_modules_with_vbar(
            dynamic, None, device, None, memory.device_supports_non_blocking(device)
        )
        try:
            memory.sync_stream(device, stream)
            for layer, weights in zip(self._layers, self._weights, strict=True):
                if "_v" in vars(layer):
                    _put(weights, self._resolved(layer, device))
            yield
        finally:
            if stream is not None:
                stream.wait_stream(memory.current_stream(device))
            comfy.model_prefetch.cleanup_prefetched_modules(dynamic)

    def _resolved(self, layer: Any, device: torch.device) -> tuple[Any, Any]:
        """Return a layer's weight and bias in Dynamic VRAM, which the host has brought."""
        quantised = comfy.ops.QuantizedTensor
        patched = [getattr(layer, f"{key}_lowvram_function", None) is not None for key in _KEYS]
        requantise = isinstance(layer.weight, quantised)
        if any(patched) and not requantise and layer.weight.dtype.itemsize == 1:
            raise NotCovered(message("a LoRA is added to 8-bit weights while they are brought to the device"))
        dtypes = [None if value is None else _stored_dtype(value) for value in (layer.weight, layer.bias)]
        found = comfy.ops.resolve_cast_module_with_vbar(
            layer, dtypes[0], device, dtypes[1], self._dtype if requantise else None, requantise
        )
        return found[0], found[1]

    def _cast(self, device: torch.device) -> None:
        """Bring the weights of layers that would copy them, or change them, in their forward."""
        for layer, weights in zip(self._layers, self._weights, strict=True):
            if not hasattr(layer, "comfy_cast_weights") or weights.get("weight") is None:
                continue
            changed = bool(layer.weight_function or layer.bias_function)
            if not changed and layer.weight.device == device:
                continue
            dtype = self._dtype if changed else layer.weight.dtype
            bias_dtype = None if layer.bias is None else self._dtype if changed else layer.bias.dtype
            found = comfy.ops.cast_bias_weight(layer, None, dtype, device, bias_dtype)
            _put(weights, found)


def _put(weights: dict[str, Any], found: tuple[Any, Any]) -> None:
    """Put what was brought in the place of a layer's weight and bias, where it has them: torch.export asks for
    parameters."""
    for key, value in zip(_KEYS, found, strict=True):
        if key in weights:
            weights[key] = value if value is None else torch.nn.Parameter(value, requires_grad=False)


def _stored_dtype(value: Any) -> torch.dtype:
    """Return the dtype in which Dynamic VRAM keeps a weight on the device."""
    dtype: torch.dtype = getattr(value, "_model_dtype", None) or value.dtype
    return dtype
