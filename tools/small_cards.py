"""The tables in docs/weights.md of models that do not fit, one for each kind of weights.

python -m tools.small_cards            # whether they are what the files say; exit status 1 if not
python -m tools.small_cards --write    # writes them
"""

from __future__ import annotations

import sys

from benchmarks.files import Report

from .marked_tables import ResultsTable


def lines(found: Report) -> list[str]:
    """Return the table: for each kind of file and each amount of memory left what a step takes."""
    table = [
        "| weights, memory left | ComfyUI, ms per step | OneDiff | gain | weights that do not fit |",
        "|---" * 5 + "|",
    ]
    for name, cell in found["cells"].items():
        variants, images = cell["variants"], cell["images"]["onediff-inductor"]
        eager, ours = (variants[variant]["step_ms"] for variant in ("eager", "onediff-inductor"))
        missing = max(0, cell["weights_bytes"] - images[-1]["resident_bytes"]) / 1e9
        table.append(f"| {name} | {eager:.0f} | {ours:.0f} | {eager / ours:.2f}x | {missing:.1f} GB |")
    what = next(iter(found["cells"].values()))["what"]
    speed = f"{found['bytes_per_second'] / 1e9:.0f} GB/s"
    return [
        *table,
        "",
        f"A model of Flux.1-dev's size, {what['size']}, images of {what['steps']} steps, median of {what['rounds']}.",
        f"One {found['environment']['gpu']} whose other memory was held; random weights; copies from RAM at {speed}.",
    ]


def _table(weights: str) -> ResultsTable:
    results, command = f"2026-11-25-h200-any-card-{weights}.json", "python -m tools.small_cards --write"
    return ResultsTable("weights.md", f"small cards, {weights}", results, lines, command)


TABLES = (_table("bf16"), _table("fp8"))

if __name__ == "__main__":
    sys.exit(max(table.main(sys.argv[1:]) for table in TABLES))
