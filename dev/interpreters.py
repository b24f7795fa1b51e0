"""Where other releases of Python than the running one may be: on the path, of pyenv, or of uv."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path


def find_python(version: str, given: str | None = None) -> str | None:
    """Return an interpreter of this version that can make environments, None if none is found.

    Args:
        version: such as 3.12.
        given: the only one to look at, if somebody has named one.
    """
    for candidate in [given] if given else _candidates(version):
        if _version(candidate) == version:
            return candidate
    return None


def _candidates(version: str) -> Iterator[str]:
    yield f"python{version}"
    for root in (os.environ.get("PYENV_ROOT"), Path.home() / ".pyenv"):
        if root:
            yield from map(str, sorted(Path(root).glob(f"versions/{version}.*/bin/python")))
    if shutil.which("uv"):
        found = subprocess.run(["uv", "python", "find", "--no-project", version], capture_output=True, text=True)
        if found.returncode == 0:
            yield found.stdout.strip()


def _version(python: str) -> str | None:
    code = "import sys, ensurepip; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
