"""Records of the host's among a block's arguments go into graphs; nothing that may be more than its fields does."""

from __future__ import annotations

from typing import Any

import pytest
from scripts import printed_by

from dev.environment import comfyui_path

TAKEN = {"the host's": True, "with a method of the host's": True, "nested": False}


@pytest.fixture(scope="module")
def printed() -> dict[str, Any]:
    return printed_by("records_of_blocks.py", comfyui_path())  # type: ignore[no-any-return]


def test_a_compiler_is_given_tensors_alone_and_the_caller_the_very_tensor_that_it_gave(printed: dict[str, Any]) -> None:
    """Of a block that writes to what it is given and returns it, as Flux' does."""
    told = printed["told"]
    assert told["leaves"] == ["Tensor", "Tensor"]  # what is returned and new, and what was written
    assert told["before"] == [0.0, 0.0]  # a graph is given copies
    assert told["given back"] == [True, [1.0, 1.0], [2.0, 2.0]]
    assert told["out"] == [True, {}], "an output may be left in a tensor that overlaps with no other"


def test_a_blocks_call_leaves_no_cycles_behind(printed: dict[str, Any]) -> None:
    """There are a thousand in an image, and Python's collector stops everything to go through what they were."""
    assert printed["told"]["cycles"] == 0


def test_only_the_hosts_own_records_are_opened(printed: dict[str, Any]) -> None:
    found = printed["records"]
    assert len(found) == 9
    for name, result in found.items():
        assert result == {"record": TAKEN.get(name, False), "same": True}, name
