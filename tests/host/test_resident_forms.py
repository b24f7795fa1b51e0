"""Dynamic VRAM: one resident form for each model, shared by all that is made of it, and given back."""

from __future__ import annotations

from typing import Any

import pytest
from pictures import FAMILIES
from scripts import EVERY_HOST, checkpoint_of, path_of_host, printed_by

from dev.environment import comfyui_path

FLUX = FAMILIES["flux"]


@pytest.fixture(scope="module", params=EVERY_HOST)
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What tests/host/resident_forms.py found, in each version of the host."""
    result: dict[str, Any] = printed_by(
        "resident_forms.py", path_of_host(request.param), checkpoint_of(FLUX.checkpoint)
    )
    return result


def test_the_checkpoint_is_read_once_for_all_loras_and_nodes(found: dict[str, Any]) -> None:
    assert found["lora_changes"] == {"loads": 1, "shared": True, "entries": 1}


def test_clones_with_different_loras_give_their_own_pictures_in_turns(found: dict[str, Any]) -> None:
    turns = found["pictures"]
    assert turns["loads"] == 1
    assert min(turns["apart"]) > 0.05, "the LoRAs change too little to prove anything"
    assert max(turns["off"]) <= 1e-4, turns


def test_between_two_prompts_the_form_is_kept_and_stays_the_hosts_to_manage(found: dict[str, Any]) -> None:
    between = found["between_prompts"]
    assert between["kept"]
    assert between["managed"] == [True], "the host has another model's patcher for it, or none"
    assert between["was_patched"] > 0
    assert between["still_patched"] == 0, "unloaded, it has a LoRA of somebody who is gone"
    assert between["loads"] == 1
    assert between["off"] <= 1e-4


def test_what_other_nodes_made_of_a_clone_keeps_the_form(found: dict[str, Any]) -> None:
    assert found["clones_of_others"] == {"loads": 1, "shared": True}


def test_without_the_node_the_memory_comes_back(found: dict[str, Any]) -> None:
    expected = {"kept": True, "passed": True, "gone": True, "weights_gone": True, "loaded": 0, "loads": 2}
    assert found["the_while_passes"] == expected


def test_nothing_is_taken_from_under_a_prompt_that_runs(found: dict[str, Any]) -> None:
    waited = found["a_prompt_is_running"]
    assert (waited["passed"], waited["gone_while_running"], waited["gone"]) == (True, False, True)


def test_a_while_that_is_over_just_when_another_clone_dies_does_not_end_the_newer_one(found: dict[str, Any]) -> None:
    assert found["a_newer_while"] == {"due": True, "whiles": 2, "kept": True, "passed": True, "gone": True}


def test_a_clone_that_is_found_as_garbage_leaves_the_form_and_waits_for_nobody(found: dict[str, Any]) -> None:
    assert found["in_a_cycle"] == {"loads": 1, "answered": True, "passed": True}


def test_it_goes_with_the_dynamic_model(found: dict[str, Any]) -> None:
    names = ("kept", "source_gone", "gone", "source_gone_first", "gone_last")
    assert found["dynamic_model_goes"] == dict.fromkeys(names, True) | {"loaded": 0}


def test_a_model_on_another_gpu_has_one_too_and_stays_what_the_host_takes_it_for(found: dict[str, Any]) -> None:
    assert found["on_another_gpu"] == {"loads": 1, "resident": True, "of_the_split": True, "found_again": True}


def test_a_model_in_dynamic_vram_is_loaded_once_more_only_for_a_run_that_is_split_over_gpus(
    found: dict[str, Any],
) -> None:
    """However many GPUs there are. The run is of a clone, with all that is on the MODEL, and the MODEL stays."""
    split = found["split_behind_the_node"]
    assert split["loads"] == [0, 2, 2, 2], "the model and the one on another GPU, once each"
    assert split["ran"] == [[True, "kept"], [False, "kept"], [False, "kept"], [True, "kept"]]
    assert split["own"] == [True, True]
    assert max(split["off"]) <= 1e-4
    assert split["served"] == 8
    assert not any(split["without a patcher"]), "ComfyUI's node that splits a model ends where there is one"
    assert split["left"] == 0


def test_a_split_over_gpus_of_the_dynamic_model_does_not_take_its_resident_form(found: dict[str, Any]) -> None:
    """ComfyUI's thread for prompts ended where one workflow split an accelerated MODEL, and the next one its source."""
    assert found["clones_to_the_host"] == {"accelerated": True, "and_its_source": False}


def test_nothing_is_left_on_what_the_host_gave_us(found: dict[str, Any]) -> None:
    assert found["leftovers"] == []


def test_vaes_and_clips_share_theirs_too(found: dict[str, Any]) -> None:
    for kind in ("VAE", "CLIP"):
        case = found[kind]
        assert (case["loads"], case["shared"], case["kept"], case["gone"]) == (1, True, True, True), (kind, case)
        assert case["served"] == [True, True], (kind, case)
        assert max(case["off"]) <= 1e-4, (kind, case)
        assert not case["managed in Dynamic VRAM"], "once no clone is left, the host would take its pages: it has none"


def test_the_host_sees_no_leak(found: dict[str, Any]) -> None:
    """As it would if a loader has put the model on the device already, and its patcher were not the one we keep."""
    assert found["leaks"] == []


def test_our_copy_of_a_network_has_no_pages_that_may_be_gone() -> None:
    """Where a ControlNet ran in Dynamic VRAM before it was given a node of ours."""
    assert printed_by("network_copied.py", comfyui_path()) == {"left": [], "kept": True, "same": True}
