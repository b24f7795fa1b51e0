"""The environment in which OneFlow's tests run: a Python 3.10 with OneFlow's wheel, PyTorch and ComfyUI's requirements.

    python -m dev.oneflow_environment           makes it
    python -m dev.oneflow_environment --test    and runs tests/oneflow in it; says so where it cannot be made
    python -m dev.oneflow_environment --test --slow    runs those that are marked slow

OneFlow has no wheel for a newer Python. The interpreter is looked for (``ONEFLOW_BASE_PYTHON`` names one); without
one nothing is made, and the tests say so. Both wheels are built for CUDA; on a machine without a GPU they run on
stand-ins for its libraries (``dev/cuda_stubs.py``), 5 GB less to fetch. A second run finds its stamp and ends at once.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from . import cuda_stubs, side_environment
from .environment import TORCH, TORCH_COMPANIONS, SetupError, comfyui_path, comfyui_requirements, repository
from .interpreters import find_python
from .side_environment import SideEnvironment

WANTED_PYTHON = "3.10"  # the newest that OneFlow has a wheel for

ONEFLOW = "oneflow==0.9.0"
# What OneFlow's compiled part was built against; ComfyUI is content with both.
CONSTRAINTS = ("numpy>=1.22.1,<2", "protobuf>=3.20,<4")
ONEFLOW_REQUIREMENTS = ("numpy", "protobuf", "tqdm", "requests", "pillow", "rich")
TEST_TOOLS = ("pytest==9.0.2", "pytest-timeout==2.4.0")

_ENVIRONMENT = SideEnvironment("oneflow")


def environment_python() -> Path:
    """Return the environment's interpreter, whether or not it exists yet."""
    return _ENVIRONMENT.python


def impossible() -> str | None:
    """Why this machine cannot have the environment, with the remedy; None if it can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"OneFlow's wheel is for x86-64 Linux, and this is {sys.platform} on {platform.machine()}"
    if find_base_python() is None:
        return f"no Python {WANTED_PYTHON} was found; install one (with uv or pyenv) or set ONEFLOW_BASE_PYTHON to it"
    if any(shutil.which(tool) is None for tool in ("gcc", "nm", "readelf")):
        return "gcc, nm and readelf are needed; install build-essential"
    return None


def find_base_python() -> str | None:
    """Return a Python of the version that OneFlow needs: the one given, or one that is found."""
    return find_python(WANTED_PYTHON, os.environ.get("ONEFLOW_BASE_PYTHON"))


def ensure() -> Path:
    """Make the environment unless it is there, and return its interpreter. Prints one line per step.

    Raises:
        SetupError: a step failed, or this machine cannot have it.
    """
    reason = impossible()
    if reason is not None:
        raise SetupError(reason)
    steps = {
        "Python 3.10 environment": _make_venv,
        "PyTorch": lambda: _ENVIRONMENT.install_torch(TORCH, *TORCH_COMPANIONS),
        "ComfyUI's requirements, test tools": _install_requirements,
        "OneFlow": lambda: _ENVIRONMENT.pip("install", "--no-deps", ONEFLOW),
        "stand-ins for CUDA libraries": _make_stand_ins,
        "check: everything imports": lambda: _ENVIRONMENT.check("-c", "import torch, torchvision, torchaudio, oneflow"),
    }
    return _ENVIRONMENT.ensure(_pins_digest(), "Setting up OneFlow's environment (minutes, 5 GB, once)", steps)


def _make_venv() -> None:
    python = find_base_python()
    assert python is not None  # ensure asked
    _ENVIRONMENT.make_venv(python)


def _install_requirements() -> None:
    constraints = _ENVIRONMENT.folder / "constraints.txt"
    constraints.write_text("\n".join((*CONSTRAINTS, TORCH)))
    comfyui = comfyui_requirements((comfyui_path() / "requirements.txt").read_text())
    needed = ("torch", *comfyui, *ONEFLOW_REQUIREMENTS, *TEST_TOOLS)
    _ENVIRONMENT.pip("install", "--constraint", str(constraints), *needed)


def _make_stand_ins() -> None:
    site = _ENVIRONMENT.site_packages()
    _ENVIRONMENT.put_stand_ins_for_torch()
    oneflows = [*site.glob("oneflow.libs/*.so*"), *site.glob("oneflow/_oneflow_internal*.so")]
    _ENVIRONMENT.put_stand_ins(oneflows, site / "oneflow.libs")


def _pins_digest() -> str:
    """Return the sha256 of all that decides what is installed: another value means the environment is stale."""
    comfyui = comfyui_requirements((comfyui_path() / "requirements.txt").read_text())
    makers = [
        Path(str(module.__file__)).read_text() for module in (sys.modules[__name__], side_environment, cuda_stubs)
    ]
    return hashlib.sha256("\0".join((*makers, TORCH, *TORCH_COMPANIONS, *comfyui)).encode()).hexdigest()


def main(arguments: Sequence[str]) -> int:
    """The command line: 0 when the environment is ready and the tests passed, else 1 after one line that says why."""
    reason = impossible()
    if reason is not None and "--test" in arguments:
        print(f"OneFlow's tests are skipped: {reason}")
        return 0
    try:
        python = ensure()
    except (SetupError, OSError) as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    if "--test" not in arguments:
        return 0
    command = [str(python), "-m", "pytest", "tests/oneflow", "-m", "slow" if "--slow" in arguments else "not slow"]
    environment = {**os.environ, "GLOG_minloglevel": "3"}  # OneFlow says of every GPU library that there is no GPU
    return subprocess.run(command, cwd=repository(), env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
