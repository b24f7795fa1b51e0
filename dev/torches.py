"""Tests with the releases of PyTorch that people have, on the CPU.

    python -m dev.torches                   each of RELEASES
    python -m dev.torches 2.11.0 2.15.0     some of them, or others
    python -m dev.torches 2.11.0 --tests tests/unit/test_inductor.py

Each release gets an environment in .cache; all but PyTorch is that of .venv. On x86-64 Linux the registry's wheels are
built for CUDA; they run on stand-ins for its libraries (``dev/cuda_stubs.py``). An environment that is there is used.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from . import cuda_stubs
from .environment import SetupError, repository, run, step, venv_python

RELEASES = ("2.10.0", "2.11.0", "2.12.0", "2.14.0", "2.15.0")
"""Without that of .venv, in which all tests run."""

TESTS = ("tests/unit", "tests/host/test_clip_speedup.py", "tests/host/test_compile_once.py")
"""Captures, keys and each engine; and in a real ComfyUI what Inductor compiles, keeps and loads in a new process."""


def main(arguments: Sequence[str]) -> int:
    """Run the tests with each release; print how each ended. 1 if some failed, or an environment could not be made."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("releases", nargs="*", help=f"default: {', '.join(RELEASES)}")
    parser.add_argument("--tests", nargs="+", default=TESTS, help=f"default: {' '.join(TESTS)}")
    options = parser.parse_args(arguments)
    ended = {release: _ended(release, options.tests) for release in options.releases or RELEASES}
    print("", *(f"torch {release}: {how}" for release, how in ended.items()), sep="\n", flush=True)
    return int(any(how != "passed" for how in ended.values()))


def _ended(release: str, tests: Sequence[str]) -> str:
    try:
        python = ensure(release)
    except (SetupError, OSError) as error:
        return f"not run: {error}"
    spread = ("--numprocesses", "2", "--dist", "loadscope", "--no-loadscope-reorder")
    command = [str(python), "-m", "pytest", "-m", "not slow", *spread, *tests]
    print(f"\n== torch {release}: {' '.join(command[1:])}", flush=True)
    status = subprocess.run(command, cwd=repository()).returncode
    return "passed" if status == 0 else f"failed ({status})"


def ensure(release: str) -> Path:
    """Make the environment of a release, unless it is there, and return its interpreter.

    Raises:
        SetupError: a step failed.
    """
    folder = repository() / ".cache" / f"torch-{release}"
    python, stamp = folder / "bin" / "python", folder / "made"
    if stamp.is_file():
        return python
    print(f"Setting up PyTorch {release}", flush=True)
    try:
        step("environment", lambda: _make(folder))
        step(f"PyTorch {release}", lambda: _install(python, release))
        if sys.platform == "linux":
            step("stand-ins for CUDA libraries", lambda: _put_stand_ins(folder))
        step("check: it is imported", lambda: _check(python, release))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    stamp.touch()
    return python


def _make(folder: Path) -> None:
    _run(str(venv_python()), "-m", "venv", "--clear", str(folder))
    shared = sysconfig.get_path("purelib", vars=_base(venv_python().parent.parent))
    Path(sysconfig.get_path("purelib", vars=_base(folder)), "shared.pth").write_text(f"{shared}\n")


def _base(folder: Path) -> dict[str, str]:
    return {"base": str(folder), "platbase": str(folder)}


def _install(python: Path, release: str) -> None:
    # Without dependencies: CUDA's libraries are gigabytes that nothing here opens, and .venv has the others.
    pip = [str(python), "-m", "pip", "install", "--no-deps", "--ignore-installed"]
    _run(*pip, f"torch=={release}", "--disable-pip-version-check", "--no-input")


def _put_stand_ins(folder: Path) -> None:
    libraries = Path(sysconfig.get_path("platlib", vars=_base(folder)), "torch", "lib")
    try:
        cuda_stubs.make_stand_ins(sorted(libraries.glob("*.so*")), libraries)
    except (RuntimeError, subprocess.CalledProcessError) as error:
        raise SetupError(str(error)) from error


def _check(python: Path, release: str) -> None:
    code = "import sys, torch, torchvision; assert torch.__version__.split('+')[0] == sys.argv[1], torch.__version__"
    _run(str(python), "-c", code, release)


def _run(*command: str) -> None:
    log = repository() / ".cache" / "torches-setup.log"
    run(command, f"full output in {log.relative_to(repository())}", log)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
