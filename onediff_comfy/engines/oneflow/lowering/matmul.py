"""Matrix products."""

from __future__ import annotations

from typing import Any

import oneflow as flow
import torch

from .table import Table

aten = torch.ops.aten
TABLE = Table()


@TABLE.lowers(aten.mm.default, aten.bmm.default, aten.matmul.default)
def matmul(a: Any, b: Any) -> Any:
    return flow.matmul(a, b)


@TABLE.lowers(aten.linear.default)
def linear(x: Any, weight: Any, bias: Any = None) -> Any:
    product = flow._C.matmul(x, weight, False, True, 1.0)  # the weight is read transposed, not transposed
    return product if bias is None else flow._C.bias_add(product, bias, product.ndim - 1)


@TABLE.lowers(aten.addmm.default)
def addmm(bias: Any, a: Any, b: Any, beta: float = 1, alpha: float = 1) -> Any:
    product = flow.matmul(a, b)
    return (product if alpha == 1 else product * alpha) + (bias if beta == 1 else bias * beta)


@TABLE.lowers(aten.baddbmm.default)
def baddbmm(bias: Any, a: Any, b: Any, beta: float = 1, alpha: float = 1) -> Any:
    product = flow._C.batch_matmul(a, b, False, False, float(alpha))
    return product if beta == 0 else product + (bias if beta == 1 else bias * beta)


@TABLE.lowers(aten.einsum.default)
def einsum(equation: str, operands: Any, path: Any = None) -> Any:
    return flow.einsum(equation, *operands)


@TABLE.lowers(aten.outer.default)
def outer(a: Any, b: Any) -> Any:
    return flow.reshape(a, (-1, 1)) * flow.reshape(b, (1, -1))
