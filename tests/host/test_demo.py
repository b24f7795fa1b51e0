"""``make demo`` does what the README says."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dev.demo import comparison, run
from dev.environment import comfyui_path, repository

KEYS = [
    *("eager_first_s", "eager_steady_s", "speedup_first_s", "speedup_steady_s"),
    *("graphs_compiled_first", "graphs_compiled_again", "graphs_loaded"),
    *("max_abs_diff", "engine", "device", "restart_first_s", "restart_compiled", "restart_loaded", "images"),
]


@pytest.mark.slow
def test_the_demo_compiles_once_and_makes_the_same_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "demo", tmp_path / "host")
    report = json.loads((tmp_path / "demo" / "report.json").read_text())
    assert list(report) == KEYS
    assert (report["graphs_compiled_first"], report["graphs_compiled_again"], report["graphs_loaded"]) == (1, 0, 0)
    assert report["max_abs_diff"] <= 8
    assert report["engine"] == "inductor"
    assert (report["restart_compiled"], report["restart_loaded"]) == (0, 1)
    assert len(report["images"]) == 8
    assert all((tmp_path / "demo" / name).read_bytes().startswith(b"\x89PNG") for name in report["images"])
    assert Image.open(tmp_path / "demo" / "compare.png").width == 3 * 384
    table = capsys.readouterr().out
    assert torch.cuda.is_available() or "Speed needs a GPU" in table
    assert "After a restart of ComfyUI the first image took" in table
    assert "largest pixel difference" in table and "onediff (inductor)" in table


@pytest.mark.slow  # test_any_size.py restarts the server; unit/test_restarted.py has two hash seeds
def test_two_clones_that_share_a_cache_folder_compile_once(tmp_path: Path) -> None:
    """With Flux, whose graphs hold functions of Python; with other hash seeds, addresses, and folders of the pack."""
    shared = {"ONEDIFF_CACHE_DIR": str(tmp_path / "cache"), "ONEDIFF_CONFIG_DIR": str(tmp_path / "config")}
    reports = []
    for name, seed in (("one", "1"), ("other", "77")):
        clone = tmp_path / name
        shutil.copytree(repository(), clone, ignore=shutil.ignore_patterns(".*", "demo", "__pycache__"))
        done = subprocess.run(
            [sys.executable, "-m", "dev.demo"],
            cwd=clone,
            env={
                **os.environ,
                **shared,
                "MODEL": "flux",
                "COMFYUI_PATH": str(comfyui_path()),
                "PYTHONHASHSEED": seed,
                "PYTHONPATH": str(clone),
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        reports.append(json.loads((clone / "demo" / "report.json").read_text()))
    compiled = [(report["graphs_compiled_first"], report["graphs_compiled_again"]) for report in reports]
    assert compiled == [(1, 0), (0, 0)]
    assert [report["graphs_loaded"] for report in reports] == [0, 1]


def test_the_comparison_shows_both_pictures_and_where_they_differ() -> None:
    pictures = [np.full((64, 96, 3), 100, np.uint8) for _ in range(2)]
    pictures[1][:, 48:] += 2  # the right half
    encoded = []
    for picture in pictures:
        file = io.BytesIO()
        Image.fromarray(picture).save(file, "PNG")
        encoded.append(file.getvalue())
    sheet = np.asarray(comparison(*encoded, ("plain", "fast", "difference")))
    assert sheet.shape == (256 + 44, 3 * 384, 3)
    at = [tuple(sheet[100, x]) for x in (10, 394, 778, 1140)]
    assert at == [(100, 100, 100), (100, 100, 100), (0, 0, 0), (254, 254, 254)]


def test_a_model_that_is_not_known_is_one_readable_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dev.demo"],
        cwd=repository(),
        env={**os.environ, "MODEL": "nothing"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) != (0, "")
    assert "MODEL is nothing; it can be sd15 or flux" in done.stderr


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
