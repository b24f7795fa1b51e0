"""What extensions replace in the host's own modules, however far from a layer."""

from __future__ import annotations

from scripts import printed_by

from dev.environment import comfyui_path


def test_a_replaced_function_of_the_host_is_noticed() -> None:
    found: dict[str, list[bool]] = printed_by("noticed.py", comfyui_path())
    assert len(found) == 15
    assert [name for name, right in found.items() if not all(right)] == []
