"""What the pack does while ComfyUI waits for its first prompt."""

from __future__ import annotations

from scripts import printed_by

from dev.environment import comfyui_path


def test_a_compiler_is_imported_while_no_prompt_runs_where_there_are_graphs_to_load() -> None:
    """The first image would wait for it, or run beside it. Who has made no graphs pays nothing."""
    assert printed_by("waiting_for_a_prompt.py", comfyui_path()) == {
        "without graphs": False,
        "under way": True,
        "while a prompt runs": False,
        "while none does": True,
    }
