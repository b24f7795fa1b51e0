"""Tests with the releases of Python that people have, on the CPU.

    python -m dev.pythons               each of RELEASES but that of .venv
    python -m dev.pythons 3.12          one of them, or others
    python -m dev.pythons 3.13 --tests tests/unit/test_page_order.py

Each release gets an environment in .cache. An interpreter of it is looked for; where none is found that is a failure,
since nothing was tested with it.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from .environment import TORCH, TORCH_COMPANIONS, SetupError, lock_file
from .interpreters import find_python
from .other_versions import run_with_each
from .side_environment import SideEnvironment

RELEASES = tuple(
    release for release in ("3.10", "3.11", "3.12", "3.13") if release != "{}.{}".format(*sys.version_info)
)
"""What pyproject.toml names, without that of .venv, in which all tests run."""

TESTS = ("tests/unit", "tests/faults", "tests/host")
"""All but the editor, the package and a fleet, which see nothing of the interpreter that others do not."""


def ensure(release: str) -> Path:
    """Make the environment of a release, unless it is there, and return its interpreter.

    Raises:
        SetupError: no such Python was found, or a step failed.
    """
    base = find_python(release)
    if base is None:
        raise SetupError(f"no Python {release} was found; install one (with uv or pyenv)")
    environment = SideEnvironment(f"python-{release}")
    locked = ("--require-hashes", "--no-deps", "--no-compile", "--requirement", str(lock_file()))
    steps = {
        "environment": lambda: environment.make_venv(base),
        "ComfyUI's requirements and tools": lambda: environment.pip("install", *locked),
        "PyTorch": lambda: environment.install_torch(TORCH, *TORCH_COMPANIONS),
        "what PyTorch needs": lambda: environment.pip("install", "torch"),
        "stand-ins for CUDA libraries": environment.put_stand_ins_for_torch,
        "check: everything imports": lambda: environment.check("-c", "import torch, torchvision, torchaudio"),
    }
    digest = hashlib.sha256("\0".join((base, TORCH, *TORCH_COMPANIONS, lock_file().read_text())).encode()).hexdigest()
    return environment.ensure(digest, f"Setting up Python {release}", steps)


if __name__ == "__main__":
    sys.exit(run_with_each("Python", RELEASES, TESTS, ensure, sys.argv[1:]))
