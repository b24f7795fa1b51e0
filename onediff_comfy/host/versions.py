"""Whether this installation can run the pack, and what to say when it cannot."""

from __future__ import annotations

from importlib.metadata import version

from ..settings import MINIMUM_TORCH


def torch_too_old() -> str | None:
    """Why the installed torch cannot compile for us, or None."""
    installed = version("torch")
    numbers = tuple(int(part) for part in installed.split("+")[0].split(".")[:2])
    if numbers < MINIMUM_TORCH:
        wanted = ".".join(map(str, MINIMUM_TORCH))
        return f"torch {installed} is too old; onediff-comfy needs torch {wanted} or newer"
    return None
