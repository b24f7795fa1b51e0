"""The tables in docs/video.md, docs/speed.md and docs/weights.md: from the file of one `make bench`, and two beside it.

python -m tools.bench_tables            # whether they are what the file says; exit status 1 if not
python -m tools.bench_tables --write    # writes them
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from benchmarks.files import Report
from benchmarks.models import FAMILIES
from benchmarks.summary import table
from benchmarks.whole import PARTS, WHOLES

from . import readme
from .marked_tables import ResultsTable
from .readme import FASTER_PROCESSOR, RESULTS, Row, rows

_FRAMES = 4  # of a video, for each of its latents but the first
_FORMATS = {
    "bf16": "bf16",
    "fp8": "scaled fp8",
    "int8": "int8",
    "nvfp4": "nvfp4",
    "fp8-cast": "fp8, by the loader's weight_dtype",
    "fp8-full": "scaled fp8, multiplied in 16 bits",
}
_COMMAND = "python -m tools.bench_tables --write"


def whole(found: Report, *jobs: str) -> list[str]:
    """Return the table of a whole image or video, for each form of the model's weights."""
    lines = [
        "| weights | | ComfyUI, s | OneDiff | gain | peak memory, MiB: ComfyUI, OneDiff |",
        "|---" * 6 + "|",
    ]
    reports = [found["jobs"][job]["report"] for job in jobs]
    for report in reports:
        eager, ours = (report["variants"][variant] for variant in ("eager", "onediff-inductor"))
        peaks = f"{eager['peak_mib']:.0f}, {ours['peak_mib']:.0f}"
        for part in ("whole", *PARTS):
            name = report["what"]["format"] if part == "whole" else ""
            times = [row[f"{part}_s"] for row in (eager, ours)]
            gain = f"{times[0] / times[1]:.2f}x"
            memory = peaks if part == "whole" else ""
            lines.append(f"| {name} | {part} | {times[0]:.3f} | {times[1]:.3f} | {gain} | {memory} |")
    what, environment = (reports[0][part] for part in ("what", "environment"))
    latents = FAMILIES[WHOLES[what["model"]].family].frames
    frames = f", {1 + _FRAMES * (latents - 1)} frames" if latents > 1 else ""
    return [
        *lines,
        "",
        f"{what['size']}{frames}, {what['steps']} steps without negative prompts, median of {what['rounds']}.",
        f"One {environment['gpu']}; random weights of real size.",
    ]


def decoding(found: Report) -> list[str]:
    """Return the table of decoding a video by itself."""
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


def formats(found: Report) -> list[str]:
    """Return the table of one model in all forms of its weights: what a step takes, and memory with ours."""
    lines = ["| weights | ComfyUI, ms per step | OneDiff | gain | GPU memory |", "|---" * 5 + "|"]
    for kind, measured in found["formats"].items():
        eager, ours = (measured["variants"][name] for name in ("eager", "onediff-inductor"))
        times = f"{eager['step_ms']:.1f} | {ours['step_ms']:.1f} | {eager['step_ms'] / ours['step_ms']:.2f}x"
        lines.append(f"| {_FORMATS[kind]} | {times} | {ours['peak_mib'] / 1024:.1f} GB |")
    what, environment = (next(iter(found["formats"].values()))[part] for part in ("what", "environment"))
    return [
        *lines,
        "",
        f"A model of Flux.1-dev's size, {what['size']}, median of {what['rounds']}. One {environment['gpu']}.",
    ]


def _everything(found: Report) -> list[str]:
    return [*table(found), "", f"One {found['environment']['gpu']}; random weights of real size."]


def processors(found: Report) -> list[str]:
    """Return the table of each model's gain, beside that of another machine, whose processor is faster."""
    columns = ("ComfyUI, s", "OneDiff", "gain")
    head = "".join(f" | {column}" for column in (*columns, *(f"faster: {column}" for column in columns)))
    elsewhere = {row.kind: row for row in rows(readme.report(FASTER_PROCESSOR))}
    return [
        f"| model{head} |",
        "|---" * 7 + "|",
        *(f"| {row.cells(0)[0].rstrip('*')} | {_gain(row)} | {_gain(elsewhere[row.kind])} |" for row in rows(found)),
        "",
        f"*Faster*: [{FASTER_PROCESSOR}](../benchmarks/results/{FASTER_PROCESSOR}), the same GPU.",
    ]


def _gain(row: Row) -> str:
    return f"{row.eager_s:.2f} | {row.ours_s:.2f} | {row.eager_s / row.ours_s:.2f}x"


def _table(page: str, name: str, lines: Callable[[Report], list[str]], results: str = RESULTS) -> ResultsTable:
    return ResultsTable(page, name, results, lines, _COMMAND)


def _whole(name: str, *jobs: str) -> ResultsTable:
    return _table("video.md", name, lambda found: whole(found, *jobs))


TABLES = (
    _whole("Z-Image-Turbo", "z-image"),
    _whole("Qwen-Image", "qwen-image-fp8"),
    _whole("Wan 2.2", "wan-5s-fp8"),
    _table("video.md", "Wan's VAE", decoding, "2026-11-25-h200-video-vae.json"),
    _table("weights.md", "formats", formats, "2026-11-25-h200-formats.json"),
    _table("speed.md", "bench", _everything),
    _table("speed.md", "processors", processors),
)

if __name__ == "__main__":
    sys.exit(max(each.main(sys.argv[1:]) for each in TABLES))
