"""A module without its weights, as bytes: what another process needs to capture it.

Weights are gigabytes and a capture looks at none of their values. So each is replaced by its shape,
strides and dtype; what comes back has the same classes, attributes and fingerprint, with weights that
are all views of one small buffer. Of a weight that is several tensors, each of them is replaced. What the host notes on
a module for itself may be of this process alone, and is left behind.
"""

from __future__ import annotations

import importlib
import io
import pickle
import sys
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..capture.target.tensor_parts import PLAIN, WeightFormat, format_of

_WEIGHT, _WHOLE, _CLASS, _FUNCTION, _NOTE = "weight", "whole", "class", "function", "note"
_PLAIN = frozenset((bool, int, float, str, type(None)))


class Unpicklable(Exception):
    """The module holds something that another process cannot have."""


@dataclass(frozen=True)
class LayerFactory:
    """A function that makes classes of layers, other ones each time: no name leads to them.

    Attributes:
        made: the class that holds a class of layers, or is asked for itself, and what the function was given when it
            made them, plain values; None of other classes.
        make: the function. Returns such a holder.
    """

    made: Callable[[type], tuple[type, tuple[Any, ...]] | None] = lambda _kind: None
    make: Callable[..., type] = type


NO_FACTORY = LayerFactory()


def to_bytes(
    module: torch.nn.Module,
    formats: Sequence[WeightFormat] = (),
    factory: LayerFactory = NO_FACTORY,
    notes: Collection[str] = (),
) -> bytes:
    """Pickle ``module`` without the values of its parameters and buffers.

    Args:
        module: to be captured elsewhere.
        formats: the ways in which one of its weights may be several tensors.
        factory: of classes of its layers.
        notes: names of attributes that are None there, unless they are plain values.

    Raises:
        Unpicklable: says what is in the way.
    """
    weights: dict[int, int] = {}
    for layer in module.modules():
        for holder in (layer._parameters, layer._buffers):
            for tensor in holder.values():
                if tensor is not None:
                    weights.setdefault(id(tensor), len(weights))
    stream = io.BytesIO()
    training = [layer.training for layer in module.modules()]  # those of einops are built anew, and would train
    try:
        _Pickler(stream, weights, formats, factory, list(_noted(module, notes))).dump((module, training))
    except Exception as error:  # anything may be in a module, and fail in its own way
        raise Unpicklable(f"{type(error).__name__}: {error}") from error
    return stream.getvalue()


def from_bytes(
    data: bytes,
    device: torch.device,
    formats: Sequence[WeightFormat] = (),
    factory: LayerFactory = NO_FACTORY,
) -> torch.nn.Module:
    """The module that ``to_bytes`` was given with these formats, with weights of arbitrary values on ``device``.

    Runs what is in ``data``: only for bytes of our own making.
    """
    module: torch.nn.Module
    module, training = _Unpickler(io.BytesIO(data), device, formats, factory).load()
    for layer, trains in zip(module.modules(), training, strict=True):
        layer.training = trains
    return module


def _noted(module: torch.nn.Module, notes: Collection[str]) -> Iterator[object]:
    """Yield what attributes of these names hold, but for plain values, which a module has in other places, too."""
    for layer in module.modules():
        for name in vars(layer).keys() & notes:
            if type(value := vars(layer)[name]) not in _PLAIN:
                yield value


class _Pickler(pickle.Pickler):
    def __init__(
        self,
        stream: io.BytesIO,
        weights: dict[int, int],
        formats: Sequence[WeightFormat],
        factory: LayerFactory,
        noted: Sequence[object],
    ) -> None:
        super().__init__(stream)
        self._weights = weights
        self._formats, self._factory = formats, factory
        self._noted = set(map(id, noted))

    def persistent_id(self, value: Any) -> Any:
        if id(value) in self._noted:
            return _NOTE, 0, "", ()
        if type(value) is types.FunctionType:
            return _place_in_table(value)
        if isinstance(value, type):
            made = self._factory.made(value)
            return made and (_CLASS, id(made[0]), None if value is made[0] else value.__name__, made[1])
        index = self._weights.get(id(value)) if isinstance(value, torch.Tensor) else None
        if index is None:
            return None
        kind = "parameter" if isinstance(value, torch.nn.Parameter) else "buffer"
        form = format_of(value, self._formats)
        if form is not None:
            parts = zip(form.names(value), map(_metadata, form.parts(value)), strict=True)
            return _WHOLE, index, kind, (self._formats.index(form), type(value), form.context(value), tuple(parts))
        if type(value) not in PLAIN:
            raise pickle.PicklingError("its weights are of a format that is not known")
        return _WEIGHT, index, kind, (*_metadata(value), value.requires_grad)


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, stream: io.BytesIO, device: torch.device, formats: Sequence[WeightFormat], factory: LayerFactory
    ) -> None:
        super().__init__(stream)
        self._device = device
        self._formats, self._factory = formats, factory
        self._weights: dict[int, torch.Tensor] = {}
        self._buffers: dict[torch.dtype, torch.Tensor] = {}
        self._holders: dict[int, type] = {}

    def persistent_load(self, key: Any) -> Any:
        what, index, kind, description = key
        if what == _NOTE:
            return None
        if what == _FUNCTION:
            return getattr(importlib.import_module(index), kind)[description]
        if what == _CLASS:
            if index not in self._holders:
                self._holders[index] = self._factory.make(*description)
            return self._holders[index] if kind is None else getattr(self._holders[index], kind)
        if index not in self._weights:
            tensor, requires_grad = self._whole(*description) if what == _WHOLE else self._tensor(*description)
            self._weights[index] = torch.nn.Parameter(tensor, requires_grad) if kind == "parameter" else tensor
        return self._weights[index]

    def _whole(self, form: int, kind: type, context: Any, parts: Sequence[Any]) -> tuple[Any, bool]:
        tensors = {name: self._tensor(*metadata)[0] for name, metadata in parts}
        return self._formats[form].whole(kind, tensors, context), False

    def _tensor(
        self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, requires_grad: bool = False
    ) -> tuple[torch.Tensor, bool]:
        return torch.as_strided(self._buffer(dtype, shape, stride), shape, stride), requires_grad

    def _buffer(self, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
        needed = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if 0 not in shape else 0
        if dtype not in self._buffers or self._buffers[dtype].numel() < needed:
            self._buffers[dtype] = torch.zeros(max(1, needed), dtype=dtype, device=self._device)
        return self._buffers[dtype]


def _place_in_table(function: types.FunctionType) -> tuple[str, str, str, str] | None:
    """Return where a function without a name is found, as an activation is: its Python module, a dict there, a key.

    None if there is no such place, or if its name leads to it.
    """
    tables = vars(sys.modules.get(function.__module__, types)) if function.__name__ == "<lambda>" else {}
    for name, table in tables.items():
        for key, held in table.items() if type(table) is dict else ():
            if held is function and type(key) is str:
                return _FUNCTION, function.__module__, name, key
    return None


def _metadata(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype
