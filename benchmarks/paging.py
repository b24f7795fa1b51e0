"""Count what comfy-aimdo does in images of a model that does not fit: pages filled and taken back, and waits for a GPU.

    python -m benchmarks.paging --left 16 --format bf16 --between prompt

Its own library runs, on a CPU, over a driver that does nothing but count (``counting_driver.c``). Nothing is computed
or copied: blocks of Flux' size ask for their layers' weights in our order, as the host does for us, and allocate what
their layers give. So these are counts and no times, but each wait is one in which a GPU is given nothing to do.

The device is as large as an H200, and all but ``--left`` GiB belong to another process, as ``any_card`` has it. With
``--total 17 --left 16`` it is a card of 17 GiB, of which a context and a desktop have one.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.metadata
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .files import Report, read, write
from .host import start_host

_DRIVER = "libcuda.so.1"  # by this name comfy-aimdo looks for it
_GIB = 1 << 30
_RANGE = 240 << 30  # addresses for weights, ten times the model's size, as the host has it
_BUFFER = 16 << 30  # addresses for what is brought and does not stay, as many as the host reserves
_STEP_US = 150_000
_IMAGE, _PROMPT = 4096, 512  # tokens of 1024 x 1024
_TAKEN = 5 << 30  # bytes, by a VAE's decoding or a text encoder
_COUNTED = ("waits", "filled", "taken")
_EMPTIED = 1 / 4  # more of what is free than this is PyTorch's, and the host has it given back
BETWEEN = ("nothing", "prompt", "others")
"""Two images: nothing; the host gives cast buffers and what PyTorch keeps back, as at each prompt's end; and something
else takes weights away besides."""


def main() -> int:
    """Run each case in a process with the driver that counts; print a line for each image, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--left", type=float, default=16.0, help="GiB that are free")
    parser.add_argument("--total", type=float, default=141.0, help="GiB of the device")
    parser.add_argument("--format", choices=("bf16", "fp8"), default="bf16")
    parser.add_argument("--images", type=int, default=6)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--others", type=_numbers, default="", help="images A:B have a GiB less")
    parser.add_argument("--between", type=lambda text: text.split(","), default=",".join(BETWEEN), help="two images")
    parser.add_argument("--output", help="JSON file to write")
    parser.add_argument("--case", choices=("host", "ours"), help="run one case in this process: how weights come back")
    options = parser.parse_args()
    if options.case:
        start_host()
        write(_Paging(options).run(), options.output)
        return 0
    report: Report = {"what": {name: getattr(options, name) for name in ("left", "total", "format", "images", "steps")}}
    with tempfile.TemporaryDirectory() as folder:
        driver, source = Path(folder, _DRIVER), Path(__file__).with_name("counting_driver.c")
        subprocess.run(["cc", "-shared", "-fPIC", f"-Wl,-soname,{_DRIVER}", "-o", driver, source, "-ldl"], check=True)
        for between, case in itertools.product(options.between, ("host", "ours")):
            print(f"== between images: {between}; weights come back as {case} has it", flush=True)
            found = Path(folder, "found.json")
            only = ["--between", between, "--case", case, "--output", str(found)]  # the last of each option counts
            command = [sys.executable, "-m", "benchmarks.paging", *sys.argv[1:], *only]
            subprocess.run(command, env={**os.environ, "LD_PRELOAD": str(driver)}, check=True)
            one = read(found)
            report["environment"] = one["environment"]
            report.setdefault("cases", {}).setdefault(between, {})[case] = one["images"]
    write(report, options.output)
    return 0


class _Driver:
    """The counters of the driver."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(_DRIVER)

    def __getattr__(self, name: str) -> int:
        return int(ctypes.c_uint64.in_dll(self.library, f"counting_{name}").value)

    def set(self, name: str, value: int) -> None:
        ctypes.c_uint64.in_dll(self.library, f"counting_{name}").value = value

    def free(self) -> int:
        return self.total - self.used - self.reserved

    def kept(self) -> int:
        return self.reserved - self.allocated

    @contextlib.contextmanager
    def tensors(self, sizes: Sequence[int]) -> Iterator[None]:
        """Allocate so many bytes each, as PyTorch does, until the context ends."""
        found = []
        for size in sizes:
            address = ctypes.c_uint64()
            if self.library.cuMemAllocAsync(ctypes.byref(address), ctypes.c_size_t(size), None):
                raise MemoryError
            found.append((address, size))
        yield
        for address, size in found:
            self.library.cuMemFreeAsync(address, None)
            self.set("allocated", self.allocated - size)

    def give_back(self) -> None:
        """Give back what PyTorch keeps."""
        self.set("reserved", self.allocated)


class _Paging:
    """Images of a model that does not fit.

    Args:
        options: as the command line has them.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        import comfy_aimdo.control

        self.options, self.driver = options, _Driver()
        self.driver.set("total", int(options.total * _GIB))
        self.driver.set("used", int((options.total - options.left) * _GIB))
        comfy_aimdo.control.init("cuda")
        comfy_aimdo.control.set_log_error()
        if not comfy_aimdo.control.init_devices([0]):
            raise RuntimeError("comfy-aimdo cannot be had here")
        import comfy.model_management
        import comfy_aimdo.model_vbar
        import torch

        from onediff_comfy.host.adapters.blocks import blocks_of
        from onediff_comfy.host.process.memory_pressure import ReturningWeights
        from onediff_comfy.host.weights.page_order import spread_over_blocks

        from .models import FAMILIES

        self.aimdo, self.device = comfy_aimdo.model_vbar, torch.device("cuda", 0)
        comfy.model_management.get_free_memory = self._free
        with torch.device("meta"):
            model = FAMILIES["flux"].build(torch.bfloat16)
        self.vbar = self.aimdo.ModelVBAR(_RANGE, 0)
        self.layers = self._placed(model)
        self.outputs = {
            layer: 2 * _tokens(name) * layer.weight.shape[0]
            for name, layer in model.named_modules()
            if layer in self.layers
        }
        self.blocks = [[each for each in block.modules() if each in self.layers] for block in blocks_of(model)]
        assert spread_over_blocks(model, blocks_of(model))
        self.outer = [layer for layer in self.layers if not any(layer in block for block in self.blocks)]
        self.returning = ReturningWeights()
        self.buffers: list[Any] = [None, None]  # of the host's two streams
        self.turn = self.brought = 0

    def _placed(self, model: Any) -> dict[Any, int]:
        """Give each layer that the host brings a place, the largest first, as the host does. Return their bytes."""
        from tools.models.formats import is_quantised

        found = {}
        for name, layer in model.named_modules():
            weight = layer._parameters.get("weight")
            if weight is None or weight.nbytes <= 16 << 10:  # the host keeps small ones on the device
                continue
            is_fp8 = self.options.format == "fp8" and is_quantised(f"{name}.weight", weight, "fp8")
            others = sum(each.nbytes for key, each in layer._parameters.items() if key != "weight" and each is not None)
            found[layer] = weight.numel() * (1 if is_fp8 else 2) + others
        for layer in sorted(found, key=found.__getitem__, reverse=True):
            layer._v, layer._v_signature = self.vbar.alloc(found[layer]), None
        return found

    def _free(self, _device: Any = None, torch_free_too: bool = False) -> Any:
        free, kept = self.driver.free(), self.driver.kept()
        return (free + kept, kept) if torch_free_too else free + kept

    def run(self) -> Report:
        """Return what was counted in each image."""
        import comfyui_version

        images = [self._image(number in self.options.others) for number in range(self.options.images)]
        versions = {"comfyui": comfyui_version.__version__, "comfy_aimdo": importlib.metadata.version("comfy-aimdo")}
        return {"environment": versions, "images": images}

    def _image(self, beside_others: bool) -> dict[str, Any]:
        """Return what is counted in an image; ``beside_others``, another process has a GiB more of the device."""
        self.driver.set("used", self.driver.used + beside_others * _GIB)
        self._begin()
        found: dict[str, Any] = {"there_before_mib": self.vbar.loaded_size() >> 20}
        for step in range(self.options.steps):
            before = [getattr(self.driver, name) for name in _COUNTED]
            self.brought = 0
            if step == 0 and self.options.case == "ours":
                self.returning.begin(self.vbar, self.device, ())
            self._step()
            if self.options.case == "ours":
                self.returning.note(self.vbar, self.device)
            counted = {name: getattr(self.driver, name) - was for name, was in zip(_COUNTED, before, strict=True)}
            if step in (0, self.options.steps - 1):
                found["first" if step == 0 else "last"] = {**counted, "brought_gb": round(self.brought / 1e9, 2)}
        found |= {"there_mib": self.vbar.loaded_size() >> 20, "free_mib": self.driver.free() >> 20}
        self._end()
        self.driver.set("used", self.driver.used - beside_others * _GIB)
        print(found, flush=True)
        return found

    def _begin(self) -> None:
        """Do what the host does where an image begins."""
        if self.driver.kept() > _EMPTIED * (self.driver.free() + self.driver.kept()):
            self.driver.give_back()
        self.vbar.prioritize()

    def _end(self) -> None:
        """Do what happens between two images."""
        (between,) = self.options.between
        if between != "nothing":
            self.buffers = [None, None]
            self.driver.give_back()
        if between == "others":
            self.vbar.free_memory(_TAKEN)

    def _step(self) -> None:
        hidden = (_IMAGE + _PROMPT) * 3072 * 2
        with self.driver.tensors([hidden, hidden]):
            for layer in self.outer:
                self._call([layer], [hidden])
            for block in self.blocks:
                self._call(block, [self.outputs[layer] for layer in block])

    def _call(self, layers: Sequence[Any], tensors: Sequence[int]) -> None:
        """Bring layers' weights, as the host's ``cast_modules_with_vbar`` does; then allocate, and let them go."""
        self.driver.set("time", self.driver.time + _STEP_US // (len(self.blocks) + len(self.outer)))
        held, offset, stream = [], 0, None
        for layer in layers:
            signature = self.aimdo.vbar_fault(layer._v)
            if signature is not None:
                held.append(layer)
            if self.aimdo.vbar_signature_compare(signature, layer._v_signature):
                continue
            if stream is None:
                stream = self.turn = 1 - self.turn
            if signature is None:
                self._buffer(stream).get(self.layers[layer], offset)
                offset += self.layers[layer]
            else:
                layer._v_signature = signature
            self.brought += self.layers[layer]
        with self.driver.tensors(tensors):
            pass
        for layer in held:
            self.aimdo.vbar_unpin(layer._v)

    def _buffer(self, stream: int) -> Any:
        from comfy_aimdo.vram_buffer import VRAMBuffer

        self.buffers[stream] = self.buffers[stream] or VRAMBuffer(_BUFFER, 0)
        return self.buffers[stream]


def _numbers(text: str) -> range:
    first, _, end = text.partition(":")
    return range(int(first or 0), int(end or 0))


def _tokens(name: str) -> int:
    """Return of how many tokens a layer of Flux is given numbers."""
    if name.endswith(".lin"):  # of a modulation, which is one for all
        return 1
    return _IMAGE if ".img_" in name else _PROMPT if ".txt_" in name else _IMAGE + _PROMPT


if __name__ == "__main__":
    sys.exit(main())
