"""The table in docs/patches.md of what patched models gain.

python -m tools.patched_models            # whether it is what the file says; exit status 1 if not
python -m tools.patched_models --write    # writes it
"""

from __future__ import annotations

import sys

from benchmarks.files import Report

from .marked_tables import ResultsTable

_NAMES = {"none": "none", "FreeU_V2": "FreeU_V2", "image prompt": "an image prompt, in every cross-attention"}


def lines(found: Report) -> list[str]:
    """Return the table: for each patch what a step takes, and the first image with the graph on disk."""
    table = [
        "| patch | ComfyUI, ms per step | OneDiff | gain | ComfyUI, from the third step | OneDiff | first image |",
        "|---" * 7 + "|",
    ]
    for name, said in _NAMES.items():
        eager, ours = (found["patches"][name]["variants"][variant] for variant in ("eager", "onediff-inductor"))
        gain = eager["step_ms"] / ours["step_ms"]
        table.append(
            f"| {said} | {eager['step_ms']:.1f} | {ours['step_ms']:.1f} | {gain:.2f}x "
            f"| {eager['later_step_ms']:.1f} | {ours['later_step_ms']:.1f} | {ours['first_image_s']:.1f} s |"
        )
    what = found["patches"]["none"]["what"]
    return [
        *table,
        "",
        f"SDXL, {what['size']}, images of {what['steps']} steps, median of {what['rounds']}.",
        "What is once an image is in the first two columns. The first image of a process finds its graph on disk.",
        f"One {found['environment']['gpu']}; random weights; the image prompt's code is a {found['image prompt by']}.",
    ]


TABLE = ResultsTable(
    "patches.md",
    "patched models",
    "2026-11-25-h200-patched-starts.json",
    lines,
    "python -m tools.patched_models --write",
)

if __name__ == "__main__":
    sys.exit(TABLE.main(sys.argv[1:]))
