"""What extensions replace in the host's own modules, however far from a layer."""

from __future__ import annotations

from typing import Any

import pytest
from scripts import printed_by

from dev.environment import comfyui_path


@pytest.mark.parametrize("step", ["9", pytest.param("1", marks=pytest.mark.slow)])
def test_a_replaced_function_of_the_host_is_noticed(step: str) -> None:
    """Step 1 replaces each variable of the host's modules, and each member of their classes; 9 every ninth."""
    found: dict[str, Any] = printed_by("noticed.py", comfyui_path(), step)
    anything, counted = found.pop("anything"), found.pop("counted bookkeeping")
    assert len(found) == 15
    assert [name for name, right in found.items() if not all(right)] == []
    assert anything["replaced"] > 500 // int(step) and anything["differ"] > 80 // int(step)
    assert anything["unnoticed"] == []
    assert counted == []
