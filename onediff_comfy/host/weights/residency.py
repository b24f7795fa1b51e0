"""Weights that do not stay on the device: the host brings them when a module is about to run, and takes them back.

In ``--lowvram`` and wherever a model does not fit, layers copy their weights in their own forward. In Dynamic VRAM all
layers do, and what they copied may still be there the next time. Either way a graph, which takes all weights of a
module at once, finds them elsewhere. So here the host is asked for all weights of a module together, by its own
functions and on its own streams, and an image of the module holds what they gave.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import comfy.model_management as memory
import comfy.ops
import torch

from ...capture.call import NotCovered
from ...capture.parameters import signature_of
from ...messages import message
from ..adapters.module_image import is_plain
from ..compatibility import BRINGS_WEIGHTS
from .layer_images import KEYS, NOTES, LayerImages, SeenLayers, are_changed, convert, is_patched, put, stored_dtype

_PREFETCH = "comfy.model_prefetch"


def is_streamed(model: Any) -> bool:
    """Return True if some weights of a model of the host's (a BaseModel) are not on the device while it runs."""
    return bool(getattr(model, "model_lowvram", False)) or bool(getattr(model, "dynamic_vbars", None))


@functools.cache
def can_bring() -> bool:
    """Return True if this host has what brings layers of Dynamic VRAM, as we call it. Not all that have it do."""
    try:
        taken = signature_of(importlib.import_module(_PREFETCH).cleanup_prefetched_modules).parameters
    except (ImportError, AttributeError):
        return False
    return all(use.problem() is None for use in BRINGS_WEIGHTS) and taken.keys() <= {"module", "comfy_modules"}


def take_back(module: torch.nn.Module, layers: Sequence[torch.nn.Module]) -> None:
    """Have the host take back what it brought for layers of ``module``. Hosts since 0.31 are told the module, too."""
    taken = importlib.import_module(_PREFETCH).cleanup_prefetched_modules
    given = {"module": module, "comfy_modules": layers}
    taken(**{name: given[name] for name in signature_of(taken).parameters})


class StreamedModules:
    """An image of modules of one kind, which shows one of them at a time, with its weights in place.

    Whoever looks at the image sees the same layers with other weights each time. So what is found out about the code of
    one block of a transformer is found out once, and not for each of its fifty.

    Args:
        module: one of them; see ``structure_of``.
        compute_dtype: what the model computes in.

    Attributes:
        structure: of all of them.
    """

    def __init__(self, module: torch.nn.Module, compute_dtype: torch.dtype) -> None:
        self._dtype, self.structure = compute_dtype, structure_of(module)
        self._images = LayerImages(module)
        self._seen: dict[torch.nn.Module, SeenLayers] = {}

    def knows(self, module: torch.nn.Module) -> bool:
        """Return True if ``module`` was shown before, and has the layers and attributes that it had. Else forget it.

        Ask before each ``in_place``: a module with other layers may be of another kind.
        """
        seen = self._seen.get(module)
        if seen is not None and seen.are_same():
            return True
        self._seen.pop(module, None)
        return False

    def is_changed(self, module: torch.nn.Module) -> bool:
        """Return True if some layer of ``module``, which was shown, computes with other weights than the file's."""
        return are_changed(self._seen[module].layers)

    @contextlib.contextmanager
    def in_place(self, module: torch.nn.Module, device: torch.device) -> Iterator[torch.nn.Module]:
        """Yield the image of ``module``, with all weights on ``device`` until the context ends.

        Args:
            module: of this kind. Nobody else may show one of the same kind meanwhile.

        Raises:
            NotCovered: the host has a weight in a form that no layer can hold in place.
        """
        seen = self._seen.get(module)
        if seen is not None and seen.shown is self._images.look:
            self._images.show_weights(seen.layers)
        else:
            layers = tuple(module.modules())
            seen = self._seen[module] = SeenLayers(layers, self._images.show(layers))
        with self._brought(seen.layers, device):
            try:
                yield self._images.root
            finally:
                for parameters in self._images.parameters:
                    parameters.clear()
                self._images.put_back(seen.layers)

    @contextlib.contextmanager
    def _brought(self, layers: Sequence[Any], device: torch.device) -> Iterator[None]:
        """Have the host bring what is not there, and take it back in the end."""
        dynamic = [layer for layer in layers if "_v" in vars(layer)]
        if not dynamic:
            self._cast(layers, device)
            yield
            return
        # A queue of the host's may have brought some already, and takes those back. Twice brought is never taken back.
        missing = [layer for layer in dynamic if getattr(layer, "_prefetch", None) is None]
        stream = comfy.ops.cast_modules_with_vbar(
            missing, None, device, None, memory.device_supports_non_blocking(device)
        )
        try:
            memory.sync_stream(device, stream)
            for layer, parameters in zip(layers, self._images.parameters, strict=True):
                if "_v" in vars(layer):
                    put(parameters, self._resolved(layer, device))
                else:
                    convert(parameters, layer, device)
            yield
        finally:
            if stream is not None:
                stream.wait_stream(memory.current_stream(device))
            if missing:
                take_back(layers[0], missing)

    def _resolved(self, layer: Any, device: torch.device) -> tuple[Any, Any]:
        """Return a layer's weight and bias in Dynamic VRAM, which the host has brought."""
        requantise = isinstance(layer.weight, comfy.ops.QuantizedTensor)
        weight, bias = (stored_dtype(layer, key) for key in KEYS)
        # Of what dtype the file's weight is says nothing: the loader's weight_dtype makes 8 bits of it on the device.
        if is_patched(layer) and not requantise and weight is not None and weight.itemsize == 1:
            raise NotCovered(message("a LoRA is added to 8-bit weights while they are brought to the device"))
        found = comfy.ops.resolve_cast_module_with_vbar(
            layer, weight, device, bias, self._dtype if requantise else None, requantise
        )
        return found[0], found[1]

    def _cast(self, layers: Sequence[Any], device: torch.device) -> None:
        """Bring the weights of layers that would copy them, or change them, in their forward."""
        for layer, parameters in zip(layers, self._images.parameters, strict=True):
            if not hasattr(layer, "comfy_cast_weights") or parameters.get("weight") is None:
                continue
            changed = bool(layer.weight_function or layer.bias_function)
            if not changed and layer.weight.device == device:
                continue
            dtype = self._dtype if changed else layer.weight.dtype
            bias_dtype = None if layer.bias is None else self._dtype if changed else layer.bias.dtype
            found = comfy.ops.cast_bias_weight(layer, None, dtype, device, bias_dtype)
            put(parameters, found)


def structure_of(module: torch.nn.Module) -> Hashable:
    """Return what modules have in common that one image can show: their layers' names, classes and weights."""
    return tuple(
        (path, type(layer), tuple(layer._modules), tuple(layer._parameters)) for path, layer in module.named_modules()
    )


def attributes_of(module: torch.nn.Module) -> Hashable:
    """Return the plain attributes of a module's layers, in which blocks of one structure may differ: widths, heads.

    An image that showed one after the other would look as if its code were changed from call to call.
    """
    return tuple(
        tuple((name, repr(value)) for name, value in vars(layer).items() if name not in NOTES and is_plain(value))
        for layer in module.modules()
    )
