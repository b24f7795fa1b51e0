"""Dynamic VRAM on a CPU: comfy-aimdo's pages in ordinary memory, beneath the host's own code.

comfy-aimdo needs a GPU. Its pages are replaced here, by the rules of its source: pages of a range are brought together,
counted as pinned, taken away from the top while they are not, and numbered anew when they come back. What is written to
them, and when, is the host's own code.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import comfy.model_management as memory
import comfy.model_patcher
import comfy_aimdo.host_buffer
import comfy_aimdo.model_vbar
import comfy_aimdo.torch
import comfy_aimdo.vram_buffer
import torch
from comfy.cli_args import args
from counting import answered

PAGE = 256 << 10
DEVICE = torch.device("cpu:0")  # to the host another device than the CPU, on which it keeps weights
EMPTY = 0x7F  # what is in a page that has just come


class Pages:
    """Stands for comfy-aimdo's ModelVBAR.

    Attributes:
        room: how many pages the device has for all models together.
        taken: how many of them something else has.
        faults: how often pages of some range were asked for.
        bytes_of_new: bytes of a page, in a range that is made from now on.
    """

    room, taken, faults, bytes_of_new = 1 << 20, 0, 0, PAGE
    all: list[Pages] = []  # noqa: RUF012 - one device

    def __init__(self, size: int, device: Any) -> None:
        self.max_size, self.offset, self.device, self.page = size, 0, device, Pages.bytes_of_new
        count = -(-size // self.page)
        self.memory = torch.empty(count * self.page, dtype=torch.uint8)  # most of it is never touched
        self.base_addr = self.memory.data_ptr()
        self.serial, self.pins, self.there = [0] * count, [0] * count, [False] * count
        self.watermark, self.limit = count, 0
        Pages.all.append(self)

    def prioritize(self) -> None:
        self.watermark = len(self.there)

    def set_watermark(self, size_bytes: int) -> None:
        mark = min(-(-size_bytes // self.page), len(self.there))
        for page in range(mark, self.watermark):
            self.there[page] = self.there[page] and self.pins[page] > 0
        self.watermark = mark

    def set_watermark_limit(self, size_bytes: int) -> None:
        self.limit = -(-size_bytes // self.page)

    def alloc(self, size: int) -> tuple[Pages, int, int]:
        self.offset = -(-self.offset // 512) * 512
        found = self, self.base_addr + self.offset, size
        self.offset += size
        return found

    def _pages(self, address: int, size: int) -> range:
        first = address - self.base_addr
        return range(first // self.page, -(-(first + size) // self.page))

    def fault(self, address: int, size: int) -> Any:
        Pages.faults += 1
        pages = self._pages(address, size)
        for page in pages:
            while page < self.watermark and not self.there[page] and Pages.free() < 1:
                self.free_memory(self.page)
            if pages.stop > self.watermark:
                return None
            if not self.there[page]:
                self.there[page] = True
                self.serial[page] += 1
                self.memory[page * self.page : (page + 1) * self.page] = EMPTY
        for page in pages:
            self.pins[page] += 1
        signature = [self.serial[page] for page in pages]
        return (ctypes.c_uint32 * (len(signature) + 2))(*signature)

    @staticmethod
    def free() -> int:
        return Pages.room - Pages.taken - sum(sum(pages.there) for pages in Pages.all)

    def unpin(self, address: int, size: int) -> None:
        for page in self._pages(address, size):
            assert self.pins[page] or page >= self.watermark, "unpinned more often than pinned"
            self.pins[page] = max(0, self.pins[page] - 1)
            if page >= self.watermark and not self.pins[page]:
                self.there[page] = False

    def get_residency(self) -> list[int]:
        return [there | (pins > 0) << 1 for there, pins in zip(self.there, self.pins, strict=True)]

    def loaded_size(self) -> int:
        return sum(self.there) * self.page

    def free_memory(self, size: float) -> int:
        freed = 0
        while self.watermark > self.limit and freed < size:
            self.watermark -= 1
            if self.there[self.watermark] and not self.pins[self.watermark]:
                self.there[self.watermark] = False
                freed += self.page
        return freed


def _tensor(alloc: Any, _device: Any) -> torch.Tensor:  # names nothing of ours: models' code leads here
    pages, address, size = alloc
    first = address - pages.base_addr
    return pages.memory[first : first + size]


class _Buffer:
    """Stands for comfy-aimdo's VRAMBuffer: memory that is no tensor's. One block's weights follow another's in it."""

    bytes = 16 << 20

    def __init__(self, _size: int, _device: Any) -> None:
        self.memory = torch.frombuffer(bytearray(self.bytes), dtype=torch.uint8)
        self.base_addr = self.memory.data_ptr()

    def size(self) -> int:
        return self.bytes

    def get(self, size: int, offset: int = 0) -> tuple[_Buffer, int, int]:
        assert offset + size <= self.bytes
        return self, self.base_addr + offset, size


class _Stream:
    """Stands for a stream, on which all is done at once. Models' code leads here, so nothing of it changes."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_error: Any) -> None:
        pass

    def record_event(self) -> _Stream:
        return self

    def wait_event(self, _event: Any) -> None:
        pass

    def wait_stream(self, _other: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


_STREAM = _Stream()


def _stream(_device: Any) -> _Stream:
    return _STREAM


class _NoBuffer:
    """Stands for pinned host memory, of which none is used."""

    size = 0

    def __init__(self, *_sizes: int) -> None:
        pass


def begin() -> None:
    """Have the host load what it loads from now on into Dynamic VRAM. Call it after the host was imported."""
    args.disable_pinned_memory = True
    comfy_aimdo.model_vbar.ModelVBAR = Pages
    comfy_aimdo.torch.aimdo_to_tensor = _tensor
    comfy_aimdo.host_buffer.HostBuffer = _NoBuffer
    comfy_aimdo.vram_buffer.VRAMBuffer = _Buffer
    memory.get_offload_stream = memory.current_stream = _stream
    comfy.model_patcher.CoreModelPatcher = comfy.model_patcher.ModelPatcherDynamic
    memory.is_device_cpu = lambda _device: False
    memory.get_torch_device = lambda: DEVICE


def looked_at(dispatcher: Any, patcher: Any, call: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """Return what a call gives, and what answered it.

    That is also how often something was captured and pages were asked for in it; how many of ``patcher``'s pages are
    pinned behind it; and how many models are loaded.
    """
    from onediff_comfy.host.process.process import metrics

    before, captured, faults = dispatcher.metrics.snapshot(), metrics().snapshot()["captured"], Pages.faults
    result = call()
    return result, {
        **answered(before, dispatcher.metrics.snapshot()),
        "captured": metrics().snapshot()["captured"] - captured,
        "pinned": sum(state > 1 for each in patcher.model.dynamic_vbars.values() for state in each.get_residency()),
        "faults": Pages.faults - faults,
        "models": len({id(entry.model.model) for entry in memory.current_loaded_models}),
    }


class _OffDevice(torch.nn.Parameter):
    """A weight that says that it is on another device than what is computed."""

    device = property(lambda _self: torch.device("cpu:1"))  # type: ignore[assignment]

    def detach(self) -> Any:
        return torch.Tensor._make_subclass(_OffDevice, self.data)


def off_device(model: Any) -> Any:
    """Give a MODEL the weights of a file that is not on the device: the host fetches them, as it does on a GPU.

    All but those of layers of up to 16 KB, which the host keeps on the device.
    """
    for layer in model.model.modules():
        small = sum(weight.nbytes for weight in layer._parameters.values() if weight is not None) <= 16 << 10
        for name, weight in layer._parameters.items():
            if weight is not None and not small:
                layer._parameters[name] = _OffDevice(weight.data, requires_grad=False)
    return model
