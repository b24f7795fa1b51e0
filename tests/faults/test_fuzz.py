"""Files that somebody changed, through every command that reads one: no traceback, no hang, no memory without bound."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mutations import mutated
from test_store import KEY, GraphStore, Trust, make_artifact

FUZZ = Path(__file__).with_name("fuzz.py")
ROOT = FUZZ.parents[2]
_MEGABYTES = 1000


def fuzzed(folder: Path, first: int, last: int) -> dict[str, Any]:
    command = [sys.executable, str(FUZZ), str(folder), str(first), str(last)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1700, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def assert_well(result: dict[str, Any], files: int, tally: Callable[[str], None]) -> None:
    assert result["problems"] == []
    assert result["files"] == files and result["calls"] == files * 11
    assert result["refused"] > 0.9 * files, "the changes are to be such that matter"
    assert result["megabytes"] < _MEGABYTES
    assert result["slowest"] < 15
    tally(f"{files} changed files, {result['calls']} commands: no traceback; {result['megabytes']} MB at most")


def test_200_changed_files_through_every_command_that_reads_one(tmp_path: Path, tally: Callable[[str], None]) -> None:
    assert_well(fuzzed(tmp_path, 0, 200), 200, tally)


@pytest.mark.slow
def test_2000_more_changed_files_through_every_command_that_reads_one(
    tmp_path: Path, tally: Callable[[str], None]
) -> None:
    assert_well(fuzzed(tmp_path, 200, 2200), 2000, tally)


@pytest.mark.parametrize("number", [1, 4, 6])
def test_a_changed_file_on_the_command_line_itself(tmp_path: Path, number: int) -> None:
    trust = Trust(tmp_path / "config")
    path = GraphStore(tmp_path / "cache", trust).save(make_artifact())
    path.write_bytes(mutated(path.read_bytes(), number, trust.seal))
    folders = {"ONEDIFF_CACHE_DIR": str(tmp_path / "cache"), "ONEDIFF_CONFIG_DIR": str(tmp_path / "config")}
    command = [sys.executable, "-m", "onediff_comfy", "graphs", "verify"]
    environment = {**os.environ, **folders, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert KEY in done.stdout and "0 of 1 graph is whole and trusted" in done.stdout
    assert done.stderr == ""
