"""What ComfyUI's Dynamic VRAM does where memory is short: how much it keeps free, and how weights are kept from it."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import weakref
from collections import Counter, deque
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import comfy.model_management as memory
import torch
from comfy.cli_args import args

from ...once import once
from ...runtime.device_memory import HostMemory
from ..compatibility import HOLDS_WEIGHTS, LIMITS_WEIGHTS

log = logging.getLogger(__name__)

_GIB = 1 << 30
_ALL = 1 << 60  # bytes
_KEPT = (512 if os.name == "nt" else 256) << 20
_NOTED = 2  # images: now and then one takes more, in which something is compiled or compared; the first always does
_COUNTED_TWICE = 256 << 20  # bytes, of a block's tensors: comfy-aimdo keeps these free besides


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


def evictable_before(vbar: Any) -> int:
    """Return the bytes of other models that the host takes off a device before any in this address range.

    Those in Dynamic VRAM that were loaded before it.
    """
    loaded = loaded_vbars(vbar.device)
    before = loaded[loaded.index(vbar) + 1 :] if vbar in loaded else []
    return sum(int(each.loaded_size()) for each in before)


class ReturningWeights:
    """Says, when an image begins, how many weights of a model that does not fit may come back to its device.

    The host lets all come back then, and comfy-aimdo has them come while memory is free. But cast buffers and what is
    computed take it soon, and if another process has some of the device's, comfy-aimdo knows no other way than to take
    a page back for each that comes. For each it waits for the device twice. A model of Flux's size had 40 such pages in
    an image, in which nothing else was done for a tenth of a second. So no more come back than were there when the last
    images ended, and what nobody used by then: all of it behind the first image, half of it later. How much a call
    takes beside weights is not asked: what PyTorch keeps of it is more, and weights would be kept from where there is
    room.

    Nothing is kept from another model: the limit ends when the host loads a model for the next image, or by ``lift``.
    """

    def __init__(self) -> None:
        self._ended: dict[Hashable, deque[_Image]] = {}  # by sizes, the last of which a call has ended
        self._begun: tuple[_Image, deque[_Image]] | None = None  # the run under way, and those of its sizes
        self._limited: weakref.ref[Any] | None = None  # an address range of comfy-aimdo's
        self._page: int | None = None  # bytes, of a page of its

    def begin(self, vbar: Any, device: torch.device, sizes: Hashable) -> None:
        """Limit what comes back in an image that begins.

        Args:
            vbar: the model's address range.
            device: where it is.
            sizes: of the latent. Before the first image with them nothing is known.
        """
        self._begun = None
        with _left_out():
            image, ended = _Image(_available(vbar, device)), self._ended.setdefault(sizes, deque(maxlen=_NOTED))
            self._begun = image, ended
            if ended:
                self._limit(vbar, ended, image.available)

    def note(self, vbar: Any, device: torch.device) -> None:
        """Note how many weights are there behind a call of the image that has begun."""
        if self._begun is None:
            return
        with _left_out():
            image, ended = self._begun
            self._page = self._page or _bytes_of_page(vbar)
            if image not in ended:  # of one that is stopped in its first call nothing is known
                ended.append(image)
            image.there, image.unused = int(vbar.loaded_size()), max(0, _free(device) - kept_by_host() - _COUNTED_TWICE)

    def lift(self) -> None:
        """Let all weights come back: there is room for all of them by now."""
        vbar = None if self._limited is None else self._limited()
        if vbar is not None:
            vbar.set_watermark(_ALL)
        self._limited = None

    def _limit(self, vbar: Any, ended: deque[_Image], available: int) -> None:
        """Have no more pages filled than have stayed in images, and all that are there stay. The lowest are filled."""
        size = self._page
        if size is None:
            return
        since = (image.there + max(0, available - image.available) for image in ended)  # others may have gone
        pages = vbar.get_residency()
        filled, missing = ([n for n, page in enumerate(pages) if page & 1 == is_filled] for is_filled in (1, 0))
        # Of what nobody used comfy-aimdo may count a part for tensors, so half is tried. The first image of a size has
        # left more, for what it captured and compared took weights away: without all of it the next would lack them.
        tried = ended[-1].unused // (1 if len(ended) == 1 else 2)
        coming = max(0, (max(since) + tried) // size - len(filled))
        if coming < len(missing):
            vbar.set_watermark(max(missing[coming], filled[-1] + 1 if filled else 0) * size)
            self._limited = weakref.ref(vbar)


@dataclass(eq=False)
class _Image:
    """An image of a model that does not fit.

    Attributes:
        available: bytes of the device that weights had or could have, when it began.
        there: bytes of weights on the device behind its last call.
        unused: bytes that nobody used by then, and nobody was to keep free.
    """

    available: int
    there: int = 0
    unused: int = 0


@contextlib.contextmanager
def _left_out() -> Iterator[None]:
    """Do without what fails inside: an image does not need it."""
    try:
        yield
    except Exception:
        log.debug("weights come back as the host has them come", exc_info=True)


def _bytes_of_page(vbar: Any) -> int | None:
    """Return how large comfy-aimdo's pages are, which it does not say; None where none is filled."""
    filled = sum(page & 1 for page in vbar.get_residency())
    return int(vbar.loaded_size()) // filled if filled else None


def _free(device: torch.device) -> int:
    """Return the bytes of a device that are free, and not kept by PyTorch. Of a CPU it keeps none."""
    free, kept = memory.get_free_memory(device, torch_free_too=True)
    return int(free - kept if device.type == "cuda" else free)


def _available(vbar: Any, device: torch.device) -> int:
    """Return the bytes of a device that a model's weights have, or could have if nothing else were computed there."""
    return int(memory.get_free_memory(device)) + int(vbar.loaded_size()) + evictable_before(vbar)


@functools.cache
def can_limit() -> bool:
    """Return True if this host has what limits how many weights come back."""
    return all(use.problem() is None for use in LIMITS_WEIGHTS)


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
