"""Draw the README's plots from the files in benchmarks/results.

    python -m benchmarks.plots [--results FOLDER] [--output FOLDER]

    speed-MODEL.svg      milliseconds per step of each variant, and how many times as fast as eager that is
    quality-MODEL.svg    speed against PSNR of the variants that leave out work

Each is drawn from the newest files of what it shows. Where a file is missing its plot is not drawn, and it is named.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from .files import Report, latest, ratio_to_eager, read, results_folder
from .variants import Variant

_NO_MATPLOTLIB = "plots need matplotlib, which make setup installs; or pip install matplotlib"
_COLOURS = {"eager": "#8a8f98", "torch_compile": "#c98a2b", "onediff": "#1a73e8"}


@dataclass(frozen=True)
class Bar:
    """A variant's milliseconds per step: median, least, most; and how many times as fast as eager, if that is known."""

    variant: str
    ms: float
    least: float
    most: float
    ratio: float | None


@dataclass(frozen=True)
class Point:
    """A lossy variant: how many times as fast as eager; PSNR in dB against eager, of the median image and the worst."""

    variant: str
    ratio: float
    psnr: float
    worst: float


def main() -> int:
    """Draw what can be drawn; 1 if something cannot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=results_folder(), help="where the JSON files are")
    parser.add_argument("--output", type=Path, help="where plots are written (default: plots, beside the JSON files)")
    parser.add_argument("--speed", default="sdxl,sd15,flux", help="models to draw the speed of")
    parser.add_argument("--quality", default="sdxl", help="models to draw quality against speed of")
    options = parser.parse_args()
    plots: dict[str, Callable[[], Any]] = {}
    plots |= {f"speed-{m}": partial(_speed_plot, options.results, m) for m in options.speed.split(",")}
    plots |= {f"quality-{m}": partial(_quality_plot, options.results, m) for m in options.quality.split(",")}
    return draw(plots, options.output or options.results / "plots")


def draw(plots: dict[str, Callable[[], Any]], output: Path) -> int:
    """Write each plot into a folder, under its name. 1 if one could not be drawn; says which and why."""
    try:
        import matplotlib as mpl
    except ImportError:
        print(_NO_MATPLOTLIB, file=sys.stderr, flush=True)
        return 1
    output.mkdir(parents=True, exist_ok=True)
    status = 0
    for name, plot in plots.items():
        try:
            with mpl.rc_context({"svg.hashsalt": name}):  # the same results give the same file
                plot().savefig(output / f"{name}.svg", metadata={"Date": None})
            print(f"drawn: {output / name}.svg", flush=True)
        except (FileNotFoundError, ValueError) as error:
            print(f"not drawn: {name}: {error}", file=sys.stderr, flush=True)
            status = 1
    return status


def bars(sampling: Report) -> list[Bar]:
    """What a report of ``benchmarks.sampling`` says of each variant that did not fail, in its order."""
    return [
        Bar(name, row["step_ms"], row["step_ms_min"], row["step_ms_max"], ratio_to_eager(sampling, name))
        for name, row in sampling["variants"].items()
        if "failed" not in row
    ]


def points(sampling: Report, quality: Report) -> list[Point]:
    """The lossy variants that are in both reports; without those whose images equal eager's, which have no PSNR.

    Raises:
        ValueError: the reports are not of the same thing, or have no such variant.
    """
    for what in ("model", "size", "steps"):
        if sampling["what"][what] != quality["what"][what]:
            raise ValueError(f"speed and quality are of another {what}")
    if sampling["environment"].get("gpu") != quality["environment"].get("gpu"):
        raise ValueError("speed and quality are of another GPU")
    found = []
    for name, row in quality["variants"].items():
        ratio = ratio_to_eager(sampling, name)
        psnr = row.get("against_eager", {}).get("psnr_db", {})
        if Variant.parse(name).lossy and ratio is not None and psnr.get("median") is not None:
            found.append(Point(name, ratio, psnr["median"], psnr["worst"]))
    if not found:
        raise ValueError("no lossy variant is in both files")
    return found


def _speed_plot(results: Path, model: str) -> Any:
    from matplotlib.figure import Figure

    report = read(latest(results, f"sampling-{model}"))
    shown = bars(report)
    figure = Figure(figsize=(9, 1.2 + 0.42 * len(shown)), layout="constrained")
    axes = figure.subplots()
    spread = [[bar.ms - bar.least for bar in shown], [bar.most - bar.ms for bar in shown]]
    axes.barh(
        [bar.variant for bar in shown],
        [bar.ms for bar in shown],
        xerr=spread,
        color=[_COLOURS[Variant.parse(bar.variant).base] for bar in shown],
        ecolor="#444444",
        capsize=2,
    )
    for row, bar in enumerate(shown):
        ratio = f" ({bar.ratio:.2f}x)" if bar.ratio is not None else ""
        axes.annotate(f"{bar.ms:.1f}{ratio}", (bar.most, row), (5, 0), textcoords="offset points", va="center")
    axes.invert_yaxis()  # the first on top
    axes.margins(x=0.2)
    axes.set_xlabel("ms per step: median, least and most; in brackets, how many times as fast as eager")
    axes.spines[["top", "right"]].set_visible(False)
    _title(axes, report)
    return figure


def _quality_plot(results: Path, model: str) -> Any:
    from matplotlib.figure import Figure

    sampling, quality = read(latest(results, f"sampling-{model}")), read(latest(results, f"quality-{model}"))
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for point in points(sampling, quality):
        colour = _COLOURS[Variant.parse(point.variant).base]
        axes.plot([point.worst, point.psnr], [point.ratio, point.ratio], color=colour, linewidth=1)
        axes.plot([point.psnr], [point.ratio], "o", color=colour)
        axes.annotate(point.variant, (point.psnr, point.ratio), (6, 5), textcoords="offset points", fontsize=8)
    axes.margins(x=0.25, y=0.1)
    axes.set_xlabel("PSNR of latents against eager, dB: median image, and line to the worst (random weights)")
    axes.set_ylabel("times as fast as eager")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    _title(axes, sampling)
    return figure


def _title(axes: Any, report: Report) -> None:
    what, found = report["what"], report["environment"]
    images = f"{what['model']} {what['size']}, {what['batch']} per run, {what['steps']} steps"
    versions = f"torch {found['torch']}, ComfyUI {found['comfyui']}, {found['date']}"
    axes.set_title(f"{images}\n{found.get('gpu', 'CPU')}, {versions}", fontsize=10, loc="left")


if __name__ == "__main__":
    sys.exit(main())
