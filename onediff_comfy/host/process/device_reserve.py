"""How much memory of a device ComfyUI's Dynamic VRAM keeps free."""

from __future__ import annotations

import importlib

from comfy.cli_args import args

_GIB = 1 << 30


def device_reserve() -> int | None:
    """Return the bytes that Dynamic VRAM takes weights off a device for; None where it is not on.

    comfy-aimdo keeps 256 MB free, on Windows 512, or what ``--reserve-vram`` says, and ``--vram-headroom`` besides. It
    counts each allocation as whole pages of 2 MB, and looks at the device every two seconds only. So here it is more.
    """
    try:
        host = importlib.import_module("comfy.memory_management")
    except ImportError:  # a host from before
        return None
    if not getattr(host, "aimdo_enabled", True):  # a host that no longer says so may listen all the same
        return None
    reserved, more = (getattr(args, name, None) or 0.0 for name in ("reserve_vram", "vram_headroom"))
    return max(_GIB, int(reserved * _GIB) + _GIB // 2) + int(more * _GIB)
