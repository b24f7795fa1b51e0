"""comfy-kitchen's operators for rotary position embeddings, in the form that a compiler fuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...capture.rewrites.op_substitutions import Forms
from ...capture.rewrites.rotary import normalise, rotate_halves, rotate_neighbours, rotates_plainly

Rotate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def fused_rotations(operators: Any) -> Forms:
    """Return what is traced in the place of the library's operators, as far as this version of it has them.

    Args:
        operators: ``torch.ops.comfy_kitchen``.
    """
    made: dict[str, Callable[[Any], Callable[..., Any]]] = {
        "apply_rope": lambda operator: _pair(operator, rotate_neighbours),
        "apply_rope1": lambda operator: _one(operator, rotate_neighbours),
        "apply_rope_split_half": lambda operator: _pair(operator, rotate_halves),
        "apply_rope_split_half1": lambda operator: _one(operator, rotate_halves),
        "rms_rope": lambda operator: _pair_after_norm(operator, rotate_neighbours),
        "rms_rope1": lambda operator: _one_after_norm(operator, rotate_neighbours),
        "rms_rope_split_half": lambda operator: _pair_after_norm(operator, rotate_halves),
        "rms_rope_split_half1": lambda operator: _one_after_norm(operator, rotate_halves),
    }
    forms: dict[Any, Any] = {}
    for name, make in made.items():
        operator = getattr(operators, name, None)
        if operator is not None:
            forms[operator] = forms[operator.default] = make(operator.default)
    return forms


# What is not plain (rotations for more tokens than there are, or for a part of each row) stays the library's.


def _one(operator: Any, rotate: Rotate) -> Callable[..., Any]:
    def called(x: torch.Tensor, freqs_cis: torch.Tensor) -> Any:
        return rotate(x, freqs_cis) if rotates_plainly(x, freqs_cis) else operator(x, freqs_cis)

    return called


def _pair(operator: Any, rotate: Rotate) -> Callable[..., Any]:
    def called(xq: torch.Tensor, xk: torch.Tensor, freqs_cis: torch.Tensor) -> Any:
        if rotates_plainly(xq, freqs_cis) and rotates_plainly(xk, freqs_cis):
            return rotate(xq, freqs_cis), rotate(xk, freqs_cis)
        return operator(xq, xk, freqs_cis)

    return called


def _one_after_norm(operator: Any, rotate: Rotate) -> Callable[..., Any]:
    def called(x: torch.Tensor, freqs_cis: torch.Tensor, scale: torch.Tensor, epsilon: float = 1e-6) -> Any:
        if rotates_plainly(x, freqs_cis):
            return rotate(normalise(x, scale, epsilon), freqs_cis)
        return operator(x, freqs_cis, scale, epsilon)

    return called


def _pair_after_norm(operator: Any, rotate: Rotate) -> Callable[..., Any]:
    def called(
        q: torch.Tensor,
        k: torch.Tensor,
        freqs_cis: torch.Tensor,
        q_scale: torch.Tensor,
        k_scale: torch.Tensor | None = None,
        epsilon: float = 1e-6,
        rot_dim: int = 0,
    ) -> Any:
        of_keys = q_scale if k_scale is None else k_scale
        whole_rows = rot_dim in (0, q.shape[-1])
        if whole_rows and rotates_plainly(q, freqs_cis) and rotates_plainly(k, freqs_cis):
            return (
                rotate(normalise(q, q_scale, epsilon), freqs_cis),
                rotate(normalise(k, of_keys, epsilon), freqs_cis),
            )
        return operator(q, k, freqs_cis, q_scale, k_scale, epsilon, *([rot_dim] if rot_dim else []))

    return called
