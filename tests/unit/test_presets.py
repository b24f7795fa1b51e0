"""host/presets.py: what OneDiff Optimize chooses, and that a measurement says so."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from onediff_comfy.host.presets import FP8, FP8_PAYS, LOSSLESS, THRESHOLDS, Preset, preset_for
from onediff_comfy.settings import GOALS, STEP_CACHE_THRESHOLD


def model_of(family: str) -> Any:
    return SimpleNamespace(model=SimpleNamespace(model_config=type(family, (), {})()))


@pytest.mark.parametrize("family", ["Flux", "SDXL", "Flux2"])
def test_exact_gives_nothing_up(family: str) -> None:
    assert preset_for("exact", model_of(family)) == Preset(LOSSLESS, 0.0)


@pytest.mark.parametrize(
    ("family", "faster", "fastest"),
    [
        ("Flux", Preset(LOSSLESS, 0.08), Preset(FP8, 0.08)),
        ("SDXL", Preset(LOSSLESS, 0.1), Preset(LOSSLESS, 0.1)),
        ("Flux2", Preset(LOSSLESS, 0.1), Preset(LOSSLESS, 0.1)),  # not measured
        ("HunyuanVideo", Preset(LOSSLESS, 0.06), Preset(LOSSLESS, 0.06)),
    ],
)
def test_each_family_has_its_threshold_and_8_bits_only_where_they_pay(
    family: str, faster: Preset, fastest: Preset
) -> None:
    assert [preset_for(goal, model_of(family)) for goal in GOALS[1:]] == [faster, fastest]


def test_what_has_no_family_is_treated_like_any() -> None:
    assert preset_for("fastest", object()) == Preset(LOSSLESS, STEP_CACHE_THRESHOLD)


def test_a_measurement_says_that_8_bits_pay(root: Path) -> None:
    for file in FP8_PAYS.values():
        variants = json.loads((root / "benchmarks" / "results" / file).read_text())["variants"]
        assert variants["onediff-inductor+fp8"]["step_ms_max"] < variants["onediff-inductor"]["step_ms_min"]


def test_the_help_pages_tell_the_thresholds(root: Path) -> None:
    for language in ("en", "zh"):
        page = (root / "web" / "docs" / "OneDiffOptimize" / f"{language}.md").read_text(encoding="utf-8")
        for threshold in (*THRESHOLDS.values(), STEP_CACHE_THRESHOLD):
            assert str(threshold) in page
