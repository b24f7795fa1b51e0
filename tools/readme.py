"""The READMEs' table and plot of speed, from the file of one `make bench`: nobody types a figure.

python -m tools.readme            # whether both are what the file says; exit status 1 if not
python -m tools.readme --write    # writes them
"""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.files import Report, read, results_folder
from dev.environment import repository

from .marked_tables import with_table

RESULTS = "2026-11-27-h200-bench.json"
FASTER_PROCESSOR = "2026-11-26-h200-bench.json"
"""A bench of the same models on another machine: eager waits for the processor, and that of RESULTS is slow."""
PLOT = repository() / "docs" / "images" / "speed.svg"
READMES = {"en": repository() / "README.md", "zh": repository() / "README.zh.md"}

_NAMES = {
    "sd15": ("SD 1.5", "SD 1.5"),
    "sdxl": ("SDXL", "SDXL"),
    "flux": ("Flux.1-dev, bf16", "Flux.1-dev，bf16"),
    "flux-fp8": ("Flux.1-dev, scaled fp8", "Flux.1-dev，scaled fp8"),
    "z-image": ("Z-Image-Turbo, bf16*", "Z-Image-Turbo，bf16*"),
    "qwen-image-fp8": ("Qwen-Image, scaled fp8*", "Qwen-Image，scaled fp8*"),
    "wan-5s-fp8": ("Wan 2.2, scaled fp8*", "Wan 2.2，scaled fp8*"),
}
"""Of the bench's jobs that the table has, in its order."""

_HEADS = {
    "en": "| model | steps | ComfyUI, s | its compile node | OneDiff | gain | with Step Cache |",
    "zh": "| 模型 | 步数 | ComfyUI，秒 | 其编译节点 | OneDiff | 提升 | 加 Step Cache |",
}
_CAPTIONS = {
    "en": (
        "Seconds per image (Wan: 5 s of video); *: with prompt and VAE, else sampling alone. {gpu}, torch {torch}, "
        "ComfyUI {comfyui}; **random weights** of real size, all compiled before. ComfyUI waits for this machine's "
        "slow processor: with a faster one [gains are smaller](docs/speed.md). Source: [{file}]({link})."
    ),
    "zh": (
        "每张图像的秒数（Wan：5 秒视频）；*：含提示词和 VAE，其余只含采样。 {gpu}，torch {torch}，"
        "ComfyUI {comfyui}；真实大小的**随机权重**，全部事先编译。 这台机器的处理器较慢，ComfyUI 要等它："
        "处理器更快时[提升较小](docs/speed.md)。 来源：[{file}]({link})。"
    ),
}
_COLUMNS = 120
_NODE, _OURS, _CACHED = "torch_compile", "onediff-inductor", "onediff-inductor+steps"
_BARS = (("ComfyUI's compile node", "#c98a2b"), ("OneDiff", "#1a73e8"), ("OneDiff with Step Cache", "#7fb0f5"))


@dataclass(frozen=True)
class Row:
    """One model: seconds per image by ComfyUI, by its compile node, by this pack, and by that with a step cache.

    Attributes:
        kind: what the bench calls it.
        steps: of an image.
        node_s: None where the node was not measured.
        cached_s: None where the step cache was not measured.
    """

    kind: str
    steps: int
    eager_s: float
    node_s: float | None
    ours_s: float
    cached_s: float | None

    def cells(self, language: int) -> list[str]:
        """Return what the table says of it."""
        found = [_NAMES[self.kind][language], str(self.steps), f"{self.eager_s:.2f}", self._with_gain(self.node_s)]
        gain = f"{self.eager_s / self.ours_s:.2f}x"
        return [*found, f"{self.ours_s:.2f}", gain, self._with_gain(self.cached_s)]

    def _with_gain(self, seconds: float | None) -> str:
        return "" if seconds is None else f"{seconds:.2f} ({self.eager_s / seconds:.2f}x)"


def report(name: str = RESULTS) -> Report:
    """Return what the one file says, or another."""
    return read(results_folder() / name)


def rows(found: Report) -> list[Row]:
    """Return the rows that it has figures for."""
    return [_row(kind, found["jobs"][kind]["report"]) for kind in _NAMES if kind in found["jobs"]]


def _row(kind: str, measured: Report) -> Row:
    variants = measured["variants"]
    cached = next((name for name in variants if name.startswith(_CACHED)), None)
    seconds = [_seconds(variants.get(name)) for name in ("eager", _NODE, _OURS, cached)]
    eager, node, ours, with_cache = seconds
    assert eager is not None
    assert ours is not None
    return Row(kind, measured["what"]["steps"], eager, node, ours, with_cache)


def _seconds(row: Report | None) -> float | None:
    """Return the median of images, prompts and decoding included where they were timed."""
    if row is None or "failed" in row:
        return None
    return float(row["whole_s"] if "whole_s" in row else row["image_s"])


def block(found: Report, language: str) -> str:
    """Return the table and its caption in a language."""
    head = _HEADS[language]
    index = list(_HEADS).index(language)
    lines = [head, "|---" * (head.count("|") - 1) + "|"]
    lines += [f"| {' | '.join(row.cells(index))} |" for row in rows(found)]
    return "\n".join(lines) + "\n\n" + _wrapped(_caption(found, language)) + "\n"


def _caption(found: Report, language: str) -> str:
    values: Mapping[str, Any] = found["environment"]
    facts = {name: values[name] for name in ("gpu", "torch", "comfyui")}
    return _CAPTIONS[language].format(**facts, file=RESULTS, link=f"benchmarks/results/{RESULTS}")


def _wrapped(text: str) -> str:
    lines, line = [], ""
    for word in text.split(" "):
        if line and len(line) + 1 + len(word) > _COLUMNS:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}".strip()
    return "\n".join([*lines, line])


def with_block(text: str, made: str) -> str:
    """Return a README with its table replaced."""
    return with_table(text, "speed", made)


def plot(found: Report) -> str:
    """Return the picture: for each model, how many times as fast as ComfyUI its node and this pack are."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    shown = rows(found)
    with mpl.rc_context({"svg.hashsalt": RESULTS}):  # the same results give the same file
        figure = Figure(figsize=(9, 0.8 + 0.5 * len(shown)), layout="constrained")
        axes = figure.subplots()
        for number, (label, colour) in enumerate(_BARS):
            ratios = [_ratio(row, (row.node_s, row.ours_s, row.cached_s)[number]) for row in shown]
            places = [y + 0.26 * (number - 1) for y, ratio in enumerate(ratios) if ratio is not None]
            found_ratios = [ratio for ratio in ratios if ratio is not None]
            axes.barh(places, found_ratios, 0.25, color=colour, label=label)
            for place, ratio in zip(places, found_ratios, strict=True):
                axes.annotate(f"{ratio:.2f}x", (ratio, place), (4, 0), textcoords="offset points", va="center", size=7)
        elsewhere = {row.kind: _ratio(row, row.ours_s) for row in rows(report(FASTER_PROCESSOR))}
        marks = [elsewhere.get(row.kind) or float("nan") for row in shown]
        axes.plot(marks, range(len(shown)), "k|", markersize=9, label="OneDiff, faster processor")
        axes.axvline(1, color="#8a8f98", linewidth=1)
        axes.set_yticks(range(len(shown)), [_NAMES[row.kind][0].rstrip("*") for row in shown])
        axes.invert_yaxis()
        axes.margins(x=0.08)  # for the last figure
        axes.legend(loc="lower right", frameon=False)
        axes.set_xlabel("times as fast as ComfyUI")
        axes.spines[["top", "right"]].set_visible(False)
        environment = found["environment"]
        what = f"Random weights of real size, {environment['gpu']}, torch {environment['torch']}"
        axes.set_title(f"{what}, {environment['date']}", fontsize=10, loc="left")
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata={"Date": None})
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines()) + "\n"


def _ratio(row: Row, seconds: float | None) -> float | None:
    return None if seconds is None else row.eager_s / seconds


def main(arguments: Sequence[str]) -> int:
    """Compare, or write where asked to."""
    found = report()
    wanted = {path: with_block(path.read_text(encoding="utf-8"), block(found, name)) for name, path in READMES.items()}
    wanted[PLOT] = plot(found)
    if arguments == ["--write"]:
        for path, text in wanted.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return 0
    stale = [
        str(path) for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    print("\n".join(f"{path} is stale: python -m tools.readme --write" for path in stale) or "the figures are current")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
