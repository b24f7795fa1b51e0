"""Rotary position embeddings, in operators that a compiler fuses with the norm before them.

Libraries rotate queries and keys by kernels of their own, which read what a norm has just written. On an H200 those
took 4.1 ms of a Flux step, and the norms another 4.1; both read and write 28 MB, which takes 14 microseconds.

Rotations are [..., tokens, pairs, 2, 2] matrices in float32. A pair is two neighbours, or, where the halves are split,
one element of either half (Su et al., 2021, equation 34).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rotates_plainly(x: torch.Tensor, rotations: torch.Tensor) -> bool:
    """Return True if ``rotations`` are in float32 and broadcast to the pairs of ``x`` as they are.

    Sizes may be symbols; they are compared by their text, for a comparison of values would be a guard on them.
    """
    if rotations.dtype != torch.float32 or rotations.ndim != x.ndim + 2:
        return False
    pairs = zip(rotations.shape[:-3], x.shape[:-1], strict=True)
    whole = str(2 * rotations.shape[-3]) == str(x.shape[-1])
    return whole and all(str(one) in ("1", str(other)) for one, other in pairs)


def rotate_neighbours(x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
    """Return ``x``, [..., tokens, 2 · pairs], with pairs of neighbours rotated; computed in float32."""
    first, second = x.float().unflatten(-1, (-1, 1, 2)).unbind(-1)
    return (rotations[..., 0] * first + rotations[..., 1] * second).flatten(-2).to(x.dtype)


def rotate_halves(x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
    """Return ``x``, [..., tokens, 2 · pairs], with element i rotated together with element i + pairs, in float32."""
    first, second = x.float().chunk(2, -1)
    rotated = [rotations[..., row, 0] * first + rotations[..., row, 1] * second for row in range(2)]
    return torch.cat(rotated, -1).to(x.dtype)


def normalise(x: torch.Tensor, scale: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return ``x`` with each row divided by its root mean square, times ``scale`` [channels]."""
    return F.rms_norm(x, x.shape[-1:], scale, epsilon)
