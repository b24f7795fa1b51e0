"""One table, in Markdown, of what `make bench` measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from .files import Report, ratio_to_eager
from .quality import verdict
from .whole import PARTS

_HEAD = (
    "of",
    "variant",
    "measured, median (least to most)",
    "against eager",
    "peak MiB",
    "PSNR to eager, dB",
    "error to float32 / eager's",
    "lossless",
    "calls reused",
)


def table(bench: Report) -> list[str]:
    """The lines of a table. A row of a model's steps takes the quality of the same variant from ``quality-MODEL``."""
    rows = [row for what, job in bench["jobs"].items() for row in _job(what, job, bench)]
    return [_line(_HEAD), _line(["---"] * len(_HEAD)), *map(_line, rows)]


def _job(what: str, job: Report, bench: Report) -> Iterator[list[str]]:
    if "report" not in job:
        yield _row(what, "", f"failed with {job['status']}")
    elif job["module"] in _ROWS:
        yield from _ROWS[job["module"]](what, job["report"], bench)


def _steps(what: str, report: Report, bench: Report) -> Iterator[list[str]]:
    for name, row in report["variants"].items():
        if "failed" in row:
            yield _row(what, name, f"failed: {row['failed']}")
            continue
        eager = f", {row['calls_eager']} calls ran eager" if row["calls_eager"] else ""
        time = f"{_spread(row, 'step_ms', '.1f')} ms a step{eager}"
        reused = f"{row['calls_reused']} of {row['calls']}" if row["calls_reused"] else ""
        yield _row(what, name, time, ratio_to_eager(report, name), row["peak_mib"], _quality(bench, what, name), reused)


def _whole(what: str, report: Report, _bench: Report) -> Iterator[list[str]]:
    for name, row in report["variants"].items():
        if "failed" in row:
            yield _row(what, name, f"failed: {row['failed']}")
            continue
        parts = ", ".join(f"{part} {row[f'{part}_s']:.3f}" for part in PARTS)
        time = f"{_spread(row, 'whole_s', '.3f')} s: {parts}"
        yield _row(what, name, time, ratio_to_eager(report, name, "whole_s"), row["peak_mib"])


def _any_card(what: str, report: Report, _bench: Report) -> Iterator[list[str]]:
    for cell, measured in report["cells"].items():
        yield from _steps(f"{what}, {cell}", measured, {"jobs": {}})


def _vae(what: str, report: Report, _bench: Report) -> Iterator[list[str]]:
    eager = {row["case"]: row["module_ms"] for row in report["rows"] if row["way"] == "eager"}
    for row in report["rows"]:
        ratio = eager[row["case"]] / row["module_ms"]
        yield _row(f"{what} {row['case']}", row["way"], f"{row['module_ms']:.1f} ms", ratio, row.get("peak_mib"))


def _restart(what: str, report: Report, _bench: Report) -> Iterator[list[str]]:
    for row in report["processes"]:
        time = f"{row['first_image_s']:.1f} s: first image of the {row['process']} process"
        yield _row(what, row["variant"], f"{time}, PyTorch {report['environment']['torch']}")


def _background(what: str, report: Report, _bench: Report) -> Iterator[list[str]]:
    found = report["background"]
    eager, meanwhile = found["eager_image_s"], found["image_meanwhile_s"]
    yield _row(what, "eager", f"{eager:.3f} s an image", 1.0)
    yield _row(what, "while another process compiles", f"{meanwhile:.3f} s an image", eager / meanwhile)


_ROWS: dict[str, Callable[[str, Report, Report], Iterator[list[str]]]] = {
    "sampling": _steps,
    "whole": _whole,
    "vae": _vae,
    "any_card": _any_card,
    "restart": _restart,
    "any_size": _background,
}
"""By script; what the others report is part of these rows."""


def _row(
    what: str,
    variant: str,
    measured: str,
    ratio: float | None = None,
    peak: float | None = None,
    quality: tuple[str, str, str] = ("", "", ""),
    reused: str = "",
) -> list[str]:
    against = "" if ratio is None else f"{ratio:.2f}x"
    return [what, variant, measured, against, "" if peak is None else f"{peak:.0f}", *quality, reused]


def _spread(row: Report, what: str, form: str) -> str:
    median, least, most = (format(row[name], form) for name in (what, f"{what}_min", f"{what}_max"))
    return f"{median} ({least} to {most})"


def _quality(bench: Report, model: str, name: str) -> tuple[str, str, str]:
    """PSNR of the median and the worst image, worst error relative to eager's, and the verdict."""
    report = bench["jobs"].get(f"quality-{model}", {}).get("report", {})
    row: dict[str, Any] = report.get("variants", {}).get(name, {})
    if "against_eager" not in row:
        return "", "", "failed" if "failed" in row else ""
    psnr, ratio = row["against_eager"]["psnr_db"], row["error_to_eagers"]
    median, worst = ("equal" if psnr[which] is None else f"{psnr[which]:.1f}" for which in ("median", "worst"))
    return f"{median} (worst {worst})", "" if ratio is None else f"{ratio:.2f}", verdict(row["lossless"])


def _line(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"
