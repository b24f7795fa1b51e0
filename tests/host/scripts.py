"""Scripts of this folder that import the host, each in a process of its own, and what they print."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dev.environment import OTHER_COMFYUI, comfyui_path, other_comfyui_path, repository
from tools.models.checkpoints import checkpoint_file, ensure_checkpoints

EVERY_HOST = ["this one", *(pytest.param(version, marks=pytest.mark.slow) for version in OTHER_COMFYUI)]
"""For a fixture's ``params``: names of the hosts that are there, for ``path_of_host``."""


def path_of_host(name: str) -> Path:
    return comfyui_path() if name == "this one" else other_comfyui_path(name)


def checkpoint_of(name: str) -> Path:
    """The file of a tiny checkpoint, which is made if it is not there."""
    checkpoints = repository() / ".cache" / "checkpoints"
    ensure_checkpoints(comfyui_path(), checkpoints, [name])
    return checkpoints / checkpoint_file(name)


def printed_by(script: str, *arguments: Path | str) -> Any:
    """What a script printed as JSON in its last line; fails the test if the script failed."""
    command = [sys.executable, str(Path(__file__).with_name(script)), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
