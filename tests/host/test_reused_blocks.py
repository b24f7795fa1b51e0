"""A model that does not fit, and a step cache: deep blocks are left out where that is right, and their weights stay."""

from __future__ import annotations

from typing import Any

import pytest
from pictures import FAMILIES
from scripts import checkpoint_of, printed_by

from dev.environment import comfyui_path

ALL, FIRST = 6, 1
"""Blocks computed in a call, of a model of six."""
# The first call shows in which order blocks are called. The second is made again in brief, to see that this is right;
# what changes between it and the third is known in the fifth.
REUSING = [ALL, ALL + FIRST, ALL, ALL] + 6 * [FIRST]
COMPUTING = [ALL, ALL + FIRST] + 8 * [ALL]
NOT_IN_BRIEF = ["the model needs what each of its blocks gives"]


@pytest.fixture(scope="module")
def found() -> Any:
    return printed_by("reused_blocks.py", comfyui_path())


@pytest.mark.parametrize("model", ["adding", "writing", "two streams", "taking"])
def test_deep_blocks_are_left_out_where_little_changes(found: dict[str, Any], model: str) -> None:
    run = found[model]
    assert (run["reused"], run["computed"], run["exact"], run["why"], run["eager"]) == (6, REUSING, 4, [], {})
    assert 0 < run["off"] < 0.01


def test_what_refines_a_prompt_is_computed_and_is_not_what_the_change_is_measured_by(found: dict[str, Any]) -> None:
    run = found["refined"]
    assert (run["reused"], run["computed"]) == (6, [11, 13, 11, 11] + 6 * [2])
    assert 0 < run["off"] < 0.01


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("at a threshold of nearly nothing", []),
        ("prompt first", []),
        ("summing", NOT_IN_BRIEF),
        ("random", NOT_IN_BRIEF),
        ("little memory", ["what is kept to reuse steps would take too much of the memory"]),
    ],
)
def test_everything_is_computed_where_that_is_wanted_or_needed(found: dict[str, Any], model: str, why: Any) -> None:
    run = found[model]
    assert (run["reused"], run["exact"], run["computed"], run["why"]) == (0, 10, COMPUTING, why)


@pytest.mark.parametrize(("model", "called"), [("skipping", ALL - 1), ("turning", ALL), ("ending", 4)])
def test_a_forward_that_calls_its_blocks_otherwise_is_computed_anew(
    found: dict[str, Any], model: str, called: int
) -> None:
    """From the eighth call on it does: the first such call begins in brief, and is made again in whole."""
    run = found[model]
    assert (run["reused"], run["exact"]) == (3, 7)
    assert run["computed"] == [*REUSING[:7], FIRST + called, called, called]
    assert run["why"] == ["the model's blocks are called otherwise than in the step before"]


def test_what_was_found_and_seen_to_be_right_in_one_order_is_nothing_in_another(found: dict[str, Any]) -> None:
    run = found["turned"]
    assert (run["reused"], run["exact"], run["why"]) == (0, 10, NOT_IN_BRIEF)
    assert run["computed"] == [ALL, ALL + FIRST, ALL, ALL, ALL + FIRST] + 5 * [ALL]


def test_an_option_that_changes_in_a_run_is_another_kind_of_call(found: dict[str, Any]) -> None:
    run = found["told"]
    assert (run["reused"], run["exact"], run["why"]) == (3, 7, NOT_IN_BRIEF)
    assert run["computed"] == [*REUSING[:7], ALL, ALL + FIRST, ALL]
    assert run["off"] < 0.01


def test_each_run_sees_anew_that_the_forward_needs_no_more(found: dict[str, Any]) -> None:
    run = found["changed between runs"]
    assert (run["reused"], run["exact"], run["why"]) == (0, 10, NOT_IN_BRIEF)
    assert run["computed"] == [ALL + FIRST] + 9 * [ALL]


def test_a_model_that_counts_its_calls_is_called_once_a_step(found: dict[str, Any]) -> None:
    run = found["counting"]
    assert (run["reused"], run["computed"], run["called"]) == (0, 10 * [ALL], 2 * 10)
    assert run["why"] == ["the model's forward changes what it keeps"]


def test_no_weights_are_brought_ahead_in_a_forward_in_brief(found: dict[str, Any]) -> None:
    run = found["prefetching"]
    assert (run["reused"], run["not ahead"]) == (6, 6 + 1)  # and once to see that it is right
    assert run["ahead"] == 10 + 4  # the model's own, which ours are compared with, and those of ours in whole


def test_functions_of_other_nodes_are_called_once_a_step(found: dict[str, Any]) -> None:
    run = found["functions"]
    assert (run["reused"], run["exact"], run["computed"]) == (0, 10, 10 * [ALL])
    assert run["called"] == 2 * 10  # ours and the model's own, which it is compared with
    assert run["why"] == ["functions of other nodes take part, and not all of the model is on the device at once"]


@pytest.mark.parametrize("model", ["noting", "noting in an object"])
def test_what_a_forward_writes_to_what_it_is_given_is_written_once_a_step(found: dict[str, Any], model: str) -> None:
    """Where it is made again in brief, it is given copies. Of an object there are none, so nothing is tried."""
    run = found[model]
    assert (run["reused"], run["called"]) == (0, 2 * 10)  # ours and the model's own, which it is compared with


def test_flux_in_dynamic_vram_gives_the_picture_of_one_that_fits_and_brings_one_block_in_a_step_that_reuses() -> None:
    runs = printed_by("reused_flux.py", comfyui_path(), checkpoint_of(FAMILIES["flux"].checkpoint))
    assert all(run["eager"] == {} for run in runs.values())
    second, lora, none = runs["second"], runs["LoRA"], runs["none reused"]
    # Which blocks there are is seen in the first picture's first step, so in that one a step later.
    assert (second["off"], none["off"]) == (0.0, 0.0)
    assert lora["off"] <= 1e-3  # the host adds it with other roundings, as in ``test_dynamic_vram.py``
    assert none["asked"] == 12 * [2]
    for name in ("first", "second", "LoRA"):
        run = runs[name]
        assert run["reused"] >= 6
        assert run["off"] < 0.1
        made_in_brief = 1  # to see that it is right, in a step that was computed
        assert sum(run["asked"]) == 2 * 12 - run["reused"] + made_in_brief
