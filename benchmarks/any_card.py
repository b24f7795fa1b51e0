"""Time a model that does not fit: eager, then ours, with part of the GPU's memory held by another process.

    COMFYUI_PATH=... python -m benchmarks.any_card --model flux --formats bf16,fp8 --left 12,16,24 --output FILE

Weights are read from a file, in Dynamic VRAM, as the host's server does by default on NVIDIA. What is held is taken by
a process of its own before the model is sampled, so that the host finds a card on which ``--left`` GiB are free. The
speed of copying from pinned memory is measured first.

In each step Python's own speed is looked at, which takes a third of a millisecond. An image counts if another machine
on the same core has not slowed it down, and up to four more are made for those that do not. The file has all.

Behind each image the host gives back what a node of its graph has left, as its server does. That is not timed.

Variants do not take turns, and each cell reads the file anew. Ours gives a model's weights other places in Dynamic VRAM
before its first image, and they keep them: an eager image after that is faster than the host's own.

With ``--memory`` a cell says how much memory was in use at most. Asking the driver slows the images, so times of such a
run are no figures. It is of the whole process, so it is compared between two runs of the command: one with
``--variants eager`` and one with ours, once its graphs are in the store.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import sampling
from .checkpoints import FORMATTED, weights_of
from .files import write
from .host import reported, start_host
from .processor import PythonSpeed, collector_seconds
from .sampling import Bench, ours_failed, print_table, when_done
from .variants import names

if TYPE_CHECKING:
    import torch

MODELS = (*sampling.MODELS, "wan-14b")
_HOLD = "import sys, torch; held = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device='cuda'); print(); input()"
_COPIED = 1 << 30  # bytes
_PAGE = 32 << 20  # bytes, comfy-aimdo's
_MORE = 4  # images of a variant, in the place of some on a slowed processor


def main() -> int:
    """Run the benchmark; after each cell print its table and write JSON. Ends with 1 if one of our variants failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="flux")
    parser.add_argument("--formats", type=lambda text: text.split(","), default="bf16", help=", ".join(FORMATTED))
    parser.add_argument("--left", type=lambda text: [float(part) for part in text.split(",")], default="12,16,24")
    parser.add_argument("--size", help="image width x height in pixels (default: what the model was made for)")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--variants", type=names, default="eager,onediff-inductor")
    parser.add_argument("--inductor-cache")
    parser.add_argument("--folder", help="where the files of weights are written and stay (default: they are removed)")
    parser.add_argument("--memory", action="store_true", help="note the most memory in use, and no valid times")
    parser.add_argument("--output", help="JSON file to write")
    options = parser.parse_args()
    start_host(dynamic_vram=True)
    with contextlib.ExitStack() as stack:
        if options.folder is None:  # a file is as large as its model
            folder = tempfile.TemporaryDirectory(prefix="onediff-bench-", ignore_cleanup_errors=True)
            options.folder = stack.enter_context(folder)
        report = reported(lambda: _run(options), options.output)
    return max(ours_failed(found) for found in report["cells"].values())


def _run(options: argparse.Namespace) -> dict[str, Any]:
    import comfy.model_management
    import torch

    bus, python = _bus_speed(), PythonSpeed()
    found: dict[str, Any] = {}
    report = {"environment": {}, "bytes_per_second": bus, "cells": found}
    print(f"from pinned memory {bus / 1e9:.1f} GB/s", flush=True)
    for form in options.formats:
        for left in options.left:
            model = from_file(options, form)
            with held(left):
                watched = Watched(options, _given(model), python)
                cell = _with_memory(watched) if options.memory else watched.run()
            cell |= {"left_gib": left, "weights_bytes": model.model_size()}
            name = f"{form}, {left:g} GiB left"
            found[name] = cell
            report["environment"] = cell["environment"]
            write(report, options.output)  # a machine may be taken away
            print(f"\n== {name}", flush=True)
            print_table(cell)
            comfy.model_management.unload_all_models()
            del model, watched  # which holds it, and with it the recordings of its blocks
            gc.collect()
            torch.cuda.empty_cache()
    return report


def _with_memory(watched: Watched) -> dict[str, Any]:
    """Run a cell, and note the most memory of the device and of the machine that was in use, in MiB."""
    with _most_device_memory() as most:
        cell = watched.run()
        found = {"device": most(), "ram": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10}
    print(found, flush=True)
    return cell | {"most_mib": found}


def file(options: argparse.Namespace, form: str) -> Path:
    """Return the file of a model's weights."""
    return Path(options.folder, f"{options.model}-{form}.safetensors")


def make(options: argparse.Namespace, form: str) -> None:
    """Write the file of weights, random ones, if it is not there."""
    import comfy.model_management
    import torch
    from safetensors.torch import save_file

    from .models import FAMILIES

    if not file(options, form).exists():
        weights = weights_of(FAMILIES[options.model], comfy.model_management.get_torch_device(), form)
        of_cpu = {name: weight.cpu() for name, weight in weights}
        save_file(of_cpu, file(options, form), metadata={"format": "pt"})
        torch.cuda.empty_cache()


def from_file(options: argparse.Namespace, form: str) -> Any:
    """Return a ComfyUI MODEL, in Dynamic VRAM where there is any, loaded from a file of random weights."""
    import comfy.sd

    make(options, form)
    return comfy.sd.load_diffusion_model(str(file(options, form)))


class Watched(Bench):
    """Notes beside each image how many bytes of weights were on the device, and for how long the CPU worked.

    ``cpu_s`` is of all threads and ``thread_s`` of the one that samples. ``waited_s`` are those of it in which the CPU
    waits for the device behind the last step: where there are hardly any, the device waits for the CPU.
    ``collector_s`` are seconds of Python's collector, which stops all threads, whichever it runs on.
    ``missing_bytes_of_blocks`` are the least and the most. Where they are far apart, layers were given no other places.
    ``python_ms`` are what a short loop took in each step; see ``PythonSpeed``.

    Attributes:
        slowed: images that do not count, by variant.
    """

    def __init__(self, options: argparse.Namespace, load: Callable[[Any, Any], Any], python: PythonSpeed) -> None:
        super().__init__(options, load)
        self._python = python
        self.slowed: dict[str, list[dict[str, Any]]] = {name: [] for name in options.variants}

    def make(self, name: str, seed: int, callback: Callable[..., None] | None = None) -> tuple[Any, dict[str, float]]:
        waited, looks = [0.0], list[float]()

        def after_step(step: int, *latents: Any) -> None:
            looks.append(round(self._python.look(), 4))
            if callback is not None:
                callback(step, *latents)
            if step == self.sampler.steps - 1:
                began = time.perf_counter()
                waited.append(when_done() - began)

        began, thread_began = time.process_time(), time.thread_time()
        with collector_seconds() as collecting:
            latent, noted = super().make(name, seed, after_step)
        worked = {"cpu_s": time.process_time() - began, "thread_s": time.thread_time() - thread_began}
        resident = sum(vbar.loaded_size() for vbar in self.model.model.dynamic_vbars.values())
        found = {"waited_s": waited[-1], "collector_s": sum(collecting), "resident_bytes": resident}
        return latent, {**noted, **worked, **found, "python_ms": looks}

    def image(self, name: str, seed: int) -> tuple[Any, dict[str, Any]]:
        try:
            return super().image(name, seed)
        finally:
            end_of_node()

    def timed_image(self, name: str) -> None:
        from onediff_comfy.host.adapters.blocks import blocks_of

        super().timed_image(name)
        # Here, for what ``make`` does is timed: to ask of each layer takes longer than a step may differ.
        missing = list(map(missing_bytes, blocks_of(self.model.model.diffusion_model)))
        self.images[name][-1]["missing_bytes_of_blocks"] = [min(missing, default=0), max(missing, default=0)]
        print(name, self.images[name][-1], flush=True)

    def run(self) -> dict[str, Any]:
        for name in self.options.variants:
            self.first_images([name])
            for more in reversed(range(self.options.rounds + _MORE)):
                if name not in self.models or len(self.images[name]) == self.options.rounds:
                    break
                self.round([name])
                self._pass_over(name, more)
        return self.report() | {"images": self.images, "slowed": self.slowed}

    def _pass_over(self, name: str, more: int) -> None:
        """Count the last image of a variant only if the processor was not slowed down, as long as others may follow.

        Args:
            more: how many images may follow.
        """
        images = self.images[name]
        if images and len(images) - 1 + more >= self.options.rounds and self._python.was_slow(images[-1]["python_ms"]):
            self.slowed[name].append(images.pop())


def end_of_node() -> None:
    """Give back what the host's executor has given back behind each node: buffers of what was brought, above all."""
    import comfy.model_management
    import comfy.model_prefetch
    import comfy_aimdo.model_vbar

    comfy.model_management.reset_cast_buffers()
    comfy.model_prefetch.cleanup_prefetch_queues()
    comfy_aimdo.model_vbar.vbars_reset_watermark_limits()


def missing_bytes(block: torch.nn.Module) -> int:
    """Return how many bytes the layers of a block in Dynamic VRAM have that are not all on the device."""
    places = [vars(layer)["_v"] for layer in block.modules() if "_v" in vars(layer)]
    return sum(place[2] for place in places if not _is_there(place))


def _is_there(place: tuple[Any, int, int]) -> bool:
    vbar, address, size = place
    first, last = ((byte - vbar.base_addr) // _PAGE for byte in (address, address + size - 1))
    return all(state & 1 for state in vbar.get_residency()[first : last + 1])


def _given(model: Any) -> Callable[[Any, Any], Any]:
    return lambda _family, _device: model


@contextlib.contextmanager
def held(left: float) -> Iterator[None]:
    """Leave ``left`` GiB of the device's memory free, as far as others are concerned, until the context ends."""
    import torch

    torch.cuda.empty_cache()  # what PyTorch keeps is free for this process alone
    free, _ = torch.cuda.mem_get_info()
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(max(1, free - int(left * 2**30) - (600 << 20)))],  # a context takes some too
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        print(f"{torch.cuda.mem_get_info()[0] / 2**30:.1f} GiB free", flush=True)
        yield
    finally:
        holder.communicate(b"\n")


@contextlib.contextmanager
def _most_device_memory() -> Iterator[Callable[[], int]]:
    """Yield what returns the most MiB that were in use on the device beyond those at the beginning, read by the driver.

    Not PyTorch's own account: Dynamic VRAM's pages and graphs' memory are not in it.
    """
    card = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    query = ["nvidia-smi", f"--id={card}", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--loop-ms=20"]
    with tempfile.NamedTemporaryFile("w") as file:
        reader = subprocess.Popen(query, stdout=file)

        def most() -> int:
            assert reader.poll() is None  # and the file is still there
            values = [int(line) for line in Path(file.name).read_text().split("\n")[:-1]]
            return max(values) - values[0]

        try:
            yield most
        finally:
            reader.terminate()
            reader.wait()


def _bus_speed() -> float:
    """Return the bytes per second of a copy from pinned memory."""
    import torch

    source = torch.empty(_COPIED, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device="cuda")
    best = 0.0
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        best = max(best, _COPIED / (time.perf_counter() - start))
    return best


if __name__ == "__main__":
    sys.exit(main())
