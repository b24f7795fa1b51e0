"""The host's settings, carried into another process that is to see the same host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def settings() -> dict[str, Any]:
    """Return what ``take_over`` needs of this process."""
    import torch
    from comfy.cli_args import args

    from ...cache.keys import attention_kernels

    return {
        "args": dict(vars(args)),
        "threads": torch.get_num_threads(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "attention": attention_kernels(),
    }


def take_over(values: Mapping[str, Any]) -> None:
    """Apply another process's settings. Call it before anything of the host is imported that reads its settings."""
    import torch
    from comfy.cli_args import args

    vars(args).update(values["args"])
    torch.set_num_threads(values["threads"])  # kernels for a CPU are compiled for this number of threads
    torch.set_float32_matmul_precision(values["matmul_precision"])
    for kernel, allowed in values["attention"].items():
        getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(allowed)
