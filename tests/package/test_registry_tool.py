"""A dry run of ComfyUI's own tool for publishing, where it is installed: all that it does without a token."""

from __future__ import annotations

import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
from test_distributions import registry_archive

from dev.environment import repository

COMFY = shutil.which("comfy")


@pytest.mark.skipif(
    COMFY is None, reason="comfy-cli is not installed; it is a third of a gigabyte: pip install comfy-cli"
)
def test_the_tool_validates_and_packs_the_repository(tracked: list[str], tmp_path: Path) -> None:
    for name in tracked:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(repository() / name, tmp_path / name)
    for command in (["init", "--quiet"], ["add", "--all"]):  # it packs what git tracks
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    for action in ("validate", "pack"):
        done = subprocess.run(
            [str(COMFY), "--skip-prompt", "--no-enable-telemetry", "node", action],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    (archive,) = tmp_path.glob("*.zip")
    with zipfile.ZipFile(archive) as packed:
        assert set(packed.namelist()) == set(registry_archive(tracked))
