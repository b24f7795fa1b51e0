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
import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import comfy.model_management as memory
import comfy.ops
import torch

from ...capture.call import NotCovered
from ...capture.parameters import signature_of
from ...capture.target.tensor_parts import format_of
from ...messages import message
from ...runtime.launch_bound import Backlog, MovingWeights
from ..adapters.module_image import is_plain
from ..compatibility import BRINGS_WEIGHTS
from .buffered_weights import BufferedWeights, Copy, is_in_no_page
from .layer_images import (
    KEYS,
    NOTES,
    LayerImages,
    Look,
    SeenLayers,
    are_changed,
    convert,
    has_functions,
    is_patched,
    put,
    stored_dtype,
)
from .page_order import places_of
from .quantised import weight_formats

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
    taken(**{name: given[name] for name in _parameters_of(taken)})


def is_moved(layer: Any, device: torch.device) -> bool:
    """Return True if a layer that is in Dynamic VRAM has its weight on the device: the host takes that, and no page."""
    if layer.weight is None:
        return False
    where = layer.weight.device
    return where.type == device.type and where.index in (None, device.index)


def give_up(module: torch.nn.Module, layers: Sequence[torch.nn.Module], device: torch.device) -> None:
    """Have the host take back what it brought for layers of ``module``, where it failed to bring all.

    It notes on each layer what it has brought. A layer's own forward takes that for its weights, and by then other
    weights may be there.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # copies are under way on streams that nobody waits for
    take_back(module, layers)


@functools.lru_cache(maxsize=1)
def _parameters_of(function: Any) -> tuple[str, ...]:
    """Return what a function's parameters are called. It is asked of one function, for each block in each step."""
    return tuple(signature_of(function).parameters)


@dataclass(frozen=True)
class InPlace:
    """A module whose weights are on the device.

    Attributes:
        image: of the module.
        is_changed: some of its layers compute with other weights than the model file's.
        settled: in its next call the host computes with the same weights. Not so where it has just added a LoRA to 8
            bits: it computes with the sum, and keeps that rounded to 8 bits for later calls.
        moving: where its weights are.
    """

    image: torch.nn.Module
    is_changed: bool
    settled: bool = True
    moving: MovingWeights = MovingWeights()  # noqa: RUF009 - a value that nothing changes


@dataclass(frozen=True)
class _Kept:
    """Weights of a layer that the host keeps on the device, and their parameters, which an image shows.

    Attributes:
        noted: its weight and bias, the very objects that the host notes on the layer.
        shown: the same by name, as parameters.
    """

    noted: tuple[Any, Any]
    shown: dict[str, Any]


class _Seen(SeenLayers):
    """As ``SeenLayers``, with what else is known of a module that was shown.

    Attributes:
        run: the number of the run in which its weights' formats were compared last.
        kept: by layer, where the host gave the very weights that it keeps.
    """

    def __init__(self, layers: Sequence[torch.nn.Module], shown: Look) -> None:
        super().__init__(layers, shown)
        self.run: int | None = None
        self.kept: dict[torch.nn.Module, _Kept] = {}


class StreamedModules:
    """An image of modules of one kind, which shows one of them at a time, with its weights in place.

    Whoever looks at the image sees the same layers with other weights each time. So what is found out about the code of
    one block of a transformer is found out once, and not for each of its fifty.

    Args:
        module: one of them; see ``structure_of``.
        compute_dtype: what the model computes in.
        backlog: of calls of all blocks of the model.

    Attributes:
        structure: of all of them.
        formats: of their weights, as they are shown.
    """

    def __init__(self, module: torch.nn.Module, compute_dtype: torch.dtype, backlog: Backlog) -> None:
        self._dtype, self._backlog, self._kinds = compute_dtype, backlog, weight_formats()
        self.structure, self.formats = structure_of(module), formats_of(module, compute_dtype)
        self._images = LayerImages(module)
        self._seen: dict[torch.nn.Module, _Seen] = {}
        self._buffered = BufferedWeights(functools.partial(_dtypes_shown, compute_dtype=compute_dtype))

    @property
    def image(self) -> torch.nn.Module:
        """Return the image. It shows a module while that is in place."""
        return self._images.root

    def knows(self, module: torch.nn.Module, run: int) -> bool:
        """Return True if ``module`` was shown before, and has the layers and attributes that it had. Else forget it.

        Ask before each ``in_place``: a module with other layers, or weights of other formats, may be of another kind.

        Args:
            run: the number of the sampling run. Formats are compared once in each.
        """
        self._buffered.begin_run(run)
        seen = self._seen.get(module)
        known = seen is not None and seen.are_same()
        if seen is not None and known and seen.run != run:
            known, seen.run = formats_of(module, self._dtype) == self.formats, run
        if not known:
            self._seen.pop(module, None)
        return known

    @contextlib.contextmanager
    def in_place(self, module: torch.nn.Module, device: torch.device) -> Iterator[InPlace]:
        """Yield the image of ``module``, with all weights on ``device`` until the context ends.

        Where code of the module's has run on the image, call ``put_back`` then.

        Args:
            module: of this kind. Nobody else may show one of the same kind meanwhile.
        """
        seen = self._seen.get(module)
        if seen is not None and seen.shown is self._images.look:
            self._images.show_weights(seen.layers)
        else:
            layers = tuple(module.modules())
            seen = self._seen[module] = _Seen(layers, self._images.show(layers))
        try:
            with self._brought(seen, device) as in_place:
                yield in_place
        finally:  # also where they could not be brought: an image holds no weights of a module that it does not show
            for parameters in self._images.parameters:
                parameters.clear()

    def put_back(self, module: torch.nn.Module) -> None:
        """Set and delete on ``module`` and its layers what was set and deleted on their images while in place."""
        self._images.put_back(self._seen[module].layers)

    @contextlib.contextmanager
    def _brought(self, seen: _Seen, device: torch.device) -> Iterator[InPlace]:
        """Have the host bring what is not there, and take it back in the end."""
        layers: Sequence[Any] = seen.layers
        dynamic, changed = [layer for layer in layers if "_v" in vars(layer)], are_changed(layers)
        is_changed = any(changed)
        if any(is_moved(layer, device) for layer in dynamic):
            raise NotCovered(message("another extension has put its weights on the device"))
        if any(map(has_functions, dynamic)):  # the host's LoRAs are none: only extensions have functions there
            # They may count, or write to a weight that stays: to bring it for a graph calls them once more.
            raise NotCovered(message("another extension changes its weights in each call"))
        current = memory.current_stream(device)  # asking takes as long as waiting
        self._backlog.called(current)
        moving = MovingWeights(places_of(dynamic), self._backlog.is_long)
        if not dynamic:
            self._cast(layers, device)
            yield InPlace(self._images.root, is_changed, moving=moving)
            return
        # A queue of the host's may have brought some already, and takes those back. Twice brought is never taken back.
        missing = [layer for layer in dynamic if vars(layer).get("_prefetch") is None]
        try:
            stream = comfy.ops.cast_modules_with_vbar(
                missing, None, device, None, memory.device_supports_non_blocking(device)
            )
        except BaseException:
            give_up(layers[0], missing, device)
            raise
        try:
            if stream is not None:
                current.wait_stream(stream)
            if is_changed and any(map(_is_computed_unrounded, dynamic)):
                raise NotCovered(message("a LoRA is added to 8-bit weights while they are brought to the device"))
            settled = not (is_changed and any(map(_is_rounded_next, dynamic)))
            for number, (layer, parameters) in enumerate(zip(layers, self._images.parameters, strict=True)):
                if "_v" in vars(layer):
                    self._put_brought(number, parameters, seen, changed[number], device)
                elif parameters:
                    convert(parameters, layer, device)
            yield InPlace(self._images.root, is_changed, settled, moving)
        finally:
            if stream is not None:
                stream.wait_stream(current)
            # The host adds a LoRA where it has copied a weight to, and only of pages it notes that it has. So what its
            # queue brought elsewhere is taken once: its own forward would add the LoRA again.
            once = is_changed and any(map(is_in_no_page, itertools.compress(layers, changed)))
            if once or missing:
                take_back(layers[0], dynamic if once else missing)

    def _put_brought(
        self, number: int, parameters: dict[str, Any], seen: _Seen, changed: bool, device: torch.device
    ) -> None:
        """Put the weights of the layer with this number, which the host has brought, in the place of ``parameters``.

        Weights that the host says are still there, and that are the objects that it gave for a call before, are shown
        by the parameters of that call. Those that it has copied to where it had copied this layer's before, or that of
        another module, are shown by the tensors of that call: over the same bytes, in the same form, they are equal,
        and making them takes longer than all else. Not those that are changed from what the file has.
        """
        layer: Any = seen.layers[number]
        state, before = vars(layer), None if changed else seen.kept.get(layer)
        if before is not None and state["_prefetch"]["resident"] and _is_noted(state, before.noted):
            parameters.update(before.shown)
            return
        copy = None if changed else Copy.of(layer)
        made = None if copy is None else self._buffered.made(number, copy)
        if made is not None:
            parameters.update(made)
            state["_v_signature"] = None  # as the host notes where it makes them: nothing of it is in a page now
            return
        found = self._resolved(layer, device)
        put(parameters, found)
        shown = {key: parameters[key] for key in KEYS if key in parameters}
        seen.kept.pop(layer, None)
        if copy is not None and self._buffered.keep(number, copy, found, shown):
            return
        if not changed and _is_noted(state, found):
            seen.kept[layer] = _Kept(found, shown)

    def _resolved(self, layer: Any, device: torch.device) -> tuple[Any, Any]:
        """Return a layer's weight and bias in Dynamic VRAM, which the host has brought."""
        requantise = isinstance(layer.weight, comfy.ops.QuantizedTensor)
        weight, bias = _dtypes_shown(layer, self._dtype)
        found = comfy.ops.resolve_cast_module_with_vbar(
            layer, weight, device, bias, self._dtype if requantise else None, requantise
        )
        return found[0], found[1]

    def _cast(self, layers: Sequence[Any], device: torch.device) -> None:
        """Bring the weights of layers that would copy them, or change them, in their forward."""
        for layer, parameters in zip(layers, self._images.parameters, strict=True):
            if not hasattr(layer, "comfy_cast_weights") or parameters.get("weight") is None:
                continue
            if not has_functions(layer) and layer.weight.device == device:
                continue
            weight, bias = _dtypes_shown(layer, self._dtype)
            found = comfy.ops.cast_bias_weight(layer, None, weight, device, bias)
            put(parameters, found)


def _is_noted(state: dict[str, Any], weights: tuple[Any, Any]) -> bool:
    """Return True if the host notes these very objects on a layer: its weight and bias while they are on the device."""
    return state.get("_v_weight", state) is weights[0] and state.get("_v_bias", state) is weights[1]


def _computes_with_more_bits(layer: Any) -> bool:
    """Return True if the host keeps 8 bits of a layer's weight, adds a LoRA to it, and computes in the model's dtype.

    Of what dtype the file's weight is says nothing: the loader's weight_dtype makes 8 bits of it on the device.
    """
    if not is_patched(layer) or isinstance(layer.weight, comfy.ops.QuantizedTensor):
        return False
    kept = stored_dtype(layer, "weight")
    return kept is not None and kept.itemsize == 1


def _is_rounded_next(layer: Any) -> bool:
    """Return True if the host computes with more bits of a layer's weight now than it keeps for the next call."""
    if not _computes_with_more_bits(layer):
        return False
    return not layer._prefetch["resident"] and layer._prefetch["signature"] is not None


def _is_computed_unrounded(layer: Any) -> bool:
    """Return True if the host computes with a quantised weight and a LoRA in full, as it brings them.

    So do layers that do not quantise what they multiply by it, as on cards that have no products of 8 bits. An image
    would have the sum rounded, as other layers have.
    """
    if not (is_patched(layer) and isinstance(layer.weight, comfy.ops.QuantizedTensor)):
        return False
    return bool(getattr(layer, "_full_precision_mm", False)) and not layer._prefetch["resident"]


def _dtypes_shown(layer: Any, compute_dtype: torch.dtype) -> list[torch.dtype | None]:
    """Return the dtypes of a layer's weight and bias in an image; None of one that it does not have."""
    dynamic = "_v" in vars(layer)
    weights = [getattr(layer, key, None) for key in KEYS]
    if _computes_with_more_bits(layer) if dynamic else has_functions(layer):
        return [None if weight is None else compute_dtype for weight in weights]
    if dynamic:
        return [stored_dtype(layer, key) for key in KEYS]
    return [None if weight is None else weight.dtype for weight in weights]


def formats_of(module: torch.nn.Module, compute_dtype: torch.dtype) -> list[Any]:
    """Return what is to be equal of weights that one image shows one after the other, of modules of one structure.

    A file may keep some blocks in more bits than others. An image that showed both would have graphs of either refused.

    Args:
        compute_dtype: what the model computes in.
    """
    kinds, found = weight_formats(), list[Any]()
    for layer in module.modules():
        shown = dict(zip(KEYS, _dtypes_shown(layer, compute_dtype), strict=True)) if layer._parameters else {}
        for name, weight in layer._parameters.items():
            form = format_of(weight, kinds)
            dtype = None if weight is None else shown.get(name, weight.dtype)
            found.append(
                (dtype, getattr(weight, "shape", ()) if form is None else (type(weight), form.context(weight)))
            )
    return found


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
