"""Targets that were looked at often enough to be compared by identity."""

from __future__ import annotations

from onediff_comfy.capture.target.target import Target


def is_settled(target: Target) -> bool:
    """Return True if a target is what it was, asked until nothing of it is described anew any more."""
    return all(target.is_current() for _ in range(3))
