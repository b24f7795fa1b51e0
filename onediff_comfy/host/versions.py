"""Find out if this installation can run the pack, and say why where it cannot."""

from __future__ import annotations

from importlib.metadata import version

from ..messages import Message, message
from ..settings import MINIMUM_TORCH
from .compatibility import host_changed


def why_not(*kinds: str) -> Message | None:
    """Return why this installation cannot do what needs all of ``kinds`` (see ``compatibility.RELIED_ON``), or None."""
    return torch_too_old() or next(filter(None, map(host_changed, kinds)), None)


def torch_too_old() -> Message | None:
    """Return why the installed torch cannot compile for us, or None."""
    installed = version("torch")
    numbers = tuple(int(part) for part in installed.split("+")[0].split(".")[:2])
    if numbers < MINIMUM_TORCH:
        wanted = ".".join(map(str, MINIMUM_TORCH))
        return message(
            "torch {installed} is too old; onediff-comfy needs torch {wanted} or newer",
            installed=installed,
            wanted=wanted,
        )
    return None
