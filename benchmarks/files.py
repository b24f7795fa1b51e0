"""The files that ``make bench`` writes: DATE-GPU-WHAT.json, and which one is the latest."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from dev.environment import repository

Report = dict[str, Any]


def results_folder() -> Path:
    """Where the committed results are."""
    return repository() / "benchmarks" / "results"


def file_name(report: Report, what: str) -> str:
    """DATE-GPU-WHAT.json, with the date and the GPU that the report tells."""
    environment = report["environment"]
    gpu = environment.get("gpu", "cpu").lower().removeprefix("nvidia ")
    return f"{environment['date']}-{re.sub('[^a-z0-9]+', '-', gpu)}-{what}.json"


def latest(where: Path, what: str) -> Path:
    """The newest of the files with results of ``what``.

    Raises:
        FileNotFoundError: there is none; says what is missed.
    """
    files = sorted(where.glob(f"[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]-*-{what}.json"))
    if not files:
        raise FileNotFoundError(f"no DATE-GPU-{what}.json in {where}")
    return files[-1]


def write(report: Report, output: Path | str | None) -> None:
    """Write a report as JSON, if it is wanted anywhere."""
    if output:
        Path(output).write_text(json.dumps(report, indent=1) + "\n")


def read(path: Path) -> Report:
    """What a script reported."""
    return dict(json.loads(path.read_text()))


def ratio_to_eager(report: Report, variant: str) -> float | None:
    """How many times as fast as eager a variant's step is in the same file; None if either was not measured."""
    eager, own = (report["variants"].get(name, {}).get("step_ms") for name in ("eager", variant))
    return eager / own if eager and own else None
