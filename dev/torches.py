"""Tests with the releases of PyTorch that people have, on the CPU.

    python -m dev.torches                   each of RELEASES
    python -m dev.torches 2.11.0 2.15.0     some of them, or others
    python -m dev.torches 2.11.0 --tests tests/unit/test_inductor.py

Each release gets an environment in .cache; all but PyTorch is that of .venv. One that is there is used.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

from .environment import venv_python
from .other_versions import run_with_each
from .side_environment import SideEnvironment

RELEASES = ("2.10.0", "2.11.0", "2.12.0", "2.14.0", "2.15.0")
"""Without that of .venv, in which all tests run."""

TESTS = ("tests/unit", "tests/host/test_clip_speedup.py", "tests/host/test_compile_once.py")
"""Captures, keys and each engine; and in a real ComfyUI what Inductor compiles, keeps and loads in a new process."""


def ensure(release: str) -> Path:
    """Make the environment of a release, unless it is there, and return its interpreter.

    Raises:
        SetupError: a step failed.
    """
    environment = SideEnvironment(f"torch-{release}")
    code = "import sys, torch, torchvision; assert torch.__version__.split('+')[0] == sys.argv[1], torch.__version__"
    steps = {
        "environment": lambda: _make(environment),
        f"PyTorch {release}": lambda: environment.install_torch(f"torch=={release}"),
        "stand-ins for CUDA libraries": environment.put_stand_ins_for_torch,
        "check: it is imported": lambda: environment.check("-c", code, release),
    }
    return environment.ensure(sys.version, f"Setting up PyTorch {release}", steps)


def _make(environment: SideEnvironment) -> None:
    environment.make_venv(str(venv_python()))
    base = str(venv_python().parent.parent)
    shared = sysconfig.get_path("purelib", vars={"base": base, "platbase": base})
    (environment.site_packages() / "shared.pth").write_text(f"{shared}\n")


if __name__ == "__main__":
    sys.exit(run_with_each("torch", RELEASES, TESTS, ensure, sys.argv[1:]))
