"""Tensors shared between torch and OneFlow, without copies."""

from __future__ import annotations

from typing import Any

import oneflow as flow
import oneflow.utils.tensor
import torch

# What DLPack carries neither way in OneFlow 0.9, and what is handed over in its place.
_AS_BYTES = torch.bool  # the same memory, seen as uint8
_WIDENED = {torch.int16: torch.int32}


def handed_over(tensor: torch.Tensor) -> torch.Tensor:
    """A torch tensor as OneFlow can take it: contiguous and of a dtype that it knows.

    The same memory where it is so already, else a copy: OneFlow makes its inputs contiguous in place, which
    through shared memory would rewrite torch's.
    """
    tensor = tensor.detach()
    if tensor.dtype == _AS_BYTES:
        tensor = tensor.contiguous().view(torch.uint8)
    return tensor.to(_WIDENED.get(tensor.dtype, tensor.dtype)).contiguous()


def shared(tensor: torch.Tensor) -> Any:
    """A OneFlow tensor on the memory of ``tensor``, which ``handed_over`` gave and which it keeps alive."""
    view = oneflow.utils.tensor.from_torch(tensor)
    if not view.is_contiguous():  # torch and OneFlow differ about strides of axes of one
        view = oneflow.utils.tensor.from_torch(tensor.clone(memory_format=torch.contiguous_format))
    return view


def borrowed(tensor: torch.Tensor) -> Any:
    """As ``shared``, without keeping the memory alive: who uses it makes sure that it still is ``tensor``'s."""
    size = tensor.numel() * tensor.element_size()
    with torch.inference_mode(False):
        storage = torch._C._construct_storage_from_data_pointer(tensor.data_ptr(), tensor.device, size)
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        alias.set_(storage, 0, tensor.shape, tensor.stride())
    return shared(alias)


def taken_back(tensor: Any, dtype: torch.dtype) -> torch.Tensor:
    """A copy in torch of a OneFlow tensor that is computed; ``dtype`` is torch's name for what it holds."""
    value = oneflow.utils.tensor.to_torch(tensor).clone()
    return value.view(torch.bool) if dtype == torch.bool else value.to(dtype)


def as_bytes(tensor: Any) -> Any:
    """A bool tensor in a form that DLPack carries; any other as it is."""
    return tensor.to(flow.uint8) if tensor.dtype == flow.bool else tensor
