"""Attention, and the rotation of its queries and keys by their positions."""

from __future__ import annotations

from typing import Any

import oneflow as flow
import torch

from ....messages import message
from .reduction import rms_norm
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
        raise NotImplementedError(message("attention with dropout or with fewer heads of keys than of queries"))
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


# Rotary positions, as operators of a library of the host's: by name, for it may not be there.


@TABLE.lowers("comfy_kitchen.apply_rope1.default")
def apply_rope1(x: Any, rotations: Any) -> Any:
    """Each pair of neighbouring features turned by its position.

    Args:
        x: [..., positions, features].
        rotations: [..., positions, features / 2, 2, 2], a rotation of the plane for each pair of features.
    """
    positions = x.shape[-2]
    if rotations.shape[-4] not in (1, positions):
        raise NotImplementedError(message("rotations for more positions than there are"))
    pairs = flow.reshape(x.to(rotations.dtype), (*x.shape[:-1], -1, 1, 2))
    turned = rotations[..., 0] * pairs[..., 0] + rotations[..., 1] * pairs[..., 1]
    return flow.reshape(turned, x.shape).to(x.dtype)


@TABLE.lowers("comfy_kitchen.apply_rope.default")
def apply_rope(queries: Any, keys: Any, rotations: Any) -> tuple[Any, Any]:
    return apply_rope1(queries, rotations), apply_rope1(keys, rotations)


@TABLE.lowers("comfy_kitchen.rms_rope1.default")
def rms_rope1(x: Any, rotations: Any, scale: Any, epsilon: float = 1e-6) -> Any:
    return apply_rope1(rms_norm(x, x.shape[-1:], scale, epsilon), rotations)


@TABLE.lowers("comfy_kitchen.rms_rope.default")
def rms_rope(
    queries: Any, keys: Any, rotations: Any, of_queries: Any, of_keys: Any = None, epsilon: float = 1e-6
) -> tuple[Any, Any]:
    of_keys = of_queries if of_keys is None else of_keys
    return rms_rope1(queries, rotations, of_queries, epsilon), rms_rope1(keys, rotations, of_keys, epsilon)
