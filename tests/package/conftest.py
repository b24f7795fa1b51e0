"""What the pack is distributed as, built from a clean copy of the repository."""

from __future__ import annotations

import importlib.util
import os
import shutil
import site
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from environments import Environment

from dev.environment import repository


@pytest.fixture(scope="session")
def tracked() -> list[str]:
    """The repository's files: those in git and new ones that git would take."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        done = subprocess.run(command, cwd=repository(), capture_output=True, text=True)
    except OSError:
        pytest.skip("there is no git to ask which files are the repository's")
    if done.returncode:
        pytest.skip("this is no git checkout, so which files are the repository's is not known")
    return sorted({name for name in done.stdout.split("\0") if (repository() / name).is_file()})


@pytest.fixture(scope="session")
def distributions(tracked: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the sdist, and the wheel that is built from that sdist."""
    if importlib.util.find_spec("build") is None:
        pytest.fail("the environment is older than dev/requirements.lock; run make setup")
    source = tmp_path_factory.mktemp("source")
    for name in tracked:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(repository() / name, source / name)
    # Without isolation: that would fetch setuptools.
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(source / "dist"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=source)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return source / "dist"


@pytest.fixture(scope="session")
def make_environment(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Environment]:
    def make() -> Environment:
        if os.name == "nt":
            pytest.skip("the environment here is laid out as on Linux and macOS")
        environment = Environment(tmp_path_factory.mktemp("environment"))
        command = [sys.executable, "-m", "venv", "--without-pip", str(environment.folder)]
        subprocess.run(command, check=True, capture_output=True)
        (packages,) = environment.folder.glob("lib/python*/site-packages")
        (packages / "tests_environment.pth").write_text("\n".join(site.getsitepackages()))
        return environment

    return make
