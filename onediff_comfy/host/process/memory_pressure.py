"""What ComfyUI's Dynamic VRAM does where memory is short: how much it keeps free, and how weights are kept from it."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import comfy.model_management as memory
import torch
from comfy.cli_args import args

from ...once import once
from ...runtime.device_memory import HostMemory
from ..compatibility import HOLDS_WEIGHTS

_GIB = 1 << 30
_ALL = 1 << 60  # bytes
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


def host_memory() -> HostMemory:
    """Return what recordings have to know of the host's memory management."""
    can_hold = all(use.problem() is None for use in HOLDS_WEIGHTS)
    return HostMemory(device_reserve, held_weights().on if can_hold else None, evictable_bytes)


def loaded_vbars(device: int | None) -> list[Any]:
    """Return the address ranges of the models that the host has loaded on a device, the last that was loaded first."""
    models = [getattr(getattr(loaded, "model", None), "model", None) for loaded in memory.current_loaded_models]
    every = [vbar for model in models for vbar in getattr(model, "dynamic_vbars", {}).values()]
    return [vbar for vbar in every if vbar.device == device]


def evictable_bytes(device: torch.device) -> int:
    """Return the bytes of weights on a device that Dynamic VRAM takes off it for what is allocated."""
    return sum(int(vbar.loaded_size()) for vbar in loaded_vbars(device.index))


class HeldWeights:
    """Says which models' weights Dynamic VRAM takes off no device for now.

    comfy-aimdo has a limit for each model, beneath which it takes nothing. The host sets all of them to 0 after each
    node, and so does this: of one that an extension may have set no more can be asked.
    """

    def __init__(self) -> None:
        self._holds: Counter[Any] = Counter()  # of an address range: a model is held while a call of it is recorded

    @contextlib.contextmanager
    def of(self, vbars: Sequence[Any]) -> Iterator[None]:
        """Have the weights in these address ranges stay inside, whatever is allocated. Contexts may be nested."""
        for vbar in vbars:
            self._holds[vbar] += 1
            vbar.set_watermark_limit(_ALL)
        try:
            yield
        finally:
            for vbar in vbars:
                self._holds[vbar] -= 1
                if not self._holds[vbar]:
                    del self._holds[vbar]
                    vbar.set_watermark_limit(0)

    def on(self, device: torch.device) -> AbstractContextManager[None]:
        """Have all weights on ``device`` stay there inside.

        A model that is not among the host's loaded ones has nothing left to be taken.

        What the host took before, for room, it does not bring again before the models are loaded anew, which is before
        the next image. Nor is it told to: a recording's memory is none that it counts, and it looks at the device every
        two seconds only. Until then it would bring weights to where the recording's memory is, and the next replay
        would have none.
        """
        return self.of(loaded_vbars(device.index))


@once
def held_weights() -> HeldWeights:
    """Return what of this process's weights is held."""
    return HeldWeights()


def _asked_for() -> tuple[int, int]:
    """Return the bytes that ``--reserve-vram`` and ``--vram-headroom`` say."""
    reserved, more = (int((getattr(args, name, None) or 0.0) * _GIB) for name in ("reserve_vram", "vram_headroom"))
    return reserved, more
