"""An environment in .cache beside .venv: for tests with another Python, another PyTorch, or with OneFlow.

PyTorch's wheels for x86-64 Linux are built for CUDA. On a machine without a GPU they run on stand-ins for its libraries
(``dev/cuda_stubs.py``), gigabytes less to fetch.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from . import cuda_stubs
from .environment import SetupError, repository, run, step

_NEEDS_CUDA = re.compile(r"^Requires-Dist: (nvidia|cuda|triton).*\n", re.MULTILINE)


class SideEnvironment:
    """An environment, whether or not it exists yet.

    Attributes:
        folder: in .cache.
    """

    def __init__(self, name: str) -> None:
        self.folder = repository() / ".cache" / name
        self._log = self.folder.with_name(f"{name}-setup.log")

    @property
    def python(self) -> Path:
        """Return its interpreter."""
        folder, name = ("Scripts", "python.exe") if os.name == "nt" else ("bin", "python")
        return self.folder / folder / name

    def ensure(self, digest: str, title: str, steps: Mapping[str, Callable[[], None]]) -> Path:
        """Make it anew unless it is there, and was made by the same digest. Return its interpreter.

        Args:
            digest: of all that decides what is in it.
            title: what is printed before it is made.
            steps: by name; each gets a line.

        Raises:
            SetupError: a step failed. Nothing is left of it then.
        """
        stamp = self.folder / "onediff-setup.sha256"
        if stamp.is_file() and stamp.read_text() == digest and self.python.exists():
            return self.python
        start = time.monotonic()
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._log.write_text("")
        print(title, flush=True)
        try:
            for name, work in steps.items():
                step(name, work)
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        stamp.write_text(digest)
        print(f"Ready in {time.monotonic() - start:.0f} s", flush=True)
        return self.python

    def make_venv(self, base: str) -> None:
        """Make an empty environment of an interpreter."""
        self._run(base, "-m", "venv", "--clear", str(self.folder))

    def site_packages(self) -> Path:
        """Return where its packages are."""
        code = "import sysconfig; print(sysconfig.get_path('platlib'))"
        return Path(subprocess.check_output([str(self.python), "-c", code], text=True).strip())

    def pip(self, *arguments: str) -> None:
        """Run pip in it."""
        self.check("-m", "pip", *arguments, "--disable-pip-version-check", "--no-input")

    def check(self, *arguments: str) -> None:
        """Run its interpreter.

        Raises:
            SetupError: it ended with an error.
        """
        self._run(str(self.python), *arguments)

    def install_torch(self, requirement: str, *companions: str) -> None:
        """Install a PyTorch without what it needs; on Linux so that pip does not add CUDA's libraries later."""
        self.pip("install", "--no-deps", "--ignore-installed", requirement, *companions)
        for metadata in self.site_packages().glob(f"{requirement.replace('==', '-')}*.dist-info/METADATA"):
            metadata.write_text(_NEEDS_CUDA.sub("", metadata.read_text()))

    def put_stand_ins(self, libraries: Iterable[Path], folder: Path) -> None:
        """Put stand-ins beside libraries for those of CUDA that they need. On Linux alone: others have other wheels.

        Raises:
            SetupError: the tools for it are missing, or failed.
        """
        if sys.platform != "linux":
            return
        try:
            cuda_stubs.make_stand_ins(sorted(libraries), folder)
        except RuntimeError as error:
            raise SetupError(str(error)) from error
        except subprocess.CalledProcessError as error:
            raise SetupError(f"{error.cmd[0]} failed: {error.stderr}") from error

    def put_stand_ins_for_torch(self) -> None:
        """Put stand-ins where PyTorch's libraries are."""
        libraries = self.site_packages() / "torch" / "lib"
        self.put_stand_ins(libraries.glob("*.so*"), libraries)

    def _run(self, *command: str) -> None:
        run(command, f"full output in {self._log.relative_to(repository())}", self._log)
