"""How much memory of a device ComfyUI's Dynamic VRAM keeps free."""

from __future__ import annotations

import importlib
import os

from comfy.cli_args import args

_GIB = 1 << 30
_KEPT = (512 if os.name == "nt" else 256) << 20


def kept_by_host() -> int:
    """Return the bytes that Dynamic VRAM keeps free: comfy-aimdo's own number, or what the command line says."""
    reserved, more = _asked_for()
    return max(_KEPT, reserved) + more


def device_reserve() -> int | None:
    """Return the bytes that Dynamic VRAM takes weights off a device for; None where it is not on.

    comfy-aimdo counts each allocation as whole pages of 2 MB, and looks at the device every two seconds only. So it is
    more than ``kept_by_host``.
    """
    try:
        host = importlib.import_module("comfy.memory_management")
    except ImportError:  # a host from before
        return None
    if not getattr(host, "aimdo_enabled", True):  # a host that no longer says so may listen all the same
        return None
    reserved, more = _asked_for()
    return max(_GIB, reserved + _GIB // 2) + more


def _asked_for() -> tuple[int, int]:
    """Return the bytes that ``--reserve-vram`` and ``--vram-headroom`` say."""
    reserved, more = (int((getattr(args, name, None) or 0.0) * _GIB) for name in ("reserve_vram", "vram_headroom"))
    return reserved, more
