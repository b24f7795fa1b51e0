"""The tables in docs/video.md: models of few steps, and decoding a video.

python -m tools.few_steps            # whether they are what the files say; exit status 1 if not
python -m tools.few_steps --write    # writes them
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from benchmarks.files import Report
from benchmarks.models import FAMILIES

from .marked_tables import ResultsTable

_FRAMES = 4  # of a video, for each of its latents but the first
_COMMAND = "python -m tools.few_steps --write"


def steps(found: Report) -> list[str]:
    """Return the table of a model: what a step takes, for each form of its weights."""
    table = [
        "| weights | ComfyUI, ms per step | OneDiff | gain | peak memory, MiB: ComfyUI, OneDiff |",
        "|---" * 5 + "|",
    ]
    reports = found.get("formats", {"bf16": found})
    for name, report in reports.items():
        eager, ours = (report["variants"][variant] for variant in ("eager", "onediff-inductor"))
        gain = f"{eager['step_ms'] / ours['step_ms']:.2f}x"
        peaks = f"{eager['peak_mib']:.0f}, {ours['peak_mib']:.0f}"
        table.append(f"| {name} | {eager['step_ms']:.1f} | {ours['step_ms']:.1f} | {gain} | {peaks} |")
    what, environment = (next(iter(reports.values()))[part] for part in ("what", "environment"))
    latents = FAMILIES[what["model"]].frames
    frames = f", {1 + _FRAMES * (latents - 1)} frames" if latents > 1 else ""
    return [
        *table,
        "",
        f"{what['size']}{frames}, {what['steps']} steps without negative prompts, median of {what['rounds']}.",
        f"One {environment['gpu']}; random weights of real size.",
    ]


def decoding(found: Report) -> list[str]:
    """Return the table of decoding a video."""
    eager, ours = found["ways"]["eager"], found["ways"]["ours"]
    what = found["what"]
    return [
        "| ComfyUI, s | OneDiff | gain | peak memory, MiB: ComfyUI, OneDiff |",
        "|---" * 4 + "|",
        f"| {eager['s']:.2f} | {ours['s']:.2f} | {eager['s'] / ours['s']:.2f}x | "
        f"{eager['peak_mib']:.0f}, {ours['peak_mib']:.0f} |",
        "",
        f"{what['size']}, {what['frames']} frames, median of {what['rounds']}.",
        f"One {found['environment']['gpu']}; random weights of real size.",
    ]


def _table(name: str, results: str, lines: Callable[[Report], list[str]]) -> ResultsTable:
    return ResultsTable("video.md", name, f"2026-11-25-h200-{results}.json", lines, _COMMAND)


TABLES = (
    _table("Z-Image-Turbo", "z-image", steps),
    _table("Qwen-Image", "qwen-image", steps),
    _table("Wan 2.2", "wan-81-frames", steps),
    _table("Wan's VAE", "video-vae", decoding),
)

if __name__ == "__main__":
    sys.exit(max(table.main(sys.argv[1:]) for table in TABLES))
