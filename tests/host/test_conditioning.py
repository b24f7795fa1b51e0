"""Prompts are copied to the device once a run, and no step waits for the GPU then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pictures import FAMILIES
from scripts import EVERY_HOST, checkpoint_of, path_of_host, printed_by

SD15 = FAMILIES["sd15"]


@pytest.fixture(scope="module", params=EVERY_HOST)
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What tests/host/prompts.py found, in each version of the host."""
    result: dict[str, Any] = printed_by("prompts.py", path_of_host(request.param), checkpoint_of(SD15.checkpoint))
    return result


def test_tensors_move_and_nothing_else(found: dict[str, Any]) -> None:
    kinds = found["kinds"]
    tensors = {"CONDRegular": 1, "CONDNoiseShape": 1, "CONDCrossAttn": 1, "CONDList": 2}
    assert kinds["moved"] == {**{name: ["meta"] * count for name, count in tensors.items()}, "CONDConstant": ["float"]}
    assert set(kinds["as they were"]) == {*tensors, "CONDConstant", "of another extension"} - {"CONDList"}
    assert kinds["classes"]
    assert kinds["same"] == ["CONDConstant", "of another extension"]
    assert kinds["mask"]
    assert kinds["changed meanwhile"], "what another extension changed was put back"


def test_what_is_there_already_is_not_copied(found: dict[str, Any]) -> None:
    assert found["kinds"]["moved again"] == []


def test_a_run_has_its_prompts_on_the_device(found: dict[str, Any]) -> None:
    run = found["run"]
    assert run["before"] == ["cpu"]
    assert run["behind"] == ["cuda" if torch.cuda.is_available() else "cpu"]
    assert run["same"], "an extension that holds the guider's lists changes others than the model is given"
    assert run["same bits"], "prompts alone change the picture"


def test_what_is_large_stays_where_it_is_in_all_prompts(found: dict[str, Any]) -> None:
    """The host joins what is on one device."""
    moved, kept = {"little": "meta", "much": "meta"}, {"little": "meta", "much": "cpu"}
    assert found["large"] == {"one prompt": [moved], "two prompts": [kept] * 2, "unequal ones": [kept] * 3}


def test_a_run_that_is_stopped_leaves_the_guiders_own_prompts(found: dict[str, Any]) -> None:
    assert found["stopped"]


def test_a_prompt_that_an_extension_changes_between_two_steps_is_what_the_model_is_given(found: dict[str, Any]) -> None:
    assert found["changed"] <= 1e-5


def test_a_guider_of_another_kind_runs_as_it_would(found: dict[str, Any]) -> None:
    assert found["another guider"] == [[None, 1, 2], [None], ["no guider"]]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU to wait for")
def test_no_step_waits_for_the_gpu(found: dict[str, Any]) -> None:
    few, more = found["waits"]["ours"]
    assert more == few, found["waits"]
    few, more = found["waits"]["eager"]
    assert more > few, "the host no longer waits: nothing is shown by this test"
