"""A module in Dynamic VRAM whose weights are all on the device, served from the memory that the host keeps them in.

The host gives each model a range of addresses, and brings what layers need into pages of it. An address stays a
weight's own, whatever comes and goes behind it. So while all pages are pinned, a graph takes the weights from there,
and what was recorded over these addresses can be replayed. Nothing is loaded a second time.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import comfy.model_management as memory
import comfy.ops
import torch

from ...capture.call import NotCovered
from ...capture.target.held_objects import same_content
from ...messages import message
from ..compatibility import PINS_WEIGHTS
from ..process.host_compiler import unplanned
from ..process.memory_pressure import evictable_before, held_weights, kept_by_host
from .layer_images import (
    KEYS,
    NOTES,
    LayerImages,
    SeenLayers,
    dtype_in_place,
    has_functions,
    is_patched,
    put,
    stored_dtype,
)
from .residency import give_up, is_moved
from .small_weights import PLAIN, Place, SmallWeights

_VBAR = "comfy_aimdo.model_vbar"
# Of what is noted, what may have come of other weights. A name is noted anew in each run, and there are no functions.
_NOTED = NOTES - {"seed_key", *(f"{key}_function" for key in KEYS)}


@functools.cache
def can_pin() -> bool:
    """Return True if this host has what pins weights in Dynamic VRAM, as we call it."""
    return all(use.problem() is None for use in PINS_WEIGHTS)


class PinnedModule:
    """Shows an image of a module in Dynamic VRAM while all of its weights are on the device, pinned there.

    Args:
        module: one of the host's, or a part of one.
        compute_dtype: what it computes in.

    Attributes:
        is_changed: whether the host has added a LoRA to the weights that the image shows.
        is_first: whether no call has ended yet for which all weights were on the device.
    """

    def __init__(self, module: torch.nn.Module, compute_dtype: torch.dtype) -> None:
        self.is_changed, self.is_first = False, True
        self._dtype = compute_dtype
        self._layers = tuple(module.modules())
        self._children = [dict(layer._modules) for layer in self._layers]  # one may be in several places
        self._images = LayerImages(module)
        self._small = SmallWeights()
        self._signature: bytes | None = None  # of the pages with all weights in them
        self._seen: SeenLayers | None = None
        self._held: list[Any] = []  # weights, hooks, and notes of these and of pages, when they were shown
        self._small_at: list[int] = []  # where in ``_held`` those are that ``_small`` copies
        self._pages: _Pages | None = None  # where the weights are, by the last look; None if they cannot be pinned

    def is_of(self, module: torch.nn.Module) -> bool:
        """Return True if it is an image of ``module``, with the layers that it has now, in their places."""
        children = (layer._modules for layer in self._layers)
        return self._layers[0] is module and all(map(same_content, children, self._children))

    def fits(self, device: torch.device, room: float) -> bool:
        """Return True if all weights could be on ``device`` now, as far as the last look at the layers goes.

        Args:
            room: see ``in_place``.
        """
        # To try is to have the host take pages away that are there. So memory is asked for before.
        return self._pages is not None and self._pages.have_room(device, room)

    @contextlib.contextmanager
    def in_place(self, device: torch.device, room: float) -> Iterator[torch.nn.Module | None]:
        """Yield the image, with all weights on ``device`` until the context ends.

        Yield None if they do not all fit, or if layers make other weights of them in each call.

        Args:
            room: bytes that are to be left beside the weights, or can be taken from other models.

        Raises:
            NotCovered: the host has to run this call by itself; see ``_bring``.
        """
        pages = self._pages = None if self._change_weights() or self._has_moved(device) else _Pages.of(self._layers)
        fits = self.fits(device, room)
        as_shown = fits and self.is_as_shown()
        signature = pages.pin() if pages is not None and fits else None
        if pages is None or signature is None:
            yield None
            return
        try:
            # Pages that are pinned cannot make way. Where comfy-aimdo finds too little memory meanwhile, by a look at
            # the device that may be two seconds old, it would take all of them back once they are let go.
            with held_weights().of([pages.vbar]):
                if signature != self._signature or not as_shown:
                    self._show_as_they_are(signature, device)
                self._small.refresh()
                yield self._images.root
        finally:
            self.is_first = False
            self._images.put_back(self._layers)
            pages.unpin()

    def _show_as_they_are(self, signature: bytes, device: torch.device) -> None:
        """Show the layers as they are now, with all weights in the pages of ``signature``."""
        with unplanned():
            self._bring(device)
            self._show(device)
        self._signature, self._held = signature, self._held_now()
        self.is_changed = any(map(is_patched, self._layers))

    def is_as_shown(self) -> bool:
        """Return True if the layers, their weights and hooks, and what the host notes of these are the very same.

        Small weights may be others: the host loads them anew for each run, as objects that are alike. From now on they
        are copied from those.
        """
        now, seen = self._held_now(), self._seen
        if len(now) != len(self._held) or seen is None or seen.shown is not self._images.look or not seen.are_same():
            return False
        if all(map(operator.is_, now, self._held)):
            return True
        small, pairs = set(self._small_at), enumerate(zip(now, self._held, strict=True))
        if any(new is not old and at not in small for at, (new, old) in pairs):
            return False
        if not self._small.renew([now[at] for at in self._small_at]):
            return False
        self._held = now
        return True

    def _held_now(self) -> list[Any]:
        """Return what the layers hold, weights first, and what is noted on them."""
        states = list(map(vars, self._layers))
        found = list(itertools.chain.from_iterable(state["_parameters"].values() for state in states))
        for state in states:
            found += state["_buffers"].values()
            found += state["_forward_hooks"].values()
            found += state["_forward_pre_hooks"].values()
            found += map(state.get, _NOTED)
        return found

    def _change_weights(self) -> bool:
        """Return True if layers change their weights while they run. Others may append to these lists at any time."""
        return any(map(has_functions, self._layers))

    def _has_moved(self, device: torch.device) -> bool:
        return any("_v" in vars(layer) and is_moved(layer, device) for layer in self._layers)

    def _bring(self, device: torch.device) -> None:
        """Have the host bring each layer's weights, as it does when the layer runs.

        A LoRA on weights of few bits is left to the host's own forward: in the call in which it is added, layers
        compute with more bits than are kept.

        Raises:
            NotCovered: there are such weights, and the next call finds them in place.
        """
        for layer in self._layers:
            if "_v" not in vars(layer):
                continue
            if _is_changed_when_brought(layer):
                raise NotCovered(message("a LoRA is added to 8-bit weights while they are brought to the device"))
            weight, bias = (stored_dtype(layer, key) for key in KEYS)
            try:
                brought = comfy.ops.cast_bias_weight(layer, None, weight, device, bias, True, self._dtype)
            except BaseException:
                if "_prefetch" in vars(layer):
                    give_up(layer, [layer], device)
                raise
            comfy.ops.uncast_bias_weight(layer, *brought)

    def _show(self, device: torch.device) -> None:
        look = self._images.show(self._layers)
        small: list[Place] = []
        at, self._small_at = itertools.count(), []
        for layer, weights in zip(self._layers, self._images.parameters, strict=True):
            theirs = vars(layer)
            if "_v" in theirs:
                put(weights, (theirs["_v_weight"], theirs["_v_bias"]))
            kept = KEYS if "_v" in theirs else ()
            for name, number in zip(weights, at):  # noqa: B905 - at goes on
                if name not in kept and type(weights[name]) in PLAIN:
                    small.append(Place(weights, name, dtype_in_place(layer, name), device))
                    self._small_at.append(number)
        self._small.stand_in(small)
        self._seen = SeenLayers(self._layers, look)


class _Pages(NamedTuple):
    """A range of addresses in Dynamic VRAM.

    Attributes:
        vbar: whose it is, an object of comfy-aimdo's.
        start: its first address.
        size: in bytes.
    """

    vbar: Any
    start: int
    size: int

    @classmethod
    def of(cls, layers: Sequence[torch.nn.Module]) -> _Pages | None:
        """Return the range in which layers have their weights; None if there is not just one."""
        ranges = [state["_v"] for state in map(vars, layers) if "_v" in state]
        vbars = {id(vbar) for vbar, _, _ in ranges}
        if len(vbars) != 1:
            return None
        start = min(start for _, start, _ in ranges)
        return cls(ranges[0][0], start, max(first + size for _, first, size in ranges) - start)

    def have_room(self, device: torch.device, beside: float) -> bool:
        """Return True if all pages can be on their device, with so many bytes beside them, taken from others there too.

        Then PyTorch gives back what it keeps, if hardly anything else is free: to comfy-aimdo that is not free, and it
        would take pages back. To give it back is to wait for the device, so a model that does not fit keeps it.
        """
        free, kept = memory.get_free_memory(device, torch_free_too=True)
        if free + evictable_before(self.vbar) - self._missing() < beside:
            return False
        if kept and free - kept < kept_by_host():
            memory.soft_empty_cache()
        return True

    def _missing(self) -> int:
        """Return how many bytes at least are not on the device. Of a page that is shared, others' bytes count, too."""
        return max(0, self.size - int(self.vbar.loaded_size()))

    def pin(self) -> bytes | None:
        """Have all pages on the device until ``unpin``. Return None if there is no room for all.

        Else return which they are: of a page that went and came back, empty, another number.
        """
        signature = _vbar().vbar_fault(self)
        return None if signature is None else bytes(signature)

    def unpin(self) -> None:
        """Let the host take the pages away again."""
        _vbar().vbar_unpin(self)


def _is_changed_when_brought(layer: Any) -> bool:
    """Return True if a layer's weight of few bits is not there, and a LoRA is added to it as it comes."""
    weight = stored_dtype(layer, "weight")
    few_bits = isinstance(layer.weight, comfy.ops.QuantizedTensor) or (weight is not None and weight.itemsize == 1)
    if not (few_bits and is_patched(layer)):
        return False
    vbar = _vbar()
    signature = vbar.vbar_fault(layer._v)
    there = vbar.vbar_signature_compare(signature, layer._v_signature)
    if signature is not None:
        vbar.vbar_unpin(layer._v)
    return not there


@functools.cache
def _vbar() -> Any:
    return importlib.import_module(_VBAR)
