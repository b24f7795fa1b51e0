"""ComfyUI inside a benchmark's own process."""

from __future__ import annotations

import importlib
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from dev.environment import comfyui_path

from .files import Report, write


def start_host(dynamic_vram: bool = False, cuda_malloc: bool = True) -> None:
    """Make ComfyUI importable, that of COMFYUI_PATH or of ``make setup``; on the CPU if there is no GPU.

    Call it after the command line was read: the host parses it when it is imported, and so finds none.

    Args:
        dynamic_vram: load weights as the host's server does by default on NVIDIA, page by page.
        cuda_malloc: let the host choose PyTorch's allocator, as its server does; else it is PyTorch's own, as with the
            server's option --disable-cuda-malloc.

    Raises:
        RuntimeError: the host cannot do that here.
    """
    sys.argv = sys.argv[:1]
    sys.path.insert(0, str(comfyui_path()))
    import comfy.cli_args

    comfy.cli_args.args.disable_cuda_malloc = not cuda_malloc
    importlib.import_module("cuda_malloc")  # chooses PyTorch's allocator, as the host's main.py has it do
    import torch

    if not torch.cuda.is_available():
        comfy.cli_args.args.cpu = True
    if dynamic_vram:
        _dynamic_vram()


def reported(measure: Callable[[], Report], output: Path | str | None) -> Report:
    """What ``measure`` finds, in inference mode as the host's executor runs every node; also written to ``output``."""
    import torch

    with torch.inference_mode():
        report = measure()
    write(report, output)
    return report


def _dynamic_vram() -> None:
    """What the host's main.py does, which is not imported here for it is the server."""
    import comfy_aimdo.control

    comfy_aimdo.control.init()
    comfy_aimdo.control.set_log_warning()  # else each allocation is a line
    import comfy.memory_management
    import comfy.model_management
    import comfy.model_patcher

    devices = comfy.model_management.get_all_torch_devices()
    if not comfy_aimdo.control.init_devices((device.index, 0) for device in devices):
        raise RuntimeError("Dynamic VRAM cannot be had here: comfy-aimdo found no device that it supports")
    comfy.memory_management.aimdo_enabled = True
    comfy.model_patcher.CoreModelPatcher = comfy.model_patcher.ModelPatcherDynamic


def kinds_of_graphs(keys: Iterable[str]) -> list[str]:
    """``general`` for graphs of these keys that are for all sizes, ``exact`` for the others.

    Where a graph for one size is in the store, it answers, whether it is meant or not.
    """
    from onediff_comfy.host.process.process import library

    graphs = map(library().cache.get, keys)
    return ["gone" if graph is None else "general" if graph.shapes.general else "exact" for graph in graphs]


def seconds_of(work: Callable[[], object]) -> float:
    """Seconds until ``work`` is done, on the GPU too."""
    import torch

    start = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def waits_of(work: Callable[[], object]) -> Counter[str]:
    """How often PyTorch waits for the GPU in ``work``, by the line that has it wait."""
    import torch

    if not torch.cuda.is_available():  # then there is nothing to wait for
        work()
        return Counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found = [each for each in caught if "synchronizing CUDA operation" in str(each.message)]
    return Counter(f"{each.filename}:{each.lineno}" for each in found)
