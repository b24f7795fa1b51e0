"""Other nodes replace tables of wrappers that ours are in, and copy the options of a run."""

from __future__ import annotations

from typing import Any

import pytest
from scripts import path_of_host, printed_by

STEPS = 3


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    rows: dict[str, Any] = printed_by("replaced_tables.py", path_of_host("this one"), "sd15")
    return rows


def test_the_picture_is_right_whatever_was_replaced(found: dict[str, Any]) -> None:
    """Also if a function of the model's code was replaced between two pictures: each is a run, which looks again."""
    for node, row in found.items():
        assert max(row["off"]) <= 1e-5, (node, row)


@pytest.mark.parametrize("node", ["runs", "runs and calls", "runs and samplers", "copies options"])
def test_a_run_is_begun_and_served_all_the_same(found: dict[str, Any], node: str) -> None:
    assert found[node]["runs"] >= 3
    assert found[node]["runs"] == 3 or node == "runs and samplers", (
        "one for each picture, where any of ours is around it"
    )
    assert min(found[node]["served"]) >= STEPS


@pytest.mark.parametrize("node", ["forwards", "answers first"])
def test_a_model_that_did_not_reach_us_once_is_served_in_later_runs(found: dict[str, Any], node: str) -> None:
    """What a forward reads is kept for good: one that asks for wrappers is not to be taken for one that does not."""
    assert found[node]["served"][-1] >= STEPS
