"""``make demo`` does what the README says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dev.demo import run
from dev.environment import repository

KEYS = [
    *("eager_first_s", "eager_steady_s", "speedup_first_s", "speedup_steady_s"),
    *("graphs_compiled_first", "graphs_compiled_again", "graphs_loaded"),
    *("max_abs_diff", "engine", "device", "images"),
]


@pytest.mark.slow
def test_the_demo_compiles_once_and_makes_the_same_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "demo", tmp_path / "host")
    report = json.loads((tmp_path / "demo" / "report.json").read_text())
    assert list(report) == KEYS
    assert (report["graphs_compiled_first"], report["graphs_compiled_again"], report["graphs_loaded"]) == (1, 0, 0)
    assert report["max_abs_diff"] <= 8
    assert report["engine"] == "inductor"
    assert len(report["images"]) == 8
    assert all((tmp_path / "demo" / name).read_bytes().startswith(b"\x89PNG") for name in report["images"])
    table = capsys.readouterr().out
    assert "largest pixel difference" in table and "onediff (inductor)" in table


def test_a_checkpoint_that_is_not_there_is_one_readable_line(tmp_path: Path) -> None:
    environment = {**os.environ, "CKPT": str(tmp_path / "missing.safetensors")}
    done = subprocess.run(
        [sys.executable, "-m", "dev.demo"],
        cwd=repository(),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert len(done.stderr.strip().splitlines()) == 1
    assert "missing.safetensors" in done.stderr
