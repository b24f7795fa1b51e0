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
    """Not a forward that is another one in each call, what all have a hook on, and what leaves options changed."""
    unserved = {"step_skipper", "hook_of_all_modules", "attention_that_counts", "kept_in_the_options"}
    assert len(found) == 13 and {name for name, result in found.items() if not result["served"]} == unserved


def test_a_block_that_cannot_be_compared_is_tried_twice_in_a_run(found: dict[str, Any]) -> None:
    """Of two blocks, in two runs of four steps."""
    assert found["attention_that_counts"]["asked"] == 2 * 2 * 2


def test_a_lora_that_the_host_multiplies_by_in_full_is_not_rounded() -> None:
    """It is kept rounded, and served so from the next call on, where it stays; elsewhere each call is the host's."""
    found = printed_by("lora_on_fp8.py", comfyui_path(), checkpoint_of(FAMILIES["flux"].checkpoint))
    assert {name: result["off"] for name, result in found.items()} == {
        "all_there": [0.0] * 5,
        "none_there": [0.0] * 5,
    }
    assert [found[name]["served"] for name in ("all_there", "none_there")] == [16, 8], found


def test_outputs_are_left_in_what_a_block_is_given_only_where_a_graph_alone_answers() -> None:
    """Where graphs or weights turn out to be wrong, the host answers on what it was given."""
    found = printed_by("outputs_left.py", comfyui_path(), checkpoint_of(FAMILIES["flux"].checkpoint))
    assert {name: result["off"] for name, result in found.items()} == {
        "as_they_are": [0.0] * 2,
        "wrong_weights": [0.0] * 3,
        "wrong_graphs": [0.0] * 3,
    }
    # A double block writes to two tensors and a single one to one. The first call of each is compared.
    steps = {"as_they_are": 6, "wrong_weights": 2, "wrong_graphs": 2}
    assert {name: result["left"] for name, result in found.items()} == {name: 3 * (n - 1) for name, n in steps.items()}


def test_hooks_and_places_of_layers_are_seen_where_a_model_is_served_whole() -> None:
    found = printed_by("extended_whole.py", comfyui_path(), checkpoint_of(FAMILIES["flux"].checkpoint))
    assert {name: result["off"] for name, result in found.items()} == {
        "hook_in_the_middle": [0.0] * 2,
        "repeated_block": [0.0] * 4,
        "outside_of_inference_mode": [0.0] * 2,
        "room_made_in_a_patch": [0.0] * 2,
        "error_of_a_patch": [0.0],
    }
    assert {name for name, result in found.items() if not result["served"]} == {"error_of_a_patch"}, found
    assert found["outside_of_inference_mode"]["served"] <= 8, "in blocks from then on"


def test_what_is_called_around_a_forward_without_wrappers_keeps_what_it_keeps() -> None:
    """It is called on an image of the host's model object, which others have, too."""
    found = printed_by("own_apply_model.py", comfyui_path(), checkpoint_of(FAMILIES["flux"].checkpoint))
    assert all(case["off"] == [0, 0, 0] for case in found.values()), found
    assert [found[name]["served"] for name in ("nothing", "counted", "of_another")] == [5, 5, 0]
    assert any("in a way of its own" in reason for reason in found["of_another"]["eager"]), "silently slow"
