"""Attention, and the rotation of its queries and keys by their positions."""

from __future__ import annotations

from typing import Any

import oneflow as flow
import torch

from .table import Table

aten = torch.ops.aten
TABLE = Table()


@TABLE.lowers(aten.scaled_dot_product_attention.default)
def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Decomposed: [..., tokens, features] each; the scores of all pairs are in memory at once."""
    if dropout_p or enable_gqa:
        raise NotImplementedError("attention with dropout or with fewer heads of keys than of queries")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = flow._C.matmul(query, key, False, True, float(scale))
    if is_causal:
        rows, columns = scores.shape[-2:]
        allowed = flow.tril(flow.ones((rows, columns), dtype=flow.int32, device=scores.device))
        attn_mask = flow.eq(allowed, 1)
    if attn_mask is not None:
        if attn_mask.dtype == flow.bool:
            hidden = flow.logical_not(attn_mask).expand(*scores.shape)
            scores = flow.masked_fill(scores, hidden, float("-inf"))
        else:
            scores = scores + attn_mask
    return flow.matmul(flow.softmax(scores, -1), value)


@TABLE.lowers("comfy_kitchen.apply_rope.default")  # by name: a library of the host's, which may not be there
def apply_rope(queries: Any, keys: Any, rotations: Any) -> tuple[Any, Any]:
    """Rotary positions as Flux-like models apply them; ComfyUI calls comfy_kitchen's operator for it.

    Args:
        queries: [..., features].
        keys: [..., features].
        rotations: [..., features / 2, 2, 2], a rotation of the plane for each pair of features.
    """
    return _rotated(queries, rotations), _rotated(keys, rotations)


def _rotated(x: Any, rotations: Any) -> Any:
    pairs = flow.reshape(x.to(rotations.dtype), (*x.shape[:-1], -1, 1, 2))
    first = rotations[..., 0] * pairs[..., 0]
    turned = first + rotations[..., 1] * pairs[..., 1]
    return flow.reshape(turned, x.shape).to(x.dtype)
