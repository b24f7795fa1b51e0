"""What there is to say about a tensor besides its class, dtype and sizes: its values, and attributes set on it."""

from __future__ import annotations

import hashlib

import torch

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
