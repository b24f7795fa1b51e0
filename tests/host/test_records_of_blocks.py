"""Records of the host's among a block's arguments go into graphs; nothing that may be more than its fields does."""

from __future__ import annotations

from scripts import printed_by

from dev.environment import comfyui_path

TAKEN = {"the host's": True, "with a method of the host's": True, "nested": False}


def test_only_the_hosts_own_records_are_opened() -> None:
    found = printed_by("records_of_blocks.py", comfyui_path())
    assert len(found) == 9
    for name, result in found.items():
        assert result == {"record": TAKEN.get(name, False), "same": True}, name
