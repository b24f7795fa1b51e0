"""A model is the same before and after an image, and in the process that compiles in the background.

Else it is traced anew for each image, and what was compiled in the background is for no model that there is.
"""

from __future__ import annotations

from pathlib import Path

from scripts import printed_by

from dev.environment import comfyui_path

UNPICKLABLE = {"cascade_b", "cascade_c"}  # the host makes a class of their layers in a function


def test_every_familys_model_is_the_same_at_any_time_and_in_any_process(tmp_path: Path) -> None:
    here: dict[str, list[str]] = printed_by("same_model.py", comfyui_path(), tmp_path)
    there: dict[str, str] = printed_by("same_model.py", comfyui_path(), tmp_path, "again")
    assert len(here) > 60 and here.keys() - there.keys() == UNPICKLABLE
    assert {name for name, (before, after) in here.items() if before != after} == set()
    assert {name for name in there if there[name] != here[name][0]} == set()
