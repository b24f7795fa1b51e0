"""The host's settings, carried into another process that is to see the same host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def settings() -> dict[str, Any]:
    """Return what ``take_over`` needs of this process."""
    import torch
    from comfy.cli_args import args

    from ...cache import numeric_settings

    return {
        "args": dict(vars(args)),
        "threads": torch.get_num_threads(),
        "numeric": numeric_settings.values(),
    }


def take_over(values: Mapping[str, Any]) -> None:
    """Apply another process's settings. Call it before anything of the host is imported that reads its settings."""
    import torch
    from comfy.cli_args import args

    vars(args).update(values["args"])
    torch.set_num_threads(values["threads"])  # kernels for a CPU are compiled for this number of threads


def take_over_numbers(values: Mapping[str, Any]) -> None:
    """Apply those that decide on numbers. Call it once the host is imported, which sets some of them itself."""
    from ...cache import numeric_settings

    numeric_settings.apply(values["numeric"])
