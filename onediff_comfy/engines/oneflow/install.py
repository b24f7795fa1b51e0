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

from ...messages import Message, first_line, message
from .architectures import kernels_in, runs_on

HOW_TO_INSTALL = message(
    'pip install "onediff-comfy[oneflow]" in a Python 3.10 or older (there are no wheels for newer ones)'
)
_BELOW = {"numpy": 2, "protobuf": 4}
"""The first major versions that OneFlow's compiled part does not understand."""


def problem(device: torch.device) -> Message | None:
    """Why OneFlow cannot serve ``device`` on this machine, with the remedy; None if it can."""
    if device.type not in ("cpu", "cuda"):
        return message(
            "OneFlow computes on the CPU and on NVIDIA GPUs, and this model runs on {device}", device=device.type
        )
    return _not_importable() or (_no_kernels(device) if device.type == "cuda" else None)


def oneflow() -> Any:
    """The imported module. Only after ``problem`` found none."""
    return importlib.import_module("oneflow")


@functools.cache
def _not_importable() -> Message | None:
    if importlib.util.find_spec("oneflow") is None:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        return message(
            "OneFlow is not installed in this Python {version}; {how}, or choose inductor",
            version=version,
            how=HOW_TO_INSTALL,
        )
    for package, limit in _BELOW.items():
        version = importlib.metadata.version(package)
        if int(version.split(".")[0]) >= limit:
            return message(
                "OneFlow needs {package} below {limit}, and {version} is here; pip install '{package}<{limit}'",
                package=package,
                limit=limit,
                version=version,
            )
    try:
        oneflow()
    except Exception as error:
        return _explained(error)
    return None


def _explained(error: Exception) -> Message:
    missing = re.search(r"(\S+\.so[.\d]*): cannot open shared object", str(error))
    if missing:
        return message(
            "OneFlow cannot be imported, {library} is missing; its metadata omits two packages: "
            "pip install nvidia-cublas-cu11==11.11.3.6 nvidia-cudnn-cu11==8.9.6.50",
            library=missing[1],
        )
    return message(
        "OneFlow cannot be imported ({kind}: {first_line})",
        kind=type(error).__name__,
        first_line=first_line(error),
    )


def _no_kernels(device: torch.device) -> Message | None:
    """A launch on a GPU without kernels aborts the process, so this is asked before the first one."""
    if not oneflow().cuda.is_available():
        return message("OneFlow sees no GPU: its driver is too old for CUDA 11, or the wheel was built without CUDA")
    capability = torch.cuda.get_device_capability(device)
    kernels = _kernels()
    if any(runs_on(kernel, capability) for kernel in kernels):
        return None
    held = ", ".join(str(kernel) for kernel in sorted(kernels))
    return message(
        "this GPU is sm_{major}{minor}, and the installed OneFlow holds kernels for {held} only; "
        "inductor is the engine for this card",
        major=capability[0],
        minor=capability[1],
        held=held,
    )


@functools.cache
def _kernels() -> frozenset[Any]:
    return kernels_in(oneflow())
