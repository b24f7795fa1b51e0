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
from pathlib import Path
from typing import Any

import torch

from ...messages import Message, first_line, message
from .architectures import OF_THE_RELEASE, RELEASE, Kernels, kernels_in, runs_on

HOW_TO_INSTALL = message(
    'pip install "onediff-comfy[oneflow]" in a Python 3.10 or older (there are no wheels for newer ones)'
)
_BELOW = {"numpy": 2, "protobuf": 4}
"""The first major versions that OneFlow's compiled part does not understand."""


def problem(device: torch.device) -> Message | None:
    """Why OneFlow cannot serve ``device`` on this machine, with the remedy; None if it can."""
    kind = "hip" if device.type == "cuda" and torch.version.hip else device.type  # AMD's GPUs pass for CUDA's
    if kind not in ("cpu", "cuda"):
        return message("OneFlow computes on the CPU and on NVIDIA GPUs, and this model runs on {device}", device=kind)
    if kind == "cpu":
        return _not_importable()
    return _no_kernels(device) or _not_importable() or _no_driver()


def oneflow() -> Any:
    """The imported module. Only after ``problem`` found none."""
    return importlib.import_module("oneflow")


@functools.cache
def _not_importable() -> Message | None:
    if _folder() is None:
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
    """A launch on a GPU without kernels ends the process, so this is asked before the first one.

    And before anything that a person could install or mend: for such a card it would be in vain.
    """
    name, kernels = _held()
    if not kernels:
        return message("{oneflow} holds no kernels for GPUs; inductor is the engine for this card", oneflow=name)
    capability = torch.cuda.get_device_capability(device)
    if any(runs_on(kernel, capability) for kernel in kernels):
        return None
    return message(
        "this GPU is sm_{major}{minor}, and {oneflow} holds kernels for {held} only; "
        "inductor is the engine for this card",
        major=capability[0],
        minor=capability[1],
        oneflow=name,
        held=", ".join(str(kernel) for kernel in sorted(kernels)),
    )


@functools.cache
def _held() -> tuple[Message, frozenset[Kernels]]:
    """The OneFlow that is here, or the one that could be, and what it has kernels for."""
    folder = _folder()
    if folder is None:
        return message("OneFlow {version}, the release that pip installs,", version=RELEASE), OF_THE_RELEASE
    return message("the installed OneFlow"), kernels_in(folder)


def _folder() -> Path | None:
    """Where OneFlow is installed. It is not imported for this."""
    spec = importlib.util.find_spec("oneflow")
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def _no_driver() -> Message | None:
    if oneflow().cuda.is_available():
        return None
    return message("OneFlow sees no GPU: its driver is too old for CUDA 11")
