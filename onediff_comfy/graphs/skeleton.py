"""A module without its weights, as bytes: what another process needs to capture it.

Weights are gigabytes and a capture looks at none of their values. So each is replaced by its shape,
strides and dtype; what comes back has the same classes, attributes and fingerprint, with weights that
are all views of one small buffer.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

_WEIGHT = "weight"


class Unpicklable(Exception):
    """The module holds something that another process cannot have."""


def to_bytes(module: torch.nn.Module) -> bytes:
    """Pickle ``module`` without the values of its parameters and buffers.

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
    try:
        _Pickler(stream, weights).dump(module)
    except Exception as error:  # anything may be in a module, and fail in its own way
        raise Unpicklable(f"{type(error).__name__}: {error}") from error
    return stream.getvalue()


def from_bytes(data: bytes, device: torch.device) -> torch.nn.Module:
    """The module that ``to_bytes`` was given, with weights of arbitrary values on ``device``.

    Runs what is in ``data``: only for bytes of our own making.
    """
    module: torch.nn.Module = _Unpickler(io.BytesIO(data), device).load()
    return module


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, weights: dict[int, int]) -> None:
        super().__init__(stream)
        self._weights = weights

    def persistent_id(self, value: Any) -> Any:
        index = self._weights.get(id(value)) if isinstance(value, torch.Tensor) else None
        if index is None:
            return None
        if type(value) not in (torch.nn.Parameter, torch.Tensor, torch.nn.Buffer):
            raise pickle.PicklingError(f"weights are {type(value).__qualname__}s")
        kind = "parameter" if isinstance(value, torch.nn.Parameter) else "buffer"
        return _WEIGHT, index, kind, tuple(value.shape), tuple(value.stride()), value.dtype, value.requires_grad


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, device: torch.device) -> None:
        super().__init__(stream)
        self._device = device
        self._weights: dict[int, torch.Tensor] = {}
        self._buffers: dict[torch.dtype, torch.Tensor] = {}

    def persistent_load(self, key: Any) -> Any:
        _, index, kind, shape, stride, dtype, requires_grad = key
        if index not in self._weights:
            tensor = torch.as_strided(self._buffer(dtype, shape, stride), shape, stride)
            self._weights[index] = torch.nn.Parameter(tensor, requires_grad) if kind == "parameter" else tensor
        return self._weights[index]

    def _buffer(self, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
        needed = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if 0 not in shape else 0
        if dtype not in self._buffers or self._buffers[dtype].numel() < needed:
            self._buffers[dtype] = torch.zeros(max(1, needed), dtype=dtype, device=self._device)
        return self._buffers[dtype]
