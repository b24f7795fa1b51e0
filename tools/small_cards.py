"""The tables in docs/weights.md of models that do not fit, from one run of ``python -m benchmarks --plan any-card``.

python -m tools.small_cards            # whether they are what the files say; exit status 1 if not
python -m tools.small_cards --write    # writes them
"""

from __future__ import annotations

import statistics
import sys

from benchmarks.files import Report

from .marked_tables import ResultsTable

_RESULTS = "2026-12-01-h200-any-card.json"
_MODELS = {"flux": "A model of Flux.1-dev's size", "wan-14b": "A model of Wan 2.2's size, 33 frames"}


def lines(found: Report) -> list[str]:
    """Return a model's table: for each amount of memory left what a step takes."""
    table = [
        "| weights, memory left | ComfyUI, ms per step | OneDiff | gain | weights that do not fit |",
        "|---" * 5 + "|",
    ]
    for name, cell in sorted(found["cells"].items(), key=lambda named: float(named[1]["left_gib"])):
        variants, images = cell["variants"], cell["images"]["onediff-inductor"]
        eager, ours = (variants[variant]["step_ms"] for variant in ("eager", "onediff-inductor"))
        missing = max(0, cell["weights_bytes"] - statistics.mean(image["resident_bytes"] for image in images)) / 1e9
        table.append(f"| {name} | {eager:.0f} | {ours:.0f} | {eager / ours:.2f}x | {missing:.1f} GB |")
    what = next(iter(found["cells"].values()))["what"]
    speed = f"{found['bytes_per_second'] / 1e9:.0f} GB/s"
    return [
        *table,
        "",
        f"{_MODELS[what['model']]}, {what['size']}, {what['steps']} steps, median of {what['rounds']}.",
        f"One {found['environment']['gpu']} whose other memory was held; random weights; copies from RAM at {speed}.",
    ]


def _table(job: str) -> ResultsTable:
    """Return the table of a job of the plan."""
    command = "python -m tools.small_cards --write"
    return ResultsTable(
        "weights.md",
        job,
        _RESULTS,
        lambda found: lines(found["jobs"][job]["report"]),
        command,
    )


TABLES = tuple(map(_table, ("flux-bf16", "flux-fp8", "wan")))

if __name__ == "__main__":
    sys.exit(max(table.main(sys.argv[1:]) for table in TABLES))
