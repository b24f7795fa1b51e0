"""Virtual environments to install into."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Environment:
    """A virtual environment of its own that sees the packages of the one that runs the tests."""

    folder: Path

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """A program of the environment, by its name."""
        program = str(self.folder / "bin" / command[0])
        return subprocess.run([program, *command[1:]], capture_output=True, text=True, cwd=self.folder)
