"""In place of SageAttention, which needs a GPU: its functions, computed where no trace can look into them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def sageattn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tensor_layout: str = "HND", levels: float = 127.0, **options: Any
) -> torch.Tensor:
    """Return attention whose queries and keys were rounded, as the library rounds them to 8 bits.

    Args:
        q: [batch, heads, tokens, width], or with heads and tokens the other way round where ``tensor_layout`` is "NHD".
        k: likewise.
        v: likewise.
        levels: how many a row is rounded to.
    """
    assert not options.get("is_causal") and options.get("attn_mask") is None
    swapped = tensor_layout == "NHD"
    query, key, value = (_array(t.transpose(1, 2) if swapped else t) for t in (q, k, v))
    query, key = _rounded(query, levels), _rounded(key, levels)
    scores = query @ key.transpose(0, 1, 3, 2) * query.shape[-1] ** -0.5
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    output = torch.from_numpy(scores / scores.sum(-1, keepdims=True) @ value).to(q.dtype)
    return output.transpose(1, 2) if swapped else output


def sageattn_qk_int8_pv_fp16_cuda(*args: Any, **options: Any) -> torch.Tensor:
    return sageattn(*args, levels=63.0, **options)


def sageattn_qk_int8_pv_fp16_triton(*args: Any, **options: Any) -> torch.Tensor:
    return sageattn(*args, levels=31.0, **options)


def sageattn_qk_int8_pv_fp8_cuda(*args: Any, **options: Any) -> torch.Tensor:
    return sageattn(*args, levels=15.0, **options)


def _array(tensor: torch.Tensor) -> Any:
    return tensor.float().numpy()


def _rounded(rows: Any, levels: float) -> Any:
    scale = np.abs(rows).max(-1, keepdims=True) / levels + 1e-12
    return np.round(rows / scale) * scale
