"""An image of a module and of all its layers, which holds weights of its own in their place.

The host's layers say where their weights are, and how they are to be brought. An image's layers simply have them.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch

from ..adapters.module_image import ModuleImage

KEYS = ("weight", "bias")
"""What a layer's weights are called that the host moves."""

OF_DYNAMIC_VRAM = frozenset(
    (
        *("_v", "_v_signature", "_v_weight", "_v_bias", "_prefetch", "_pins", "_pin_state"),
        *("_v_block", "_v_block_faulted", "_comfy_graph"),  # of hosts that record blocks as CUDA graphs
    )
)
"""What Dynamic VRAM notes on a layer: pages of its weights, which may be gone from the device, and pinned RAM."""

NOTES_ON_MODELS = frozenset(
    (
        *("model_loaded_weight_memory", "model_offload_buffer_memory", "model_lowvram", "lowvram_patch_counter"),
        *("current_weight_patches_uuid", "dynamic_vbars", "dynamic_pins", "dynamic_patchers"),
    )
)
"""What comfy.model_patcher notes on the module that it moves about. It differs in each process and changes with every
load, and some of it cannot be sent to another process."""

# What the host notes on a layer to move its weights. An image of the layer has its weights in place, and needs none.
NOTES = OF_DYNAMIC_VRAM | {
    *("comfy_cast_weights", "prev_comfy_cast_weights", "comfy_patched_weights", "seed_key"),
    *(f"{key}{function}" for key in KEYS for function in ("_function", "_lowvram_function")),
}
"""Their names."""
# What nn.Module keeps weights, buffers and hooks in. An image has its own, of the same content.
_HOLDERS = {name: kept for name, kept in vars(torch.nn.Module()).items() if isinstance(kept, dict | set)}
del _HOLDERS["_modules"]
_held_by = operator.itemgetter(*_HOLDERS)
_HIDDEN = NOTES | NOTES_ON_MODELS  # the module may be all that the host moves
_APART = _HIDDEN | _HOLDERS.keys() | {"_modules"}


class LayerImages:
    """Images of a module and its layers, children first.

    Args:
        module: what they are images of.

    Attributes:
        root: the image of ``module``.
        look: what the images look like now; None if nobody knows.
        parameters: of each layer's image, in the order of ``module.modules()``: its weights by name.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        layers = tuple(module.modules())
        held: list[dict[str, Any]] = [{name: type(holder)() for name, holder in _HOLDERS.items()} for _ in layers]
        own, images = dict(zip(layers, held, strict=True)), dict[torch.nn.Module, ModuleImage]()

        def image_of(layer: torch.nn.Module) -> ModuleImage:  # of one that is in several places there is one
            if layer not in images:
                children = layer._modules.items()
                shown = {name: None if child is None else image_of(child).image for name, child in children}
                images[layer] = ModuleImage(layer, _HIDDEN, {**own[layer], "_modules": shown})
            return images[layer]

        self._images = list(map(image_of, layers))
        self.root = self._images[0].image
        self.look: Look | None = None
        self._holders: list[Any] = list(chain.from_iterable(map(dict.values, held)))
        self.parameters: list[dict[str, Any]] = [own["_parameters"] for own in held]

    def show(self, layers: Sequence[torch.nn.Module]) -> Look:
        """Show these layers, of a module of the same kind, as they are now, with the weights that they hold.

        Returns:
            What the images look like now. It is the very same for modules that differ in nothing but their weights.
        """
        for layer, image in zip(layers, self._images, strict=True):
            image.show(layer)
        self.show_weights(layers)
        if self.look is None or not self.look.holds():
            self.look = Look(self.layers())
        return self.look

    def show_weights(self, layers: Sequence[torch.nn.Module]) -> None:
        """Show the weights, buffers and hooks that these layers hold now. All else stays as it was shown."""
        theirs = chain.from_iterable(map(_held_by, map(vars, layers)))
        for holder, other in zip(self._holders, theirs, strict=True):
            if holder or other:  # most are empty
                holder.clear()
                holder.update(other)

    def put_back(self, layers: Sequence[torch.nn.Module]) -> None:
        """Set and delete on these layers what was set and deleted on their images since they were shown."""
        if self.look is None or self.look.holds():  # never shown, or nothing has happened to them
            return
        for layer, image in zip(layers, self._images, strict=True):
            image.put_back(layer)
        self.look = None

    def layers(self) -> list[torch.nn.Module]:
        """Return the image of each layer."""
        return [image.image for image in self._images]


class Look:
    """What layers look like, but for weights, buffers and what the host notes of them. Compared by identity.

    Asked of each block in each step: so nothing here runs once for each layer or attribute in Python.

    Args:
        layers: a module and all its submodules, or images of them.
    """

    def __init__(self, layers: Sequence[torch.nn.Module]) -> None:
        self._layers, self._kinds = layers, list(map(type, layers))
        self._states = [vars(layer) for layer in layers]
        names = [tuple(name for name in state if name not in _APART) for state in self._states]
        self._keys = list(chain.from_iterable(self._states))
        self._counts = list(map(len, names))
        groups = defaultdict[tuple[str, ...], list[dict[str, Any]]](list)
        for each, state in zip(names, self._states, strict=True):
            groups[each].append(state)
        self._getters = [operator.itemgetter("_modules", "training", *each) for each in groups]  # never of one name
        self._grouped = list(groups.values())
        self._held = self._now()
        dicts = [value for value in self._held if type(value) is dict]  # a forward may write to them
        self._filled, self._empty = list(filter(None, dicts)), [each for each in dicts if not each]
        self._inside = self._inside_now()

    def holds(self) -> bool:
        """Return True if the layers are of the classes and hold the very objects that they held, by the same names."""
        if not all(map(operator.is_, map(type, self._layers), self._kinds)):
            return False
        keys = list(chain.from_iterable(self._states))
        if keys != self._keys:  # notes come and go
            if [len(state) - sum(map(state.__contains__, _APART)) for state in self._states] != self._counts:
                return False
            self._keys = keys
        try:
            now = self._now()
        except KeyError:  # one attribute went, and another came
            return False
        if not all(map(operator.is_, now, self._held)) or any(self._empty):
            return False
        inside = self._inside_now()
        return len(inside) == len(self._inside) and all(map(operator.is_, inside, self._inside))

    def _now(self) -> list[Any]:
        # map(map, getters, states): of each group the values of each of its layers, without a step in Python.
        return list(chain.from_iterable(chain.from_iterable(map(map, self._getters, self._grouped))))

    def _inside_now(self) -> list[Any]:
        return list(chain(chain.from_iterable(self._filled), chain.from_iterable(map(dict.values, self._filled))))


class SeenLayers:
    """A module's layers as they were shown: the images need not look at them again while they are the same objects.

    Args:
        layers: the module and all its submodules.
        shown: what the images look like since.
    """

    def __init__(self, layers: Sequence[torch.nn.Module], shown: Look) -> None:
        self.layers, self.shown = layers, shown
        self._look = Look(layers)

    def are_same(self) -> bool:
        """Return True if the layers hold the very objects that they held, weights and what notes of them apart."""
        return self._look.holds()


def put(weights: dict[str, Any], found: tuple[Any, Any]) -> None:
    """Put a weight and a bias in the place of a layer's own, as parameters, which is what layers hold.

    One of several tensors stays as it is: to make a parameter of it copies its scale on the device, in every call.
    """
    for key, value in zip(KEYS, found, strict=True):
        if key in weights:
            plain = type(value) is torch.Tensor
            weights[key] = torch.nn.Parameter(value, requires_grad=False) if plain else value


def convert(weights: dict[str, Any], layer: torch.nn.Module, device: torch.device) -> None:
    """Give small weights of a layer, which the host may leave as they are in the file, the dtype and device to compute.

    Args:
        weights: the layer's, by name; changed in place.
    """
    for name, weight in weights.items():
        dtype = None if weight is None else dtype_in_place(layer, name)
        if weight is not None and (weight.dtype, weight.device) != (dtype, device):
            weights[name] = torch.nn.Parameter(weight.to(device, dtype), requires_grad=False)


def is_patched(layer: torch.nn.Module) -> bool:
    """Return True if the host adds a LoRA to a layer's weights while it brings them to the device."""
    state = vars(layer)
    return state.get("weight_lowvram_function") is not None or state.get("bias_lowvram_function") is not None


def has_functions(layer: torch.nn.Module) -> bool:
    """Return True if a layer changes its weights in each of its calls, by functions of the host's or an extension's."""
    state = vars(layer)
    return bool(state.get("weight_function") or state.get("bias_function"))


def is_changed(module: torch.nn.Module) -> bool:
    """Return True if some layer of a module computes with other weights than the model file's."""
    return any(are_changed(module.modules()))


def are_changed(layers: Iterable[torch.nn.Module]) -> list[bool]:
    """As ``is_changed``, of each of these layers alone. What has no weights computes with none."""
    return [bool(layer._parameters) and (is_patched(layer) or has_functions(layer)) for layer in layers]


def stored_dtype(layer: torch.nn.Module, name: str) -> torch.dtype | None:
    """Return the dtype in which a layer computes with its weight ``name``, and Dynamic VRAM keeps it; None of none.

    The file may have another. What the host moves it converts on the way; small weights it leaves as they are, for the
    layer to convert in each call; see ``dtype_in_place``.
    """
    weight = getattr(layer, name)
    wanted: torch.dtype | None = vars(layer).get(f"{name}_comfy_model_dtype")
    return None if weight is None else wanted or weight.dtype


def dtype_in_place(layer: torch.nn.Module, name: str) -> torch.dtype | None:
    """Return the dtype in which the image of a layer is to have a small weight ``name``; None of none.

    In Dynamic VRAM the host has every layer convert its weights in each call. An image's layer does so only if its
    class does, and then it has to convert what the host's converts: by way of 8 bits other numbers would come of it.
    """
    if getattr(type(layer), "comfy_cast_weights", False):
        weight = getattr(layer, name)
        return None if weight is None else weight.dtype
    return stored_dtype(layer, name)
