"""Videos are decoded by graphs piece by piece; and calls of parts of models are functional, whatever these leave."""

from __future__ import annotations

from typing import Any

import pytest
from scripts import printed_by

from dev.environment import comfyui_path

BOUND = 1e-5  # of the range, in float32
REFUSED = {
    "_changes_a_dict",
    "_keeps_a_list",
    "_keeps_an_object",
    "writes to what is given twice",
    "writes to a part of what is given",
    "a list that is given twice",
}


@pytest.fixture(scope="module")
def printed() -> dict[str, Any]:
    return printed_by("videos.py", comfyui_path())  # type: ignore[no-any-return]


def counted(videos: dict[str, Any]) -> dict[str, tuple[int, int, int]]:
    return {name: (found["served"], found["eager"], found["captured"]) for name, found in videos.items()}


@pytest.mark.slow  # Wan 2.1's, below
def test_so_are_those_of_another_vae_of_the_kind() -> None:
    found = printed_by("videos.py", "2.2", comfyui_path())
    assert counted(found) == {
        "first": (4, 3, 1),
        "again": (5, 2, 0),
        "of another size": (6, 3, 0),
        "with half a piece in the end": (6, 2, 0),  # a piece is one frame
        "short": (0, 2, 0),
    }
    assert max(each["off"] for each in found.values()) <= BOUND


def test_pieces_that_are_like_one_another_are_served_by_one_graph_for_all_videos(printed: dict[str, Any]) -> None:
    assert counted(printed["videos"]) == {
        "first": (1, 3, 1),  # one frame; two, with nothing kept of more; two; and two like the last
        "again": (2, 2, 0),  # pieces like that have followed one another
        "of another size": (2, 3, 0),
        "with half a piece in the end": (2, 3, 0),
        "short": (0, 2, 0),
    }


def test_each_picture_is_the_hosts(printed: dict[str, Any]) -> None:
    assert max(found["off"] for found in printed["videos"].values()) <= BOUND


def test_an_encoders_pieces_take_turns_and_stay_the_hosts(printed: dict[str, Any]) -> None:
    """Two graphs for each level with frames would be compiled, for what is done once a video."""
    found = printed["encoded"]
    assert (found["served"], found["captured"], found["off"]) == (0, 0, 0.0)


def test_a_graph_in_a_file_may_be_for_a_part(printed: dict[str, Any]) -> None:
    """Whose weights it names as the part does, and not the whole VAE."""
    assert {"WanVAE", "Decoder3d"} <= set(printed["modules"])


def test_what_a_block_leaves_in_a_list_is_there_for_the_next_one(printed: dict[str, Any]) -> None:
    """And where it is nothing that a graph could give, the picture is made all the same."""
    assert {name: (found["served"], found["eager"]) for name, found in printed["blocks"].items()} == {
        "_doubled": (3, 0),
        "_written": (3, 1),  # what a graph gives for the first is not used
        "_object": (0, 3),
    }
    assert max(found["off"] for found in printed["blocks"].values()) <= BOUND


def test_a_functional_call_gives_and_leaves_what_the_call_itself_does(printed: dict[str, Any]) -> None:
    """Entries of lists that are replaced, moved, added and removed; tensors that are written to; what none can be."""
    found = printed["functional"]
    assert len(found) == 17
    assert found == {name: "refused" if name in REFUSED else "same" for name in found}


@pytest.fixture(scope="module", params=["dynamic", "resident"])
def changed(request: pytest.FixtureRequest) -> Any:
    return printed_by("changed_video_vae.py", comfyui_path(), request.param)


def test_what_other_extensions_change_of_a_video_vae_is_in_each_video(changed: dict[str, Any]) -> None:
    assert {what: max(case["off"]) for what, case in changed.items()} == dict.fromkeys(changed, 0.0)
    without = {what for what, case in changed.items() if not case["changes"]}
    assert without == {"nothing", "hooked"}, "what changes nothing shows nothing"


def test_what_other_extensions_note_of_a_video_is_what_they_note_of_comfyuis(changed: dict[str, Any]) -> None:
    """Whatever is compared, and traced: a hook or a count would have seen more."""
    for what, case in changed.items():
        by_host, ours = case["noted"]
        assert ours == by_host and bool(by_host) == (what != "nothing"), what


def test_a_video_is_served_whose_functions_are_around_what_graphs_answer(changed: dict[str, Any]) -> None:
    served = {what for what, case in changed.items() if case["served"]}
    assert {"nothing", "hooked"} <= served
    assert not served & {"other_vae", "object_of_its_own", "counting"}, "another's code may ask what it runs on"


@pytest.fixture(scope="module", params=["dynamic", "resident"])
def told_apart(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return request.param, printed_by("vaes_told_apart.py", comfyui_path(), request.param)


def test_a_class_of_comfyuis_may_be_changed_for_one_vae_of_two(told_apart: tuple[str, dict[str, Any]]) -> None:
    """Also while they are in use."""
    _, cases = told_apart
    assert {what: max(case["off"]) for what, case in cases.items()} == dict.fromkeys(cases, 0.0)
    assert len(cases) == 10 and all(case["apart"] > 0.1 for case in cases.values()), "shows nothing"


def test_a_vae_is_served_whose_class_treats_it_as_any_other(told_apart: tuple[str, dict[str, Any]]) -> None:
    """Where its weights stay, and a graph is of the VAE itself. Elsewhere it would be asked which image it is."""
    where, cases = told_apart
    for way in ("by_address", "by_text", "by_address_later"):
        for first in ("it", "the other"):
            served = sum(each["served"] for each in cases[f"{way}, {first} first"]["answered"])
            assert (served > 0) == (where == "resident"), (way, first, served)
