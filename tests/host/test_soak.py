"""A thousand images of random shapes while graphs are short of memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import soak

from dev.environment import comfyui_path, repository
from dev.host import ComfyServer
from tools.models.checkpoints import checkpoint_file

IMAGES = 1000


@pytest.mark.slow
def test_a_thousand_images_in_too_little_memory(
    server: ComfyServer, tmp_path: Path, tally: Callable[[str], None]
) -> None:
    report_file = tmp_path / "report.json"
    arguments = [comfyui_path(), server.checkpoints / checkpoint_file("flux_min"), IMAGES, report_file]
    # What the shared server compiled need not be compiled again.
    folders = {
        "ONEDIFF_CACHE_DIR": server.base_dir / "onediff-cache",
        "ONEDIFF_CONFIG_DIR": server.base_dir / "onediff-config",
        "TORCHINDUCTOR_CACHE_DIR": tmp_path / "inductor",
        "PYTHONPATH": repository(),
    }
    done = subprocess.run(
        [sys.executable, soak.__file__, *map(str, arguments)],
        cwd=repository(),
        env={**os.environ, **{name: str(folder) for name, folder in folders.items()}},
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(report_file.read_text())
    counted, memory = report["counted"], report["memory_mb"]
    grown = memory[-1] - memory[len(memory) // 2 - 1]
    tally(
        f"soak: {IMAGES} random images, {report['graphs']} graphs of {report['all_graphs_bytes'] >> 10} KB in "
        f"{report['budget_bytes'] >> 10} KB: {counted['evicted']} evicted, {counted['loaded']} loaded again, at most "
        f"{report['most_held_bytes'] >> 10} KB held; {report['compared']} compared with eager, worst "
        f"{report['worst_difference']:.1e}; memory {grown:+.0f} MB in the second half"
    )
    assert counted["evicted"] >= 20
    assert report["most_held_bytes"] <= report["budget_bytes"]
    assert (counted["captured"], counted["compiled"], counted["retired"], counted["failed"]) == (0, 0, 0, 0)
    assert (counted["served"], report["fallbacks"]) == (IMAGES, {})
    assert report["compared"] == IMAGES // soak.COMPARED_EVERY
    assert report["worst_difference"] <= 1e-4  # as pictures.assert_same_picture explains
    # Measured: 4 MB. The half loads a graph of 1.5 MB a hundred times; one in four of them kept would show.
    assert grown <= 40
