"""Tensors over buffers to which the host copies layers' weights in Dynamic VRAM, for one call each.

To make them takes longer than all else that is done for a layer. A buffer is filled again and again, with weights of
one block after the other. Tensors over the same bytes are equal if the weights there have the same form, whichever
block they are of. So what was made in a run for one call is shown in others.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ...capture.target.tensor_parts import format_of
from .layer_images import KEYS
from .quantised import weight_formats

_MOST = 128  # of a kind of block: it has some ten layers, the host some two buffers, with others before it in them


class Copy(NamedTuple):
    """A layer's weights as the host has copied them to a buffer: all that tensors over it are made by.

    Attributes:
        buffer: the bytes.
        layer: whose weights they are.
        objects: its weight and bias in RAM, and what these hold, as the parts of a quantised one.
        looks: dtypes and shapes of those that are tensors.
    """

    buffer: torch.Tensor
    layer: torch.nn.Module
    objects: list[Any]
    looks: list[Any]

    @classmethod
    def of(cls, layer: torch.nn.Module) -> Copy | None:
        """Return what the host has copied to a buffer as it is in RAM, for one call; None where it has not."""
        if not is_in_no_page(layer):
            return None
        brought = vars(layer)["_prefetch"]
        buffer = None if brought.get("needs_cast", True) else brought.get("xfer_dest")
        if buffer is None:
            return None
        objects = [layer._parameters.get(key) for key in KEYS]
        for weight in objects[:]:
            if weight is not None:
                objects += vars(weight).values()
        looks = [(each.dtype, each.shape) for each in objects if isinstance(each, torch.Tensor)]
        return cls(buffer, layer, objects, looks)

    def is_like(self, other: Copy) -> bool:
        """Return True if both are of the very same objects, which look as they did."""
        same = len(self.objects) == len(other.objects) and all(map(operator.is_, self.objects, other.objects))
        return same and self.looks == other.looks


def is_in_no_page(layer: torch.nn.Module) -> bool:
    """Return True if the host has brought a layer's weights in Dynamic VRAM to where nothing of them stays."""
    brought = vars(layer).get("_prefetch")
    return brought is not None and brought["signature"] is None


class _Made(NamedTuple):
    """Tensors over a buffer.

    Attributes:
        form: of the weights there; see ``BufferedWeights._form_of``.
        tensors: by name. They hold none of its memory.
    """

    form: Any
    tensors: dict[str, Any]


class BufferedWeights:
    """What was made in a run of weights of layers of modules of one kind.

    Args:
        dtypes_shown: returns in which dtypes a layer's weight and bias are to be.
    """

    def __init__(self, dtypes_shown: Callable[[Any], Any]) -> None:
        self._dtypes_shown, self._kinds = dtypes_shown, weight_formats()
        self._run: int | None = None
        self._made: dict[tuple[int, int], _Made] = {}  # by a layer's number and an address
        self._looked_at: dict[torch.nn.Module, tuple[Copy, Any]] = {}  # copies and their forms

    def begin_run(self, run: int) -> None:
        """Forget what is of another run than that with this number."""
        if run != self._run:
            self._run = run
            self._made.clear()
            self._looked_at.clear()

    def made(self, number: int, copy: Copy) -> dict[str, Any] | None:
        """Return tensors over a copy by their names; None if there are none yet.

        Args:
            number: of the layer, in a module of the kind.
        """
        made = self._made.get((number, copy.buffer.data_ptr()))
        return None if made is None or made.form != self._form_of(copy) else made.tensors

    def keep(self, number: int, copy: Copy, weights: Sequence[Any], tensors: dict[str, Any]) -> bool:
        """Keep what was made of a copy: its weight and bias, and the tensors that show them. False if it is no use."""
        if not self._are_in(weights, copy.buffer):
            return False
        if len(self._made) >= _MOST:
            self._made.clear()
        self._made[number, copy.buffer.data_ptr()] = _Made(self._form_of(copy), tensors)
        return True

    def _form_of(self, copy: Copy) -> Any:
        """Return all that decides what tensors over a copy are like, wherever in memory it is.

        It is looked at once in a run, while the layer has the same objects.
        """
        known = self._looked_at.get(copy.layer)
        if known is not None and copy.is_like(known[0]):
            return known[1]
        weights = [copy.layer._parameters.get(key) for key in KEYS]
        formats = [format_of(weight, self._kinds) for weight in weights]
        parts = [
            None if form is None else (form.context(weight), [(part.dtype, part.shape) for part in form.parts(weight)])
            for weight, form in zip(weights, formats, strict=True)
        ]
        found = list(map(type, weights)), copy.looks, parts, self._dtypes_shown(copy.layer)
        self._looked_at[copy.layer] = copy, found
        return found

    def _are_in(self, weights: Sequence[Any], buffer: torch.Tensor) -> bool:
        """Return True if weights are tensors over a buffer's bytes, and hold none of its memory.

        Those that the host has converted are not. Tensors over memory that PyTorch has allocated hold it, and only of
        that it can resize a storage.
        """
        if buffer.untyped_storage().resizable():
            return False
        bytes_of = range(buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes)
        there = [(weight, format_of(weight, self._kinds)) for weight in weights if weight is not None]
        parts = [[weight] if form is None else form.parts(weight) for weight, form in there]
        return all(part.data_ptr() in bytes_of for part in itertools.chain.from_iterable(parts))
