"""What the operators of a captured graph do besides computing: draw random numbers, wait for values."""

from __future__ import annotations

import torch

from .opaque_function import call_option

_KNOWN_LIBRARIES = ("aten", "prims", "onediff_comfy")

_aten = torch.ops.aten

# No tag of PyTorch's says it of these. Found by recording PyTorch's samples of all its operators on a GPU
# (benchmarks/recordable_operators.py); a test holds both together.
_WAITING = frozenset(
    (
        *("_linalg_check_errors", "_linalg_eigh", "cholesky", "inverse", "linalg_cholesky", "linalg_eig"),
        *("linalg_eigh", "linalg_eigvals", "linalg_eigvalsh", "linalg_inv", "linalg_ldl_factor"),
        *("linalg_ldl_factor_ex", "linalg_ldl_solve", "linalg_lstsq", "linalg_lu", "linalg_lu_factor"),
        *("linalg_lu_factor_ex", "linalg_matrix_power", "linalg_pinv", "linalg_solve", "linalg_tensorinv"),
        *("linalg_tensorsolve", "matrix_power", "pinverse", "_to_sparse", "segment_reduce", "to_sparse"),
    )
)
_WAITING_UNLESS_FUSED = (
    *(_aten.index_fill.int_Tensor, _aten.masked_fill.Tensor),  # the value is a tensor
    *(_aten.isin.Tensor_Tensor, _aten.isin.Scalar_Tensor),
    *(getattr(_aten.linspace, kinds) for kinds in ("Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor")),
    *(getattr(_aten.logspace, kinds) for kinds in ("Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor")),
)


def foreign_operators(graph: torch.fx.GraphModule) -> frozenset[str]:
    """Return the operators in a capture's graph, ``library::operator``, that are neither PyTorch's nor our own."""
    operators = (node.target for node in graph.graph.nodes)
    return frozenset(
        operator._schema.name
        for operator in operators
        if isinstance(operator, torch._ops.OpOverload) and operator.namespace not in _KNOWN_LIBRARIES
    )


def draws_random_numbers(node: torch.fx.Node) -> bool:
    """Return True if an operator draws random numbers. Dropout, also in attention, is off outside of training."""
    operator = node.target
    if not isinstance(operator, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    return not any(part in operator.name() for part in ("dropout", "attention"))


def calls_option(node: torch.fx.Node) -> bool:
    """Return True if an operator calls a function of the options, of which nobody knows what it does."""
    return node.target is call_option()


def waits_for_values(node: torch.fx.Node) -> bool:
    """Return True if an operator waits for the device: it goes by its arguments' values, or a library of CUDA's does.

    So only the values tell its result's size or a number that it gives; or it checks them, as an inverse does.
    """
    operator = node.target
    if not isinstance(operator, torch._ops.OpOverload):
        return False
    if operator is _aten.index.Tensor:
        return _by_mask(node)
    if operator is _aten.index_put.default:  # compilers make a masked fill of it where they can
        return _by_mask(node) and not _is_one_number(node.args[2])
    if operator is _aten.repeat_interleave.Tensor and node.kwargs.get("output_size") is not None:
        return False
    tagged = not {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}.isdisjoint(operator.tags)
    return tagged or _packet(operator) in _WAITING


def waits_unless_fused(node: torch.fx.Node) -> bool:
    """Return True if PyTorch's own kernel of an operator waits for the device, and a compiler's does not."""
    operator = node.target
    if not isinstance(operator, torch._ops.OpOverload):
        return False
    return operator in _WAITING_UNLESS_FUSED or (operator is _aten.index_put.default and _by_mask(node))


def _packet(operator: torch._ops.OpOverload) -> str:
    """Return an operator's name without its overload: ``linalg_inv`` of ``aten.linalg_inv.default``."""
    return operator._schema.name.partition("::")[2]


def _by_mask(node: torch.fx.Node) -> bool:
    """Return True if an operator takes elements by a mask, and not by positions."""
    indices = [index.meta["val"] for index in node.args[1] if index is not None]  # type: ignore[union-attr]
    return any(index.dtype in (torch.bool, torch.uint8) for index in indices)


def _is_one_number(argument: object) -> bool:
    return isinstance(argument, torch.fx.Node) and argument.meta["val"].ndim == 0
