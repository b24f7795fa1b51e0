"""How tests are run with another Python or PyTorch than .venv's, and how each ended is said."""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from .environment import SetupError, repository


def run_with_each(
    what: str, versions: Sequence[str], tests: Sequence[str], ensure: Callable[[str], Path], arguments: Sequence[str]
) -> int:
    """Run tests with each version, or with those on the command line; print how each ended.

    Args:
        what: has the versions.
        versions: of it.
        tests: files and folders.
        ensure: makes the environment of a version, unless it is there, and returns its interpreter.
        arguments: of the command line.

    Returns:
        1 if some failed, or an environment could not be made, else 0.
    """
    parser = argparse.ArgumentParser(description=f"Run tests with releases of {what}.")
    parser.add_argument("versions", nargs="*", help=f"default: {', '.join(versions)}")
    parser.add_argument("--tests", nargs="+", default=tests, help=f"default: {' '.join(tests)}")
    options = parser.parse_args(arguments)
    ended = {version: _ended(f"{what} {version}", version, ensure, options) for version in options.versions or versions}
    print("", *(f"{what} {version}: {how}" for version, how in ended.items()), sep="\n", flush=True)
    return int(any(how != "passed" for how in ended.values()))


def _ended(title: str, version: str, ensure: Callable[[str], Path], options: argparse.Namespace) -> str:
    try:
        python = ensure(version)
    except (SetupError, OSError) as error:
        return f"not run: {error}"
    spread = ("--numprocesses", "2", "--dist", "loadscope", "--no-loadscope-reorder")
    command = [str(python), "-m", "pytest", "-m", "not slow", *spread, *options.tests]
    print(f"\n== {title}: {' '.join(command[1:])}", flush=True)
    status = subprocess.run(command, cwd=repository()).returncode
    return "passed" if status == 0 else f"failed ({status})"
