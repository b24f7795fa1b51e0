"""The memory that a process has, and what is in use on its device."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def memory_of_process() -> dict[str, int]:
    """Return the MiB of RAM that the process had at most, and those that it has of its own, which are no file's."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"ram": most >> 10, "anonymous": int(status["RssAnon"].split()[0]) >> 10}


def memory_of_device(device: torch.device) -> int:
    """Return the MiB in use on the device, by whomever."""
    import torch

    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return (total - free) >> 20
