"""A host that was started with an attention that no trace can look into: graphs call it, as the host does."""

from __future__ import annotations

import pytest
from scripts import checkpoint_of, printed_by

from dev.environment import comfyui_path


@pytest.mark.parametrize("flag", ["sage", "ck"])
def test_graphs_attend_as_the_host_does(flag: str) -> None:
    found = printed_by("by_attention_library.py", comfyui_path(), checkpoint_of("flux_min"), flag)
    assert found["rounded"] > 1e-4  # the library is told from exact attention
    assert max(found["off"]) == 0
    assert found["fallbacks"] == {}
    assert found["served"] == 8
    # Attention of an extension's that draws numbers and that counts is called as often as the host calls it.
    assert set(found["called once"].values()) == {0}
    assert found["served then"] == 8


def test_a_file_may_choose_the_attention_of_its_layers() -> None:
    found = printed_by("attention_of_a_file.py", comfyui_path(), checkpoint_of("flux_min"), "pytorch")
    assert found["rounded"] > 1e-4  # what the file chooses is told from exact attention
    assert max(found["off"]) == 0
    assert found["fallbacks"] == {} and found["retired"] == 0
    assert found["served"] > 5


def test_such_a_file_is_refused_where_comfyui_was_started_with_another_attention() -> None:
    """A capture would put PyTorch's in the place of both."""
    found = printed_by("attention_of_a_file.py", comfyui_path(), checkpoint_of("flux_min"), "split")
    assert max(found["off"]) == 0
    assert found["served"] == found["retired"] == 0
    assert all("chooses the attention of its layers" in reason for reason in found["fallbacks"])
    assert found["fallbacks"]
