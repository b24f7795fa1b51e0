"""What the pack does while ComfyUI waits for its first prompt."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripts import checkpoint_of, printed_by

from dev.environment import comfyui_path


def test_a_compiler_is_imported_while_no_prompt_runs_where_there_are_graphs_to_load() -> None:
    """The first image would wait for it, or run beside it. Who has made no graphs pays nothing."""
    assert printed_by("waiting_for_a_prompt.py", comfyui_path()) == {
        "without graphs": False,
        "under way": True,
        "while a prompt runs": False,
        "while none does": True,
    }


def test_graphs_that_were_used_last_are_loaded_before_a_prompt_asks_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They count once asked for. None is that was compiled where PyTorch computes otherwise, or that changed."""
    monkeypatch.setenv("ONEDIFF_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("ONEDIFF_CONFIG_DIR", str(tmp_path / "config"))

    def done(what: str) -> tuple[dict[str, int], dict[str, int]]:
        found = printed_by("latest_graphs.py", comfyui_path(), checkpoint_of("flux_min"), what)
        return found["before"], found["after"]

    nothing = {"there": 0, "loaded": 0, "compiled": 0}
    assert done("make") == (nothing, {"there": 2, "loaded": 0, "compiled": 2})
    assert done("found") == (nothing | {"there": 2}, {"there": 2, "loaded": 2, "compiled": 0})
    assert done("others")[0] == nothing
    assert done("damaged")[0] == nothing
