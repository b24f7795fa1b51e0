"""What the template browser says: titles that are names of files, gains from files of results, models to download."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks.files import results_folder
from tools.templates import TITLES, Gain, gain_of, model_file
from tools.thumbnails import head
from tools.workflow_files import workflows


def test_each_workflow_has_a_title_of_its_own_that_every_system_takes_as_a_file() -> None:
    assert sorted(TITLES) == sorted(workflows())
    assert len(set(map(str.lower, TITLES.values()))) == len(TITLES)
    for title in TITLES.values():
        assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9 ,.]*[A-Za-z]", title) and len(title) < 40, title


def test_a_gain_is_what_its_file_measured() -> None:
    file = json.loads((results_folder() / "2026-11-23-h200-sd15-512.json").read_text())
    gain = gain_of("text_to_image_sd15")
    assert gain is not None
    assert gain.eager_ms == file["variants"]["eager"]["step_ms"]
    assert gain.ours_ms == file["variants"]["onediff-inductor"]["step_ms"]
    assert gain.how == "SD 1.5, 512x512, 20 steps, NVIDIA H200, random weights"
    assert str(gain) == f"{gain.eager_ms / gain.ours_ms:.2f}x"


@pytest.mark.parametrize("name", ["video", "controlnet", "upscale", "step_cache"])
def test_of_work_that_was_not_measured_no_gain_is_claimed(name: str) -> None:
    assert gain_of(name) is None
    head(TITLES[name], None)


def test_the_bars_are_as_long_as_the_steps_take() -> None:
    drawn = np.asarray(head("SDXL, test", Gain(100.0, 50.0, "anything")))

    def length(y: int) -> int:
        row = drawn[y, 20:340].astype(int)
        return int(np.argmax(np.abs(row - row[2]).sum(axis=1) > 60))

    assert [length(104 + 3), length(142 + 3)] == pytest.approx([300, 150], abs=6)


def _files_of(workflow: dict[str, dict[str, dict[str, object]]]) -> set[str]:
    values = (value for node in workflow.values() for value in node["inputs"].values())
    return {value for value in values if isinstance(value, str) and value.endswith(".safetensors")}


@pytest.mark.parametrize("name", TITLES)
def test_each_model_of_a_workflow_can_be_downloaded_into_its_folder(root: Path, name: str) -> None:
    """The editor offers it where a node's properties have name, address and folder."""
    editor = json.loads((root / "workflows" / f"{TITLES[name]}.json").read_text(encoding="utf-8"))
    offered = [model for node in editor["nodes"] for model in node["properties"].get("models", ())]
    assert {model["name"] for model in offered} == _files_of(workflows()[name])
    for model in offered:
        assert model == model_file(model["name"])
        assert model["url"].startswith("https://huggingface.co/") and model["url"].endswith(f"/{model['name']}")
        assert "/resolve/main/" in model["url"]
