"""A module of another extension's, for the tests of functions that read its variables."""

from __future__ import annotations

import torch

SCALE = 1.2
TABLE = {"scale": 1.2, "unread": 0.0}
LISTED = [1.2]
TENSOR = torch.tensor(1.2)


def helper(value: torch.Tensor) -> torch.Tensor:
    return value * SCALE


_original = helper


def reset() -> None:
    global SCALE, TENSOR, helper
    helper = _original
    SCALE, TENSOR = 1.2, torch.tensor(1.2)
    TABLE.clear()
    TABLE.update(scale=1.2, unread=0.0)
    LISTED[:] = [1.2]
