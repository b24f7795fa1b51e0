"""Blocks are served from Dynamic VRAM where the host can be told to take their weights back, and nowhere else."""

from __future__ import annotations

from pictures import FAMILIES
from scripts import checkpoint_of, printed_by

from dev.environment import comfyui_path


def test_weights_are_taken_back_as_each_release_wants_it() -> None:
    found = printed_by("taken_back.py", comfyui_path())
    in_part = found.pop("brought in part")
    assert in_part == {"brought": ["1"], "taken back": ["1"], "in place": ["0", "1"]}, "pages would stay for ever"
    assert {name: result["can"] for name, result in found.items()} == {
        "its own": True,
        "of_0_30": True,
        "of_0_31": True,
        "of_one_to_come": False,
    }
    assert all(result["right"] for result in found.values()), found


def test_tensors_over_a_buffer_are_shown_again_where_they_hold_no_memory() -> None:
    """And in the run in which they were made, at the same address, whichever module has weights of that form."""
    found = printed_by("through_a_buffer.py", comfyui_path())
    assert found.pop("left of a refused call") == 0, "the host could not free them"
    assert {case: result["the same"] for case, result in found.items()} == {
        "as it is": True,
        "converted": False,
        "PyTorch's own memory": False,
        "elsewhere": False,
        "another weight": True,
        "taken away": True,
        "another class": False,
        "another module": True,
        "another quantised": True,
        "for another dtype": False,
        "in another layout": False,
        "in fewer bits": False,
        "in another run": False,
    }
    assert all(result["right"] for result in found.values()), found


def test_blocks_of_one_kind_share_what_is_made_over_two_buffers() -> None:
    """Of 57 blocks each layer's tensors were made anew in the second step, where it is in the other buffer."""
    of_kinds = 10 + 3  # layers of a double block, and of a single one
    for form, found in printed_by(
        "blocks_in_buffers.py", comfyui_path(), checkpoint_of(FAMILIES["flux"].checkpoint), "19", "38"
    ).items():
        assert (found["off"], found["eager"]) == (0.0, {}), form
        first, *later = found["made"]
        assert first > 3 * of_kinds and max(later) <= of_kinds and later[-2:] == [0, 0], (form, found["made"])


def test_a_model_that_prefetches_its_weights_is_no_other_one_for_what_the_host_notes_of_them() -> None:
    assert printed_by("prefetching_model.py", comfyui_path()) is None


def test_blocks_that_differ_in_their_heads_or_bits_alone_are_served_in_every_step() -> None:
    assert printed_by("blocks_of_widths.py", comfyui_path()) == 4 * [{"right": True, "served": 24, "fallbacks": {}}]


def test_what_blocks_keep_from_call_to_call_they_keep_while_their_model_does_not_fit() -> None:
    """On themselves, or in tables under their own names. Their image is of many blocks."""
    found = printed_by("blocks_that_keep.py", comfyui_path())
    assert len(found) == 11 and all(result["right"] for result in found.values()), found
    # Made in the first call, and served from the next one on; what differs in each is brought for us twice a run.
    assert found["Making"]["served"] == 3 * 7 and found["Counting"]["asked"] == 3 * 2 * 2, found
    assert found["waiting"]["asked"] == found["waiting"]["served"] == 3 * 4, "brought for a graph that is on its way"
