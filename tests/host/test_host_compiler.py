"""Newer hosts plan what a forward allocates: ours is no part of the plan, and leaves it as it found it."""

from __future__ import annotations

from typing import Any

import pytest
from scripts import printed_by

from dev.environment import comfyui_path

WHOLE = ("AroundWrappers", "OperatorPauses", "InsideForward", "Cores", "PausesItself")
IN_BLOCKS = ("AroundWrappers in blocks", "InsideForward in blocks")
GIVEN_UP = ("GivenUpAround", "GivenUpInside")
INSIDE_A_PLAN = ("AroundWrappers", "Cores", *IN_BLOCKS)
"""Where our calls are made while a plan is followed. The others open theirs behind our wrapper."""


@pytest.fixture(scope="module")
def models() -> Any:
    return printed_by("planned_models.py", comfyui_path())


@pytest.mark.parametrize("name", [*WHOLE, *IN_BLOCKS, *GIVEN_UP, "PausesItself in blocks"])
def test_nothing_outlives_a_forward_is_freed_where_it_must_not_be_or_is_left_open(models: Any, name: str) -> None:
    found = models[name]["paused"]
    assert found["failed"] is None and len(found["calls"]) > 3
    for call in found["calls"]:
        assert call["right"], call
        assert call["freed"] == call["errors"] == call["left_open"] == 0, call
        assert call["rogues"] == call["aborts"] == 0 or name == "GivenUpInside", call


@pytest.mark.parametrize("name", [*WHOLE, *IN_BLOCKS])
def test_a_served_call_is_no_part_of_the_plan(models: Any, name: str) -> None:
    found = models[name]["paused"]
    first, *_, last = found["calls"]
    assert found["served"] and not found["eager"]
    assert first["planned"] <= found["alone"], "more than eager, which it is compared with"
    assert last["planned"] < found["alone"] / 3, "more than what the host's own code makes around the blocks"
    assert last["breaks"] == 0


@pytest.mark.parametrize("name", INSIDE_A_PLAN)
def test_without_our_pause_it_would_be(models: Any, name: str) -> None:
    """Guards the tests above."""
    found = models[name]["not paused"]
    first, *_, last = found["calls"]
    assert first["planned"] > 2 * found["alone"]
    assert last["planned"] > found["alone"]


@pytest.mark.parametrize("name", GIVEN_UP)
def test_a_trace_that_is_given_up_would_end_the_forward_after_it(models: Any, name: str) -> None:
    """Guards the tests above: without the end that we put to what a trace has begun."""
    assert models[name]["not paused"]["failed"]


def test_blocks_that_the_host_calls_in_a_pause_of_its_own_run_as_it_calls_them(models: Any) -> None:
    found = models["PausesItself in blocks"]["paused"]
    assert found["served"] == 0
    assert all("compiler is paused" in reason for reason in found["eager"])
    assert all(call["planned"] == found["alone"] for call in found["calls"])


def test_where_the_compiler_cannot_be_paused_the_host_computes_alone(models: Any) -> None:
    found = models["cannot be paused"]
    assert found["served"] == 0
    assert all("--disable-comfy-compiler" in reason for reason in found["eager"])
    assert all(call["planned"] == found["alone"] and call["right"] for call in found["calls"])
