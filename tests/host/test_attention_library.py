"""A host that was started with an attention that no trace can look into: graphs call it, as the host does."""

from __future__ import annotations

from scripts import checkpoint_of, printed_by

from dev.environment import comfyui_path


def test_graphs_attend_as_the_host_does() -> None:
    found = printed_by("by_attention_library.py", comfyui_path(), checkpoint_of("flux_min"))
    assert found["rounded"] > 1e-4  # the library is told from exact attention
    assert max(found["off"]) == 0
    assert found["fallbacks"] == {}
    assert found["served"] == 8
