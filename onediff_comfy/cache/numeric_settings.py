"""PyTorch's settings that decide on numbers: part of a graph's key, and taken over by whoever compiles it elsewhere."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

import torch

_ATTENTION_KERNELS = ("cudnn", "flash", "math", "mem_efficient")
_REDUCED = (
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)
_FP32 = ("", "cuda.matmul", "cudnn", "cudnn.conv", "cudnn.rnn")  # places in torch.backends, the widest first
_FP32_PRECISION = "fp32_precision"


def described() -> dict[str, str]:
    """Return the settings as texts, for a key."""
    now = values()
    reduced = ",".join(str(now["reduced"].get(name)) for name in _REDUCED)
    return {
        "tf32": ",".join(map(str, now["tf32"].values())),
        "reduced_precision": reduced,
        "deterministic": str(bool(now["deterministic"])),
        "attention": f"{now['attention']},{os.environ.get('TORCH_CUDNN_SDPA_PREFERRED')}",
    }


def values() -> dict[str, Any]:
    """Return what ``apply`` sets."""
    matmul = torch.backends.cuda.matmul
    return {
        "tf32": _tf32(),
        "reduced": {name: getattr(matmul, name) for name in _REDUCED if hasattr(matmul, name)},
        "deterministic": torch.get_deterministic_debug_mode(),
        "attention": {name: getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in _ATTENTION_KERNELS},
    }


def apply(settings: Mapping[str, Any]) -> None:
    """Set what ``values`` returned, maybe in another process."""
    tf32 = dict(settings["tf32"])
    if "matmul" in tf32:
        torch.set_float32_matmul_precision(tf32["matmul"])
        torch.backends.cudnn.allow_tf32 = tf32["cudnn"]
    else:
        for place, precision in tf32.items():
            setattr(_backend(place), _FP32_PRECISION, precision)
    for name, allowed in settings["reduced"].items():
        setattr(torch.backends.cuda.matmul, name, allowed)
    torch.set_deterministic_debug_mode(settings["deterministic"])
    for kernel, allowed in settings["attention"].items():
        getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(allowed)


def _tf32() -> dict[str, Any]:
    """Return how float32 is multiplied. Once somebody has set it by the newer names, PyTorch refuses the older ones."""
    try:
        return {"matmul": torch.get_float32_matmul_precision(), "cudnn": torch.backends.cudnn.allow_tf32}
    except RuntimeError:
        return {place: getattr(_backend(place), _FP32_PRECISION) for place in _FP32}


def _backend(place: str) -> Any:
    return functools.reduce(getattr, filter(None, place.split(".")), torch.backends)
