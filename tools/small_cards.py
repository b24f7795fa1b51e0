"""The table in docs/weights.md of models that do not fit, from one file of results: nobody types a figure.

python -m tools.small_cards            # whether it is what the file says; exit status 1 if not
python -m tools.small_cards --write    # writes it
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.files import Report, read, results_folder
from dev.environment import repository

from .marked_tables import with_table

RESULTS = "2026-11-25-h200-any-card-six-steps.json"
PAGE = repository() / "docs" / "weights.md"
NAME = "small cards"


def report() -> Report:
    """Return what the one file says."""
    return read(results_folder() / RESULTS)


def table(found: Report) -> str:
    """Return the table: for each kind of file and each amount of memory left what a step takes."""
    lines = [
        "| weights, memory left | ComfyUI, ms per step | OneDiff | gain | weights that do not fit |",
        "|---" * 5 + "|",
    ]
    for name, cell in found["cells"].items():
        variants, images = cell["variants"], cell["images"]["onediff-inductor"]
        eager, ours = (variants[variant]["step_ms"] for variant in ("eager", "onediff-inductor"))
        missing = max(0, cell["weights_bytes"] - images[-1]["resident_bytes"]) / 1e9
        lines.append(f"| {name} | {eager:.0f} | {ours:.0f} | {eager / ours:.2f}x | {missing:.1f} GB |")
    environment = found["environment"]
    what = next(iter(found["cells"].values()))["what"]
    speed = f"{found['bytes_per_second'] / 1e9:.0f} GB/s"
    lines += [
        "",
        f"A model of Flux.1-dev's size, {what['size']}, images of {what['steps']} steps, median of {what['rounds']}.",
        f"One {environment['gpu']} whose other memory was held; random weights; copies from RAM at {speed}.",
        f"Source: [{RESULTS}](../benchmarks/results/{RESULTS}).",
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Return 0 if the page is what the file says, or was written so."""
    text = PAGE.read_text(encoding="utf-8")
    made = with_table(text, NAME, table(report()))
    if "--write" in arguments:
        PAGE.write_text(made, encoding="utf-8")
        return 0
    if made != text:
        print(f"{PAGE.name} is not what {RESULTS} says: python -m tools.small_cards --write")
    return int(made != text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
