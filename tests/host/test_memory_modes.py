"""However the host keeps weights in memory: the same pictures, from graphs or eager with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from pictures import FAMILIES
from scripts import checkpoint_of, printed_by

from benchmarks import memory_modes
from dev.environment import comfyui_path

FLUX = FAMILIES["flux"]
ON_GPU = torch.cuda.is_available()
MODES: Mapping[str, tuple[str, ...]] = memory_modes.MODES if ON_GPU else memory_modes.CPU_MODES
ENGINES = memory_modes.ENGINES if ON_GPU else ("eager",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Servers in this folder share what they compile."""
    return tmp_path_factory.mktemp("memory")


# Without a GPU the plain mode is what all other host tests run in.
@pytest.mark.slow
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "cpu"])
def test_loras_reloads_and_turns_are_right_in_every_memory_mode(folder: Path, mode: str) -> None:
    """A LoRA on, weaker, off and behind the node; everything unloaded; another model between."""
    with memory_modes.server(folder / mode, MODES[mode], cpu=not ON_GPU) as running:
        rows = list(memory_modes.measure(running, mode, "flux", ENGINES))
        log = running.log_text()
    assert len(rows) == len(memory_modes.SEQUENCE) * len(ENGINES)
    for row in rows:
        assert row.right, str(row)
        assert row.served or row.eager, f"neither served nor said why: {row}"
        if not ON_GPU:  # where nothing is ever offloaded
            assert row.served == 4 and not row.eager, str(row)
    assert "Traceback" not in log


@pytest.fixture(scope="module")
def partly_loaded() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = printed_by("partly_loaded.py", comfyui_path(), checkpoint_of(FLUX.checkpoint))
    return found


def test_offloaded_weights_give_the_same_picture(partly_loaded: list[dict[str, Any]]) -> None:
    cases = [case for case in partly_loaded if "small" in case]
    assert {case["small"] for case in cases} == {True, False}
    for case in cases:
        assert case["offloaded"] == case["small"], f"the host was not in the state that this is about: {case}"
        assert (case["from_no_lora"] > 0.1) == ("LoRA" in case["name"] and case["name"] != "no LoRA"), case
        # Engine eager is our capture with PyTorch's own kernels.
        assert case["off"] <= (1e-5 if case["name"] == "nobody waits" else 0), case


def test_offloaded_weights_are_brought_block_by_block_with_their_loras(partly_loaded: list[dict[str, Any]]) -> None:
    """Two steps: of a model that is there one call each, of one that is not two, for it has two blocks."""
    for case in partly_loaded:
        if "small" in case:
            assert (case["served"], case["eager"]) == (4 if case["small"] else 2, {}), case


def test_weights_that_are_taken_away_between_two_steps(partly_loaded: list[dict[str, Any]]) -> None:
    """The first step is the whole model's; in the second blocks are. A LoRA is rounded to the weights in the first."""
    cases = [case for case in partly_loaded if "taken away" in case["name"]]
    assert len(cases) == 2
    for case in cases:
        assert (case["steps"], case["offloaded"]) == (2, True), f"nothing was taken away: {case}"
        assert case["off"] <= 1e-5, case
        assert (case["served"], case["eager"]) == (1 + 2, 0), case


def test_recordings_go_with_the_weights_and_not_with_every_image() -> None:
    """The host detaches whatever it is about to load, a model that is there already included."""
    found: dict[str, dict[str, int]] = printed_by("releases.py", comfyui_path(), checkpoint_of(FLUX.checkpoint))
    for name in ("another seed", "after the model without the node", "a LoRA", "loaded again"):
        assert found[name]["released"] == 0, name
    for name in ("another seed", "a LoRA", "unloaded"):
        assert found[name]["detached"] > 0, f"the host does something else than this is about: {name}"
    assert found["unloaded"]["released"] > 0
    assert found["gone"]["released"] > 0
