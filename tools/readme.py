"""The READMEs' table and plot of speed, from one file of results: nobody types a figure.

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

RESULTS = "2026-11-25-h200-formats.json"
PLOT = repository() / "docs" / "images" / "formats.svg"
READMES = {"en": repository() / "README.md", "zh": repository() / "README.zh.md"}

_NAMES = {
    "bf16": ("bf16", "bf16"),
    "fp8": ("scaled fp8", "scaled fp8"),
    "int8": ("int8", "int8"),
    "nvfp4": ("nvfp4", "nvfp4"),
    "fp8-cast": ("fp8, by the loader's weight_dtype", "fp8，由加载器的 weight_dtype 转换"),
    "fp8-full": ("scaled fp8, multiplied in 16 bits", "scaled fp8，以 16 位相乘"),
}
_HEADS = {
    "en": "| checkpoint | ComfyUI, ms per step | OneDiff | gain | GPU memory |",
    "zh": "| 检查点 | ComfyUI，每步毫秒 | OneDiff | 提升 | 显存 |",
}
_CAPTIONS = {
    "en": (
        "A model of Flux.1-dev's size, {size}, {batch} image, median of {rounds} rounds, on one {gpu}; torch {torch}, "
        "ComfyUI {comfyui}, {date}; **random weights**, everything compiled before. Source: [{file}]({link})."
    ),
    "zh": (
        "Flux.1-dev 大小的模型，{size}，{batch} 张图像，{rounds} 轮的中位数，一块 {gpu}；torch {torch}，"
        "ComfyUI {comfyui}，{date}；**随机权重**，全部事先编译。来源：[{file}]({link})。"
    ),
}
_COLUMNS = 120


@dataclass(frozen=True)
class Row:
    """One kind of checkpoint: milliseconds per step without and with the pack, and MiB at most with it."""

    kind: str
    eager_ms: float
    ours_ms: float
    peak_mib: float

    @property
    def gain(self) -> str:
        return f"{self.eager_ms / self.ours_ms:.2f}x"

    def cells(self, language: int) -> list[str]:
        """Return what the table says of it."""
        memory = f"{self.peak_mib / 1024:.1f} GB"
        return [_NAMES[self.kind][language], f"{self.eager_ms:.1f}", f"{self.ours_ms:.1f}", self.gain, memory]


def report() -> Report:
    """Return what the one file says."""
    return read(results_folder() / RESULTS)


def rows(found: Report) -> list[Row]:
    """Return its rows, in its order."""
    made = []
    for kind, measured in found["formats"].items():
        eager, ours = (measured["variants"][name] for name in ("eager", "onediff-inductor"))
        made.append(Row(kind, eager["step_ms"], ours["step_ms"], ours["peak_mib"]))
    return made


def block(found: Report, language: str) -> str:
    """Return the table and its caption in a language."""
    head = _HEADS[language]
    index = list(_HEADS).index(language)
    lines = [head, "|---" * (head.count("|") - 1) + "|"]
    lines += [f"| {' | '.join(row.cells(index))} |" for row in rows(found)]
    return "\n".join(lines) + "\n\n" + _wrapped(_caption(found, language)) + "\n"


def _caption(found: Report, language: str) -> str:
    measured = found["formats"]["bf16"]
    values: Mapping[str, Any] = {**found["environment"], **measured["what"]}
    facts = {name: values[name] for name in ("size", "batch", "rounds", "gpu", "torch", "comfyui", "date")}
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
    """Return the picture: for each kind of checkpoint two bars, ComfyUI's and ours."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    shown = rows(found)
    with mpl.rc_context({"svg.hashsalt": RESULTS}):  # the same results give the same file
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        axes = figure.subplots()
        places = range(len(shown))
        axes.barh([y - 0.2 for y in places], [row.eager_ms for row in shown], 0.38, color="#8a8f98", label="ComfyUI")
        axes.barh([y + 0.2 for y in places], [row.ours_ms for row in shown], 0.38, color="#1a73e8", label="OneDiff")
        for y, row in enumerate(shown):
            note = f"{row.ours_ms:.1f} ({row.gain})"
            axes.annotate(note, (row.ours_ms, y + 0.2), (5, 0), textcoords="offset points", va="center", fontsize=8)
        axes.set_yticks(list(places), [_NAMES[row.kind][0] for row in shown])
        axes.invert_yaxis()
        axes.legend(loc="lower right", frameon=False)
        axes.set_xlabel("ms per step, less is better")
        axes.spines[["top", "right"]].set_visible(False)
        environment = found["environment"]
        what = f"Flux.1-dev's size, random weights, {environment['gpu']}, torch {environment['torch']}"
        axes.set_title(f"{what}, {environment['date']}", fontsize=10, loc="left")
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata={"Date": None})
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines()) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Compare, or write where asked to."""
    found = report()
    wanted = {path: with_block(path.read_text(encoding="utf-8"), block(found, name)) for name, path in READMES.items()}
    if arguments == ["--write"]:
        for path, text in wanted.items():
            path.write_text(text, encoding="utf-8")
        PLOT.parent.mkdir(parents=True, exist_ok=True)
        PLOT.write_text(plot(found), encoding="utf-8")
        return 0
    stale = [str(path) for path, text in wanted.items() if path.read_text(encoding="utf-8") != text]
    print("\n".join(f"{path} is stale: python -m tools.readme --write" for path in stale) or "the figures are current")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
