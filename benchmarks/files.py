"""Files of results: DATE-GPU-WHAT.json."""

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


def write(report: Report, output: Path | str | None) -> None:
    """Write a report as JSON, if it is wanted anywhere."""
    if output:
        Path(output).write_text(json.dumps(report, indent=1) + "\n")


def read(path: Path) -> Report:
    """What a script reported."""
    return dict(json.loads(path.read_text()))


def ratio_to_eager(report: Report, variant: str, what: str = "step_ms") -> float | None:
    """How many times as fast as eager a variant is in the same report; None if either was not measured.

    Args:
        report: of a script that times variants.
        variant: one of them.
        what: the figure that is compared.
    """
    eager, own = (report["variants"].get(name, {}).get(what) for name in ("eager", variant))
    return eager / own if eager and own else None
