"""The models that benchmarks make, in a process of the host with Dynamic VRAM as far as a CPU has it."""

from __future__ import annotations

import subprocess
import sys

from dev.environment import repository

_SCRIPT = """
from benchmarks.host import start_host
start_host()
import comfy.memory_management, torch
from benchmarks.models import FAMILIES, control_shapes

def names():
    with torch.device("meta"):
        models = [set(family.build(family.dtype).state_dict()) for family in FAMILIES.values()]
    return models + [set(control_shapes(name)) for name in ("sd15", "sdxl")]

without = names()
comfy.memory_management.aimdo_enabled = True
assert names() == without
"""


def test_they_have_all_their_weights_in_dynamic_vram() -> None:
    """The host's own linear layers have none there until a file gives them some, and these are what fills the file."""
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], cwd=repository(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
