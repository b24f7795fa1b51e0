"""A model in Dynamic VRAM is served from the pages that the host keeps its weights in, and is loaded once."""

from __future__ import annotations

from typing import Any

import pytest
from controls import NET
from pictures import FAMILIES
from scripts import checkpoint_of, printed_by

from dev.environment import comfyui_path, repository
from tools.models.checkpoints import checkpoint_file
from tools.models.controls import ensure_controls

FLUX = FAMILIES["flux"].checkpoint
# The host adds a LoRA to a weight in Dynamic VRAM with other roundings than to one that stays.
ROUNDING_OF_A_LORA = 1e-3
# Calls of two steps: of two blocks, or of the whole model and then of two blocks.
BLOCK_BY_BLOCK = {
    "half of the pages": 4,
    "all there, and no room to compute": 4,
    "out of memory": 4,
    "room of no other model": 3,
    "room of one after": 3,
    "no room to compute": 4,
    "a page less": 3,
    "8 bits, in blocks": 4,
    "8 bits, LoRA, in blocks": 4,
    "8 bits again, in blocks": 4,
    "asked ahead": 4,
    "LoRA, asked ahead": 4,
}
# In the call in which the host adds a LoRA to 8 bits, layers compute with more bits than are kept. A graph of the
# whole model reads what is kept.
LORA_ON_8_BITS = "a LoRA is added to 8-bit weights while they are brought to the device"
# The call in which weights are found to be wrong counts as served, too.
OF_WRONG_WEIGHTS = {"wrong pages": 3, "LoRA on wrong pages": 3, "wrong blocks": 2, "LoRA on wrong blocks": 2}
LEFT_TO_THE_HOST = {"wrong in the background": 0, "wrong bringing": 0, "wrong comparing": 4}
NO_GRAPH = dict.fromkeys(("asked ahead, no graph", "LoRA, asked ahead, no graph"), 0)
SERVED = {**BLOCK_BY_BLOCK, **OF_WRONG_WEIGHTS, **LEFT_TO_THE_HOST, **NO_GRAPH, "8 bits, LoRA": 1}
WRONG = "its weights as they are brought are not what ComfyUI computes with"
EAGER = {
    "wrong pages": {WRONG: 1},
    "wrong blocks": {WRONG: 4},
    "LoRA on wrong pages": {WRONG: 1},
    "LoRA on wrong blocks": {WRONG: 4},
    "8 bits, LoRA": {LORA_ON_8_BITS: 1},
    "out of memory": {"the compiled graph ran out of memory": 1},
    "wrong in the background": {
        "its weights do not all fit, and its blocks are not compiled in the background; choose compile: auto": 2
    },
    "wrong bringing": {"looking for its graph failed (RuntimeError: VRAM grow failed: 8 bytes)": 4},
    "wrong comparing": {"there is too little memory to compare it with ComfyUI's own": 4},
    **{name: {"the compiled graph failed (RuntimeError: a kernel of the graph's)": 4} for name in NO_GRAPH},
}
NOT_IN_LAYERS = "its weights do not all fit, and ComfyUI brings them layer by layer"
RAN_OUT = "memory ran out while all of its weights were on the card"
FIRST_PIECES = "the first pieces of a video are ComfyUI's own; graphs serve those that are like one another"
NOT_COMFYUIS = "this VAE has code that is not ComfyUI's, so its videos are made by that code alone"
ROUNDING_OF_A_HINT = 2e-6  # which ours makes one of for each image before the network does
STEPS_OF_A_CONTROL = 3
OF_OTHER_MODELS = ("wrong", "8 bits", "LoRA on wrong", "room of")


@pytest.fixture(scope="module")
def found() -> Any:
    return printed_by("in_dynamic_vram.py", comfyui_path(), checkpoint_of(FLUX))


def test_every_picture_is_an_ordinary_models(found: dict[str, Any]) -> None:
    for case in found["cases"]:
        assert case["off"] <= (ROUNDING_OF_A_LORA if case["name"].startswith("LoRA") else 0.0), case


def test_every_call_is_served_whole_while_all_weights_fit_and_block_by_block_while_they_do_not(
    found: dict[str, Any],
) -> None:
    assert {case["name"]: case["served"] for case in found["cases"]} == {
        case["name"]: SERVED.get(case["name"], 2) for case in found["cases"]
    }
    eager = {case["name"]: case["eager"] for case in found["cases"] if case["eager"]}
    assert eager == EAGER, "whether the pages hold the host's weights is not looked at, or more than is needed is eager"


def test_where_memory_runs_out_recordings_give_theirs_back_before_the_host_runs_a_block(found: dict[str, Any]) -> None:
    """Its library takes weights for what is allocated, and nothing of theirs."""
    asked = {case["name"]: sum(case["asked"]) for case in found["cases"] if "asked" in case}  # besides, when models die
    assert asked == {"wrong bringing": 4, "wrong comparing": 4}
    (bringing,) = (case for case in found["cases"] if case["name"] == "wrong bringing")
    assert bringing["asked in four steps"] == 4, "what cannot be brought is tried twice a run, for each block"


def test_nothing_is_left_of_what_was_brought_in_part(found: dict[str, Any]) -> None:
    """The host's own forward would take it for a layer's weights, in whatever call comes next."""
    assert {case["name"]: case["notes"] for case in found["cases"] if "notes" in case} == {
        "wrong bringing": 0,
        "wrong comparing": 0,
    }


def test_one_graph_of_the_whole_model_is_captured_and_one_of_each_kind_of_block(found: dict[str, Any]) -> None:
    captured = {case["name"]: case["captured"] for case in found["cases"] if case["captured"]}
    of_other_files = {"8 bits": 1, "8 bits, in blocks": 2, "8 bits, LoRA, in blocks": 2, "asked ahead": 2}
    assert captured == {"first": 1, "a page less": 2, **of_other_files}


@pytest.mark.slow  # that a compiler is given nothing but tensors, ``test_records_of_blocks.py`` sees in no time
def test_inductor_compiles_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that returns what it was given, as Flux' does, is no trouble to a compiler."""
    monkeypatch.setenv("ENGINE", "inductor")
    monkeypatch.setenv("ONLY_BLOCKS", "1")
    (case,) = printed_by("in_dynamic_vram.py", comfyui_path(), checkpoint_of(FLUX))["cases"]
    assert (case["served"], case["eager"], case["captured"]) == (4, {}, 2)
    assert case["off"] <= 1e-4


def test_tensors_over_the_buffer_that_weights_pass_through_are_made_once(found: dict[str, Any]) -> None:
    """Not where the weight is of another dtype by then. Another object needs none. Pictures are the host's own."""
    pictures = found["placed"]["in a buffer"]
    assert {what: picture["off"] for what, picture in pictures.items()} == dict.fromkeys(pictures, 0.0)
    later = {what: picture["asked"][1] for what, picture in pictures.items()}
    assert later.pop("fewer bits") > 1, "the host converts it in each call"
    assert later == {"nothing": 0, "other values": 0, "another weight": 0}
    assert min(picture["asked"][0] for picture in pictures.values()) > 10, "nothing passes through a buffer"
    assert pictures["nothing"]["mean"] != pictures["other values"]["mean"] == pictures["another weight"]["mean"]


def test_no_weights_are_taken_back_for_want_of_memory_while_all_are_in_use(found: dict[str, Any]) -> None:
    """All of them would be, and would come back from RAM: twice in one image, on an H200 with 16 GiB left."""
    there = {case["name"]: case["there"] for case in found["cases"]}
    assert (there["first"], there["short of memory"]) == (1, 1)
    assert there["half of the pages"] < 1, "what was looked at says nothing"


def test_a_model_for_which_memory_runs_out_is_let_go_of_and_served_block_by_block(found: dict[str, Any]) -> None:
    (case,) = (case for case in found["cases"] if case["name"] == "out of memory")
    assert (case["there"], case["pinned"], case["limit"]) == (1, 0, 0), "the host could take nothing back of it"
    assert case["failed"] == ["EagerGraph.__call__"] * 2, "once more in the first step, and in no other"
    assert case["again"] == [2, {}, 0.0], "in the next image its graph is tried again"


def test_a_model_that_ran_without_us_has_its_weights_in_another_order_once_it_is_ours(found: dict[str, Any]) -> None:
    """And every picture since is right, as other tests here say."""
    assert found["placed"]["off before"] == 0
    before, now = found["placed"]["order"]
    assert sorted(before) == sorted(now) and before != now
    of_blocks = sum("_blocks." in name for name in now)
    assert of_blocks and all("_blocks." in name for name in now[-of_blocks:]), "first is what is in no block"


def test_a_layer_that_was_elsewhere_while_places_were_given_has_its_own_when_it_comes_back(
    found: dict[str, Any],
) -> None:
    assert found["placed"]["another layer"] == [0, 0, 0, 0]


def test_each_modules_first_call_is_known_for_it_may_wait_for_a_file(found: dict[str, Any]) -> None:
    assert found["placed"]["first calls"] == [[True, False], [True, True, False, False]]


def test_a_model_without_room_is_looked_at_once_a_run_until_there_is_room(found: dict[str, Any]) -> None:
    assert found["placed"]["looks"] == [1, 2]


def test_no_weights_come_back_to_where_there_will_be_no_room_for_them(found: dict[str, Any]) -> None:
    """Known behind the first image of a size, which has a capture. In that one pages are filled in vain."""
    images = [[filled, there] for filled, there, _ in found["placed"]["returning"]]
    (first, at_first), second, third, fourth, fifth, sixth, with_room, whole_then, whole = images
    assert first > at_first, "there is nothing to be seen here"
    assert second[0] == second[1] - at_first > 0, "there is room for more, and no more came than stayed"
    assert third[1] < second[1] > fourth[1], "nothing is taken for a while in these two"
    assert fourth[1] < fifth[0] + fourth[1] == fifth[1] < sixth[1] < second[1], "not half of what nobody used is tried"
    assert sixth[0] == sixth[1] - fifth[1]
    assert with_room[0] == with_room[1] - sixth[1] > 0
    assert whole_then[1] == whole[1] > with_room[1], "the limit is not lifted once all weights fit"
    assert whole[0] == 0


def test_a_person_can_stop_an_image_between_two_blocks_of_a_step(found: dict[str, Any]) -> None:
    """ComfyUI's own forward asks before each layer. A step of a large model on a small card takes a minute."""
    stopped = found["placed"]["stopped"]
    assert (stopped["called"], stopped["pinned"], stopped["notes"]) == (1, 0, found["left"]["notes"])
    assert (stopped["off"], stopped["served"], stopped["eager"]) == (0.0, 4, {})


def test_the_device_is_not_waited_for_in_steps_of_a_model_that_does_not_fit(found: dict[str, Any]) -> None:
    """As it is where PyTorch gives back what it keeps, so that weights can be where that was."""
    assert [emptied for *_, emptied in found["placed"]["returning"]][:7] == [0] * 7


def test_a_model_that_a_node_behind_ours_puts_on_another_gpu_is_served_there(found: dict[str, Any]) -> None:
    """ComfyUI's Select Model Device loads the file once more, for a clone, with which that model goes."""
    elsewhere = found["placed"]["elsewhere"]
    assert elsewhere.pop("gone"), "what serves the MODEL keeps the weights of a clone that is gone"
    assert {name: (case["off"], case["eager"]) for name, case in elsewhere.items()} == dict.fromkeys(
        ("whole", "blocks", "before"), (0.0, {})
    )
    assert {name: case["served"] for name, case in elsewhere.items()} == {"whole": 2, "blocks": 4, "before": 2}


def test_no_other_model_is_loaded_and_no_page_stays_pinned(found: dict[str, Any]) -> None:
    ours = [case for case in found["cases"] if not case["name"].startswith(OF_OTHER_MODELS)]
    assert {case["loaded_models"] for case in ours} == {1}
    assert {case["pinned"] for case in found["cases"]} == {0}
    held = found["left"].pop("held")
    assert found["left"] == {"pinned": 0, "notes": [], "reserve": [None, 1 << 30, 9 << 29, 1 << 30]}
    assert held == [False, True, True, False, True], "its host takes no weights off a device while they are held there"


def test_a_call_that_is_answered_once_more_is_given_what_it_was_given_at_first() -> None:
    """A UNet pops what a ControlNet gave: the second time nothing would be left of it, and the picture without it."""
    found = printed_by("used_up_control.py", comfyui_path(), checkpoint_of(FAMILIES["sd15"].checkpoint))
    assert found.pop("effect") > 0.05, "it could not be seen"
    assert found.pop("ended") == found.pop("ended by the host"), "an extension's exception is none of memory"
    assert all(off <= 1e-5 for off in found.values()), found


def test_a_controlnet_is_served_from_dynamic_vram_while_it_fits() -> None:
    """One form of its weights is in memory: a copy of the network was, whose weights did not make way page by page."""
    made = repository() / ".cache" / "controls"
    ensure_controls(comfyui_path(), made, [NET])
    files = checkpoint_of(FAMILIES["sd15"].checkpoint), made / checkpoint_file(NET)
    for dtype, found in printed_by("control_in_dynamic_vram.py", comfyui_path(), *files).items():
        assert found.pop("effect") > 0.1 and found.pop("shared") and found.pop("by the host") == 0.0
        assert max(case["off"] for case in found.values()) < ROUNDING_OF_A_HINT, dtype
        no_room = found.pop("no room")
        assert no_room["eager"] == {NOT_IN_LAYERS: STEPS_OF_A_CONTROL} and no_room["served"] == no_room["pinned"] == 0
        for name, case in found.items():
            expected = {"eager": {}, "served": STEPS_OF_A_CONTROL, "pinned": 0, "models": 2}
            assert {key: case[key] for key in expected} == expected and case["captured"] == (name == "first"), name


@pytest.fixture(scope="module")
def vaes() -> Any:
    return printed_by("vae_in_dynamic_vram.py", comfyui_path(), checkpoint_of(FLUX))


@pytest.mark.parametrize(
    ("kind", "rounding"),
    [
        ("32 bits", 1e-6),  # ComfyUI hands over pixels with channels last, and ours with channels first
        ("16 bits, computes in 32", 1e-6),
        ("32 bits, computes in 16", 1e-2),
        ("videos", 0.0),
    ],
)
def test_a_vae_is_served_from_dynamic_vram(vaes: dict[str, Any], kind: str, rounding: float) -> None:
    """One form of its weights is in memory, whatever dtype they are in the file."""
    of_it = dict(vaes[kind])
    assert of_it.pop("shared") and of_it.pop("by the host") == 0.0
    assert {name: case["pinned"] for name, case in of_it.items()} == dict.fromkeys(of_it, 0)
    assert {name: case["models"] for name, case in of_it.items()} == dict.fromkeys(of_it, 1)
    assert max(case["off"] for name, case in of_it.items() if name != "encoded") == 0.0
    assert of_it["encoded"]["off"] <= rounding
    no_room = of_it.pop("no room")
    assert (no_room["served"], no_room["eager"]) == (0, {NOT_IN_LAYERS: 1})
    left = {FIRST_PIECES} if kind == "videos" else set()
    for name, case in of_it.items():
        assert set(case["eager"]) == left, name
        assert (case["served"] > 0) == (name != "encoded" or kind != "videos"), name
    assert not any(of_it[name]["captured"] for name in of_it if name not in ("decoded", "encoded"))


@pytest.mark.parametrize(
    ("kind", "seen"),
    [
        ("32 bits", {"decoded": 1, "decoded again": 1, "encoded later": 1}),
        ("videos", {"decoded": 1, "decoded again": 2, "encoded later": None}),
    ],
)
def test_a_vae_whose_weights_come_out_wrong_is_left_to_the_host(
    vaes: dict[str, Any], kind: str, seen: dict[str, int | None]
) -> None:
    """Encoding is looked at, too, whatever is known of decoding; of videos each piece, and no graph encodes these."""
    wrong = dict(vaes[f"wrong: {kind}"])
    assert wrong.pop("before")["served"] > 0
    assert {name: case["off"] for name, case in wrong.items()} == dict.fromkeys(wrong, 0.0)
    assert {name: case["eager"].get(WRONG) for name, case in wrong.items()} == seen
    assert wrong["decoded again"]["served"] == 0
    assert (vaes[f"replaced: {kind}"]["off"], vaes[f"replaced: {kind}"]["served"]) == (0.0, 0)


def test_a_vae_shows_its_weights_by_all_of_an_image_where_it_takes_no_less(vaes: dict[str, Any]) -> None:
    stubborn = vaes["stubborn"]
    assert (stubborn["off"], stubborn["eager"]) == (0.0, {}) and stubborn["served"] > 0


def test_a_size_for_which_memory_ran_out_twice_is_the_hosts_for_some_images(vaes: dict[str, Any]) -> None:
    """A graph that runs out of memory has computed nearly all of the image, twice, before the host's tiles do."""
    short = vaes["short of memory"]
    assert [image["tried"] for image in short["images"][:8]] == [2, 2, 0, 0, 0, 0, 2, 0]
    assert [image["served"] for image in short["images"]] == [0] * 14 + [1, 1], "twice as many are left out"
    assert max(image["off"] for image in short["images"]) == 0.0
    assert not any(image["pinned"] for image in short["images"])
    reasons = [reason for image in short["images"] for reason in image["eager"]]
    assert set(reasons) == {"the compiled graph ran out of memory", RAN_OUT} and NOT_IN_LAYERS not in reasons
    assert short["of another size"]["served"] == 1


def test_an_error_in_bringing_a_vaes_weights_is_told_as_what_it_was(vaes: dict[str, Any]) -> None:
    reason = "ComfyUI could not bring all of its weights (ValueError: a file that is gone)"
    images = [(image["off"], image["served"], image["eager"]) for image in vaes["not brought"]]
    assert images == [(0.0, 0, {reason: 1})] * 2


def test_a_vae_that_draws_random_numbers_draws_as_many_as_by_itself(vaes: dict[str, Any]) -> None:
    """Else whatever draws after it would get others: a corner shows its weights, once on the image and once by it."""
    drawing = vaes["drawing"]
    assert (drawing["off"], drawing["served"], drawing["as many drawn"]) == (0.0, 0, True)
    assert set(drawing["eager"]) == {NOT_COMFYUIS}


@pytest.fixture(scope="module")
def encoders() -> Any:
    return printed_by("encoders_in_dynamic_vram.py", comfyui_path())


@pytest.mark.parametrize(
    ("family", "stacks", "left"),
    [
        ("sd15", 1, {}),
        ("sdxl", 2, {}),
        ("flux", 2, {}),
        ("flux in 8 bits", 2, {"LoRA": {LORA_ON_8_BITS: 1}}),
        ("flux in scaled 8 bits", 2, {key: {LORA_ON_8_BITS: 1} for key in ("LoRA", "LoRA again")}),
        ("z_image", 1, {}),
    ],
)
def test_text_encoders_are_served_from_dynamic_vram_while_they_fit(
    encoders: dict[str, Any], family: str, stacks: int, left: dict[str, dict[str, int]]
) -> None:
    """One form of their weights is in memory. The call in which a LoRA is added to 8 bits is left to the host."""
    of_it = dict(encoders["families"][family])
    assert of_it.pop("encoders") == stacks and of_it.pop("shared")
    assert min(of_it.pop("effect"), of_it.pop("effect of norms")) > 0.1
    for name in ("another prompt", "norms", "norms as they were"):  # only pages as a whole are asked for again
        assert of_it[name]["faults"] < of_it["taken away and back"]["faults"] / 3, name
    for name, case in of_it.items():  # a layer behind a stack the host computes unrounded in that call
        assert case["off"] <= (ROUNDING_OF_A_LORA if name == "LoRA" else 0.0), name
        assert (case["pinned"], case["models"], case["captured"] * (name != "first")) == (0, 1, 0), name
    left = {"no room": {NOT_IN_LAYERS: stacks}, **left}
    assert {name: case["eager"] for name, case in of_it.items()} == {name: left.get(name, {}) for name in of_it}
    assert {name: case["served"] for name, case in of_it.items()} == {
        name: stacks - sum(left.get(name, {}).values()) for name in of_it
    }


def test_a_text_encoder_whose_weights_are_seen_to_be_wrong_is_left_to_the_host(encoders: dict[str, Any]) -> None:
    assert (encoders["wrong"]["off"], encoders["wrong again"]["off"]) == (0.0, 0.0)
    assert encoders["wrong again"]["eager"] == {WRONG: 2} and encoders["wrong again"]["served"] == 0
