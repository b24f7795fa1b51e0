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
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from . import cuda_stubs
from .environment import (
    TORCH,
    TORCH_COMPANIONS,
    SetupError,
    comfyui_path,
    comfyui_requirements,
    repository,
    run,
    step,
)

WANTED_PYTHON = "3.10"  # the newest that OneFlow has a wheel for

ONEFLOW = "oneflow==0.9.0"
# What OneFlow's compiled part was built against; ComfyUI is content with both.
CONSTRAINTS = ("numpy>=1.22.1,<2", "protobuf>=3.20,<4")
ONEFLOW_REQUIREMENTS = ("numpy", "protobuf", "tqdm", "requests", "pillow", "rich")
TEST_TOOLS = ("pytest==9.0.2", "pytest-timeout==2.4.0")


def environment_python() -> Path:
    """The environment's interpreter, whether or not it exists yet."""
    return _folder() / "bin" / "python"


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
    """A Python of the version that OneFlow needs: the one given, on the path, of pyenv, or of uv."""
    for candidate in _candidates():
        if _version(candidate) == WANTED_PYTHON:
            return candidate
    return None


def ensure() -> Path:
    """Make the environment, or what is missing of it, and return its interpreter. Prints one line per step.

    Raises:
        SetupError: a step failed, or this machine cannot have it.
    """
    reason = impossible()
    if reason is not None:
        raise SetupError(reason)
    if _stamp().is_file() and _stamp().read_text() == _pins_digest() and environment_python().exists():
        return environment_python()
    start = time.monotonic()
    _log().parent.mkdir(parents=True, exist_ok=True)
    _log().write_text("")
    print("Setting up OneFlow's environment (minutes, 5 GB, once)", flush=True)
    step("Python 3.10 environment", _make_venv)
    step("PyTorch", _install_torch)
    step("ComfyUI's requirements, test tools", _install_requirements)
    step("OneFlow", _install_oneflow)
    step("stand-ins for CUDA libraries", _make_stand_ins)
    step("check: everything imports", _check)
    _stamp().write_text(_pins_digest())
    print(f"Ready in {time.monotonic() - start:.0f} s", flush=True)
    return environment_python()


# -- the interpreter -------------------------------------------------------------------------------


def _candidates() -> Iterator[str]:
    given = os.environ.get("ONEFLOW_BASE_PYTHON")
    if given:
        yield given
        return
    yield f"python{WANTED_PYTHON}"
    for root in (os.environ.get("PYENV_ROOT"), Path.home() / ".pyenv"):
        if root:
            yield from map(str, sorted(Path(root).glob(f"versions/{WANTED_PYTHON}.*/bin/python")))
    if shutil.which("uv"):
        found = subprocess.run(["uv", "python", "find", "--no-project", WANTED_PYTHON], capture_output=True, text=True)
        if found.returncode == 0:
            yield found.stdout.strip()


def _version(python: str) -> str | None:
    code = "import sys, ensurepip; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


# -- the steps -------------------------------------------------------------------------------------


def _make_venv() -> None:
    python = find_base_python()
    assert python is not None  # ensure asked
    _run(python, "-m", "venv", "--clear", str(_folder()))


def _install_torch() -> None:
    _pip("install", "--no-deps", TORCH, *TORCH_COMPANIONS)
    # pip would add 5 GB of CUDA libraries as soon as it installs anything that needs torch.
    (metadata,) = _site_packages().glob(f"{TORCH.replace('==', '-')}*.dist-info/METADATA")
    needs_cuda = re.compile(r"^Requires-Dist: (nvidia|cuda|triton).*\n", re.MULTILINE)
    metadata.write_text(needs_cuda.sub("", metadata.read_text()))


def _install_requirements() -> None:
    constraints = _folder() / "constraints.txt"
    constraints.write_text("\n".join((*CONSTRAINTS, TORCH)))
    comfyui = comfyui_requirements((comfyui_path() / "requirements.txt").read_text())
    _pip("install", "--constraint", str(constraints), "torch", *comfyui, *ONEFLOW_REQUIREMENTS, *TEST_TOOLS)


def _install_oneflow() -> None:
    _pip("install", "--no-deps", ONEFLOW)


def _make_stand_ins() -> None:
    site = _site_packages()
    torch_libraries = site / "torch" / "lib"
    try:
        cuda_stubs.make_stand_ins(torch_libraries.glob("*.so"), torch_libraries)
        oneflow_libraries = [*site.glob("oneflow.libs/*.so*"), *site.glob("oneflow/_oneflow_internal*.so")]
        cuda_stubs.make_stand_ins(oneflow_libraries, site / "oneflow.libs")
    except subprocess.CalledProcessError as error:
        raise SetupError(f"{error.cmd[0]} failed: {error.stderr}") from error


def _check() -> None:
    _run(str(environment_python()), "-c", "import torch, torchvision, torchaudio, oneflow")


# -- how steps run ---------------------------------------------------------------------------------


def _folder() -> Path:
    return repository() / ".cache" / "oneflow"


def _site_packages() -> Path:
    return _folder() / "lib" / f"python{WANTED_PYTHON}" / "site-packages"


def _log() -> Path:
    return repository() / ".cache" / "oneflow-setup.log"


def _stamp() -> Path:
    return _folder() / "onediff-setup.sha256"


def _pins_digest() -> str:
    """sha256 over all that decides what is installed: another value means the environment is stale."""
    comfyui = comfyui_requirements((comfyui_path() / "requirements.txt").read_text())
    makers = (Path(__file__).read_text(), Path(cuda_stubs.__file__).read_text())
    return hashlib.sha256("\0".join((*makers, TORCH, *TORCH_COMPANIONS, *comfyui)).encode()).hexdigest()


def _pip(*arguments: str) -> None:
    _run(str(environment_python()), "-m", "pip", *arguments, "--disable-pip-version-check", "--no-input")


def _run(*command: str) -> None:
    run(command, f"full output in {_log().relative_to(repository())}", _log())


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
