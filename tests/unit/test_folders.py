"""folders.py and what reads environment variables: a user without a home, and numbers that are none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dev.environment import repository
from onediff_comfy.store import store

_WITHOUT_HOME = """
import os, sys
from pathlib import Path
def home():
    raise RuntimeError("Could not determine home directory.")
Path.home = home
from onediff_comfy.folders import cache_folder, config_folder
from onediff_comfy.store.store import default_store
folders = [cache_folder(), config_folder()]
assert folders == [cache_folder(), config_folder()] and folders[0] != folders[1]
assert os.environ["ONEDIFF_CACHE_DIR"] == str(folders[0])  # processes that it starts write there, too
default_store().notes.write("kind", "name", 1)
assert default_store().notes.read("kind", "name") == 1
assert folders[0].parent.stat().st_mode & 0o077 == 0
print(folders[0].parent)
"""


def test_a_user_without_a_home_has_graphs_for_the_process(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ONEDIFF_", "XDG_"))}
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_HOME],
        cwd=repository(),
        env={**environment, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("has no home folder") == 1
    assert not Path(done.stdout.strip()).exists()


@pytest.mark.parametrize(
    ("value", "limit"), [("3", 3 << 20), ("0", 0), *((v, None) for v in ("²", "9" * 5000, "-1", "x"))]
)
def test_a_limit_that_is_no_number_is_none(monkeypatch: pytest.MonkeyPatch, value: str, limit: Any) -> None:
    monkeypatch.setenv("ONEDIFF_CACHE_LIMIT_MB", value)
    assert store._limit() == (store.DISK_LIMIT_BYTES if limit is None else limit)
