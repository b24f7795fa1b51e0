"""Whether OneFlow can be used here, and its import.

The wheel says little of what it needs: its metadata names neither its CUDA libraries nor the newest numpy and
protobuf that it bears. What is missing is found out here, before it shows as a crash.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import re
import sys
from typing import Any

import torch

from .architectures import kernels_in, runs_on

HOW_TO_INSTALL = 'pip install "onediff-comfy[oneflow]" in a Python 3.10 or older (there are no wheels for newer ones)'
_BELOW = {"numpy": 2, "protobuf": 4}
"""The first major versions that OneFlow's compiled part does not understand."""


def problem(device: torch.device) -> str | None:
    """Why OneFlow cannot serve ``device`` on this machine, with the remedy; None if it can."""
    if device.type not in ("cpu", "cuda"):
        return f"OneFlow computes on the CPU and on NVIDIA GPUs, and this model runs on {device.type}"
    return _not_importable() or (_no_kernels(device) if device.type == "cuda" else None)


def oneflow() -> Any:
    """The imported module. Only after ``problem`` found none."""
    return importlib.import_module("oneflow")


@functools.cache
def _not_importable() -> str | None:
    if importlib.util.find_spec("oneflow") is None:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        return f"OneFlow is not installed in this Python {version}; {HOW_TO_INSTALL}, or choose inductor"
    for package, limit in _BELOW.items():
        version = importlib.metadata.version(package)
        if int(version.split(".")[0]) >= limit:
            return f"OneFlow needs {package} below {limit}, and {version} is here; pip install '{package}<{limit}'"
    try:
        oneflow()
    except Exception as error:
        return _explained(error)
    return None


def _explained(error: Exception) -> str:
    text = str(error)
    missing = re.search(r"(\S+\.so[.\d]*): cannot open shared object", text)
    if missing:
        return (
            f"OneFlow cannot be imported, {missing[1]} is missing; its metadata omits two packages: "
            "pip install nvidia-cublas-cu11==11.11.3.6 nvidia-cudnn-cu11==8.9.6.50"
        )
    return f"OneFlow cannot be imported ({type(error).__name__}: {text.splitlines()[0] if text else 'no message'})"


def _no_kernels(device: torch.device) -> str | None:
    """A launch on a GPU without kernels aborts the process, so this is asked before the first one."""
    if not oneflow().cuda.is_available():
        return "OneFlow sees no GPU: its driver is too old for CUDA 11, or the wheel was built without CUDA"
    capability = torch.cuda.get_device_capability(device)
    kernels = _kernels()
    if any(runs_on(kernel, capability) for kernel in kernels):
        return None
    held = ", ".join(str(kernel) for kernel in sorted(kernels))
    return (
        f"this GPU is sm_{capability[0]}{capability[1]}, and the installed OneFlow holds kernels for {held} only; "
        "inductor is the engine for this card"
    )


@functools.cache
def _kernels() -> frozenset[Any]:
    return kernels_in(oneflow())
