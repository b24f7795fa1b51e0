"""A report as a picture: time per step before and after, where graphs came from, and memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

_WIDTH, _MARGIN, _LABELS, _LINE = 880, 28, 250, 30
_BAR_HEIGHT = 16
_BACKGROUND, _INK, _QUIET = "#1b1d21", "#e8eaed", "#9aa0a6"
_EAGER, _GRAPH, _RECORDING, _EMPTY = "#5f6570", "#2dd4a7", "#4aa8ff", "#2a2d33"
_MOST_STEPS = 8
"""Sizes of one object that are drawn; the text and the JSON have all."""


@dataclass(frozen=True)
class _Bar:
    """One line: a label, lengths of one measure in their colours, and what is written behind them."""

    label: str
    parts: Sequence[tuple[float, str]]
    whole: float
    text: str


def as_image(found: Mapping[str, Any]) -> torch.Tensor:
    """Return the picture of a report as ComfyUI's IMAGE: ``[1, height, width, 3]``, float32, 0 to 1."""
    return torch.from_numpy(np.asarray(draw(found), dtype=np.float32) / 255)[None]


def draw(found: Mapping[str, Any]) -> Image.Image:
    """Return the picture of a report.

    Args:
        found: as ``report.report`` gives it.

    Returns:
        An RGB image, 880 pixels wide and as high as it needs to be.
    """
    sections = list(_sections(found))
    lines = sum(1 + len(bars) for _, bars in sections)
    picture = Image.new("RGB", (_WIDTH, 2 * _MARGIN + _LINE * lines + 14 * (len(sections) - 1)), _BACKGROUND)
    pen, y = ImageDraw.Draw(picture), _MARGIN
    for title, bars in sections:
        pen.text((_MARGIN, y), title, _INK, ImageFont.load_default(17))
        y += _LINE
        for bar in bars:
            _draw_bar(pen, y, bar)
            y += _LINE
        y += 14
    return picture


def _sections(found: Mapping[str, Any]) -> Iterator[tuple[str, list[_Bar]]]:
    for thing in found["objects"]:
        steps = [step for graph in thing.get("graphs", ()) for step in graph["steps"]]
        if steps:
            yield f"{thing['kind']}: ms per call, eager and compiled", list(_step_bars(steps[:_MOST_STEPS]))
        calls = thing.get("served", 0) + thing.get("eager", 0)
        if calls:
            parts = [(thing["served"], _GRAPH), (thing["eager"], _EAGER)]
            text = f"{thing['served']} compiled, {thing['eager']} eager"
            yield f"{thing['kind']}: calls", [_Bar("", parts, calls, text)]
    process = found["process"]
    made = [
        (how, process[how], process[f"{seconds}_s"]) for how, seconds in (("compiled", "compile"), ("loaded", "load"))
    ]
    longest = max((seconds for _, _, seconds in made), default=0.0)
    yield (
        "Graphs came from",
        [_Bar(f"{how}: {count}", [(seconds, _GRAPH)], longest, f"{seconds:.1f} s") for how, count, seconds in made],
    )
    graphs, recordings, budget = (process[f"{name}_bytes"] for name in ("graph", "recording", "budget"))
    text = f"{(graphs + recordings) >> 20} of {budget >> 20} MB"
    yield "Memory", [_Bar("graphs, CUDA graphs", [(graphs, _GRAPH), (recordings, _RECORDING)], budget, text)]


def _step_bars(steps: Sequence[Mapping[str, Any]]) -> Iterator[_Bar]:
    longest = max(step["eager_ms"] for step in steps)
    for step in steps:
        gain = step["eager_ms"] / step["graph_ms"]
        yield _Bar(step["call"], [(step["eager_ms"], _EAGER)], longest, f"{step['eager_ms']:.1f} ms")
        yield _Bar("", [(step["graph_ms"], _GRAPH)], longest, f"{step['graph_ms']:.1f} ms · {gain:.2f}x")


def _draw_bar(pen: ImageDraw.ImageDraw, y: int, bar: _Bar) -> None:
    small = ImageFont.load_default(14)
    left, right = _MARGIN + _LABELS, _WIDTH - _MARGIN - 190
    pen.text((_MARGIN, y), bar.label, _QUIET, small)
    pen.rounded_rectangle((left, y + 1, right, y + 1 + _BAR_HEIGHT), 4, _EMPTY)
    x = float(left)
    for length, colour in bar.parts:
        width = (right - left) * min(1.0, length / bar.whole) if bar.whole else 0.0
        if width >= 1:
            pen.rounded_rectangle((x, y + 1, min(x + width, right), y + 1 + _BAR_HEIGHT), 4, colour)
            x += width
    pen.text((right + 12, y), bar.text, _INK, small)
