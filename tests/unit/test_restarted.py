"""Two processes that share a folder of kept graphs: the second compiles nothing, unless it computes something else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def process(root: Path, folder: Path, seed: str, *scales: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, str(root / "tests" / "unit" / "restarted.py"), str(folder), *scales],
        env={**os.environ, "PYTHONPATH": str(root), "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_a_restart_compiles_nothing_and_a_proof_is_of_what_was_read(root: Path, tmp_path: Path) -> None:
    """Other hash seeds and addresses change no key. Another value in a table that the forward reads changes them."""
    (first,) = process(root, tmp_path, "1", "1.0")
    assert (first["captured"], first["compiled"], first["proved"], first["served"]) == (1, 1, 1, 1)
    again, changed = process(root, tmp_path, "2", "1.0", "2.0")
    assert again == {"loaded": 1, "served": 1}
    assert (changed["captured"], changed["compiled"], changed["proved"], changed["served"]) == (1, 1, 1, 1)
