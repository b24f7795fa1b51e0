"""What there is to say about a tensor besides its class, dtype and sizes: its values, and attributes set on it."""

from __future__ import annotations

import hashlib
import types
from collections.abc import Iterable
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
    """Return True if there is a tensor of a trace among values, or in containers and objects among them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if isinstance(value, FakeTensor):
                return True
            continue
        if depth and not isinstance(value, types.FunctionType | types.ModuleType | type):
            inside = value if isinstance(value, list | tuple | set) else getattr(value, "__dict__", value)
            if isinstance(inside, dict):
                inside = list(inside.values())
            if isinstance(inside, list | tuple | set) and has_fake(inside, depth - 1):
                return True
    return False
