"""The table's parts: how a lowering is entered, and torch's dtypes and devices as OneFlow's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import oneflow as flow
import torch

Lowering = Callable[..., Any]
"""Takes an operator's arguments, tensors being OneFlow's; returns its result as OneFlow tensors.

The result's shape must be torch's. Its dtype is mended by the caller, who knows torch's.
"""

DTYPES = {
    torch.float32: flow.float32,
    torch.float16: flow.float16,
    torch.bfloat16: flow.bfloat16,
    torch.float64: flow.float64,
    torch.int64: flow.int64,
    torch.int32: flow.int32,
    torch.int8: flow.int8,
    torch.uint8: flow.uint8,
    torch.bool: flow.bool,
}
"""What OneFlow can compute in. Neither complex numbers nor int16 nor float8 are among them."""


class Table(dict[Any, Lowering]):
    """Lowerings of one family of operators, by ATen overload; by name where a library of the host's declares it."""

    def lowers(self, *operators: Any) -> Callable[[Lowering], Lowering]:
        """Decorator: the function lowers these operators."""

        def enter(function: Lowering) -> Lowering:
            for operator in operators:
                assert operator not in self, operator
                self[operator] = function
            return function

        return enter


def dtype_of(dtype: torch.dtype | None, default: torch.dtype = torch.float32) -> Any:
    """OneFlow's dtype for torch's; ``default`` (torch's own default for tensors of numbers) for None."""
    return DTYPES[default if dtype is None else dtype]


def device_of(device: torch.device | str | None) -> Any:
    """OneFlow's device for torch's; an unnamed CUDA device is the current one."""
    device = torch.device(device or "cpu")
    if device.type != "cuda":
        return flow.device(device.type)
    return flow.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def axis(number: int, tensor: Any) -> int:
    """A possibly negative axis as a number from 0."""
    return number % max(tensor.ndim, 1)
