"""Tensors shared between torch and OneFlow, without copies."""

from __future__ import annotations

from typing import Any

import oneflow as flow
import oneflow.utils.tensor
import torch

# DLPack in OneFlow 0.9 knows neither: bool goes over as the same memory read as bytes, int16 as a wider copy.
_CARRIED_AS = {torch.bool: torch.uint8, torch.int16: torch.int32}


def carried_as(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which tensors of ``dtype`` go over."""
    return _CARRIED_AS.get(dtype, dtype)


def is_shareable(tensor: torch.Tensor) -> bool:
    """Whether OneFlow can read the tensor where it is: contiguous, and of a dtype that goes over as it is."""
    return tensor.is_contiguous() and carried_as(tensor.dtype) == tensor.dtype


def handed_over(tensor: torch.Tensor) -> torch.Tensor:
    """A torch tensor as OneFlow can take it: the same memory where that is possible, else a copy.

    Never a tensor with gaps: OneFlow makes such inputs contiguous in place, which would rewrite torch's memory.
    """
    tensor = tensor.detach().contiguous()
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor.to(carried_as(tensor.dtype))


def shared(tensor: torch.Tensor) -> Any:
    """A OneFlow tensor on the memory of ``tensor``, which ``handed_over`` gave and which it keeps alive."""
    view = oneflow.utils.tensor.from_torch(tensor)
    if not view.is_contiguous():  # the two may differ about the strides of axes of one
        view = oneflow.utils.tensor.from_torch(tensor.clone(memory_format=torch.contiguous_format))
    return view


def borrowed(tensor: torch.Tensor) -> Any:
    """As ``shared``, without keeping the memory alive: who uses it makes sure that it still is ``tensor``'s."""
    size = tensor.numel() * tensor.element_size()
    with torch.inference_mode(False):
        storage = torch._C._construct_storage_from_data_pointer(tensor.data_ptr(), tensor.device, size)
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        alias.set_(storage, 0, tensor.shape, torch.empty(tensor.shape, device="meta").stride())
    return oneflow.utils.tensor.from_torch(alias)


def taken_back(tensor: Any, dtype: torch.dtype) -> torch.Tensor:
    """A copy in torch of a OneFlow tensor that is computed; ``dtype`` is torch's name for what it holds."""
    value = oneflow.utils.tensor.to_torch(tensor).clone()
    return value.view(torch.bool) if dtype == torch.bool else value.to(dtype)


def as_bytes(tensor: Any) -> Any:
    """A bool tensor in a form that DLPack carries; any other as it is."""
    return tensor.to(flow.uint8) if tensor.dtype == flow.bool else tensor
