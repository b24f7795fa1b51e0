"""What extensions do to a model that is served block by block does what it does to the host's own."""

from __future__ import annotations

from typing import Any

import pytest
from pictures import FAMILIES
from scripts import checkpoint_of, printed_by

from dev.environment import comfyui_path


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return dict(printed_by("extended_blocks.py", comfyui_path(), checkpoint_of(FAMILIES["flux"].checkpoint)))


def test_every_picture_is_the_hosts(found: dict[str, Any]) -> None:
    assert {name: result["off"] for name, result in found.items()} == {
        name: [0.0] * len(result["off"]) for name, result in found.items()
    }


def test_what_is_still_a_block_is_served(found: dict[str, Any]) -> None:
    """A forward that is another one in each call is the host's, and what all modules have a hook on."""
    unserved = {"step_skipper", "hook_of_all_modules"}
    assert len(found) == 9 and {name for name, result in found.items() if not result["served"]} == unserved
