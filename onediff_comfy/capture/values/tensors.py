"""What there is to say about a tensor besides its class, dtype and sizes: its values, and attributes set on it."""

from __future__ import annotations

import contextlib
import hashlib
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_OF_BUFFERS = frozenset(("_is_buffer", "persistent"))  # torch.nn.Buffer notes these
_OF_DYNAMO = "_dynamo_"  # torch.compile leaves such notes of how it took a tensor; nothing but it reads them


def own_attributes(tensor: torch.Tensor) -> dict[str, object]:
    """Return the attributes that were set on a tensor, but for PyTorch's own notes: code of a model may read them."""
    return {
        name: value
        for name, value in vars(tensor).items()
        if name not in _OF_BUFFERS and not name.startswith(_OF_DYNAMO)
    }


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return the sha256 of a tensor's values (on the CPU, contiguous), for constants that belong to the code."""
    if tensor.is_meta:
        return "meta"
    data = tensor.detach().to("cpu").contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()


def has_fake(values: Iterable[Any], depth: int = 4) -> bool:
    """Return True if there is a tensor of a trace among values, or in containers and objects among them.

    Nothing of an object is called: a stand-in for an option takes whatever is asked of it for a use of the option.
    """
    for value in values:
        kind = type(value)
        if issubclass(kind, torch.Tensor):
            if issubclass(kind, FakeTensor):
                return True
        elif depth and not issubclass(kind, (types.FunctionType, types.ModuleType, type)):
            inside = _inside(value)
            if inside and has_fake(inside, depth - 1):
                return True
    return False


def _inside(value: Any) -> list[Any]:
    """Return what a container holds, or the attributes of an object."""
    for container in (list, tuple, set):
        if issubclass(type(value), container):
            return list(container.__iter__(value))
    if issubclass(type(value), dict):
        return list(dict.values(value))
    try:
        return list(object.__getattribute__(value, "__dict__").values())
    except AttributeError:
        return []


@contextlib.contextmanager
def put_back(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Put back the numbers of tensors that are written to inside."""
    restore = numbers_restorer(tensors)
    try:
        yield
    finally:
        restore()


def numbers_restorer(tensors: Iterable[torch.Tensor]) -> Callable[[], None]:
    """Return what writes the numbers of now back to tensors that were written to meanwhile."""
    before = [(tensor, tensor.detach().clone()) for tensor in tensors if not tensor.is_meta]

    def restore() -> None:
        with torch.inference_mode():
            for tensor, then in before:
                if not _have_equal_bits(tensor, then):  # one that no code can write to, as an expanded one, is equal
                    tensor.copy_(then)

    return restore


def _have_equal_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(*(each.detach().contiguous().flatten().view(torch.uint8) for each in (one, other)))
