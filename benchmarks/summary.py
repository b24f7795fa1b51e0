"""One table, in Markdown, of what the scripts reported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .files import Report, ratio_to_eager
from .quality import verdict

_HEAD = (
    "of",
    "variant",
    "ms, median (least to most)",
    "against eager",
    "first image, s",
    "after a restart, s",
    "peak MiB",
    "PSNR to eager, dB",
    "error to float32 / eager's",
    "lossless",
    "calls reused",
)

_TABLES_OF_THEIR_OWN = ("kernels", "cpu", "changes")
_WAYS = ("eager", "host's node", "CUDA graph", "launched")  # in which `any_size` runs a size


def table(reports: Mapping[str, Report]) -> list[str]:
    """The lines of a table.

    Args:
        reports: by what they are about: ``sampling-MODEL``, ``quality-MODEL``, ``restart-MODEL``, ``sizes-MODEL`` with
            whatever behind it, ``vae``, or ``kernels-``, ``cpu-`` and ``changes-MODEL``, which are tables of their own
            and have no row. A row of a ``sampling`` report takes from the others of its model what they know of the
            same variant; a step's time and peak memory are its own.
    """
    rows = [row for what, report in reports.items() for row in _rows(what, report, reports)]
    return [_line(_HEAD), _line(["---"] * len(_HEAD)), *map(_line, rows)]


def _rows(what: str, report: Report, reports: Mapping[str, Report]) -> Iterator[list[str]]:
    script, _, model = what.partition("-")
    if script == "sampling":
        yield from _sampling_rows(model, report, reports)
    elif what == "vae":
        yield from _vae_rows(report)
    elif script == "sizes":
        yield from _sizes_rows(report)
    elif script in _TABLES_OF_THEIR_OWN or f"sampling-{model}" in reports:  # or its figures are in those rows
        return
    else:
        names = report["variants"] if script == "quality" else {row["variant"]: row for row in report["processes"]}
        for name in names:
            yield [model, name, "", "", *_first(reports, model, name), "", *_quality(reports, model, name), ""]


def _sampling_rows(model: str, report: Report, reports: Mapping[str, Report]) -> Iterator[list[str]]:
    for name, row in report["variants"].items():
        if "failed" in row:
            yield [model, name, f"failed: {row['failed']}", *[""] * (len(_HEAD) - 3)]
            continue
        ratio = ratio_to_eager(report, name)
        eager = f", {row['calls_eager']} calls ran eager" if row["calls_eager"] else ""
        time = f"{row['step_ms']:.1f} ({row['step_ms_min']:.1f} to {row['step_ms_max']:.1f}) per step{eager}"
        _, restarted = _first(reports, model, name)
        was_there = name.startswith("onediff") and not row["first_image_compiled"]
        first = f"{row['first_image_s']:.1f}" + (" (graph was there)" if was_there else "")
        reused = f"{row['calls_reused']} of {row['calls']}" if row["calls_reused"] else ""
        against = "" if ratio is None else f"{ratio:.2f}x"
        quality = _quality(reports, model, name)
        yield [model, name, time, against, first, restarted, _number(row["peak_mib"]), *quality, reused]


def _sizes_rows(report: Report) -> Iterator[list[str]]:
    for size, row in report["ms_per_step"].items():
        for way in filter(row.__contains__, _WAYS):
            ratio = f"{row['eager'] / row[way]:.2f}x" if "eager" in row else ""
            cells = [f"{report['model']} {size}", way, f"{row[way]:.1f} per step alone", ratio]
            yield [*cells, *[""] * (len(_HEAD) - len(cells))]


def _vae_rows(report: Report) -> Iterator[list[str]]:
    eager = {row["case"]: row for row in report["rows"] if row["way"] == "eager"}
    for row in report["rows"]:
        timed = "module_ms" if "module_ms" in row else "node_ms"
        ratio = eager[row["case"]][timed] / row[timed]
        cells = [
            f"{row[timed]:.1f} ({timed.removesuffix('_ms')})",
            f"{ratio:.2f}x",
            "",
            "",
            _number(row.get("peak_mib")),
        ]
        yield [f"VAE {row['case']}", row["way"], *cells, "", "", "", ""]


def _first(reports: Mapping[str, Report], model: str, name: str) -> list[str]:
    """Seconds of the first image of a process with nothing on disk, and of a later one."""
    found = {}
    for row in reports.get(f"restart-{model}", {}).get("processes", ()):
        if row["variant"] == name:
            found[row["process"]] = f"{row['first_image_s']:.1f}"
    return [found.get(process, "") for process in ("first", "second")]


def _quality(reports: Mapping[str, Report], model: str, name: str) -> list[str]:
    """PSNR of the median and the worst image, worst error relative to eager's, and the verdict."""
    row: dict[str, Any] = reports.get(f"quality-{model}", {}).get("variants", {}).get(name, {})
    if "against_eager" not in row:
        return ["", "", "failed" if "failed" in row else ""]
    psnr, ratio = row["against_eager"]["psnr_db"], row["error_to_eagers"]
    median, worst = ("equal" if psnr[which] is None else f"{psnr[which]:.1f}" for which in ("median", "worst"))
    return [f"{median} (worst {worst})", "" if ratio is None else f"{ratio:.2f}", verdict(row["lossless"])]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def _line(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"
