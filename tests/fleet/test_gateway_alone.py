"""The gateway with workers and a journal that misbehave, and the rules by which workers are chosen."""

from __future__ import annotations

import json
import os
import struct
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dev.environment import repository
from dev.fleet_environment import ensure
from onediff_comfy.fleet.gateway.carrier import MOST_ATTEMPTS
from onediff_comfy.fleet.gateway.prompt import BadPrompt, Prompt, choose, parse


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What ``gateway_alone.py`` found."""
    script = Path(__file__).with_name("gateway_alone.py")
    command = [str(ensure()), str(script), str(tmp_path_factory.mktemp("journals"))]
    environment = {**os.environ, "PYTHONPATH": str(repository())}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_prompt_has_one_result_however_many_are_written(outcomes: dict[str, Any]) -> None:
    race = outcomes["race"]
    assert race["workers"] == [race["written"]]
    assert race["unfinished"] == []


def test_a_prompt_that_kills_its_workers_is_given_up(outcomes: dict[str, Any]) -> None:
    poison = outcomes["poison"]
    assert poison["victims"] == MOST_ATTEMPTS
    assert poison["told"] == ["execution_start", "execution_error", "executing"]
    name, error = poison["messages"][-1]
    assert name == "execution_error"
    assert error["exception_message"].startswith(f"{MOST_ATTEMPTS} workers died of this prompt")


def test_without_a_journal_nothing_is_taken(outcomes: dict[str, Any]) -> None:
    refused = outcomes["unwritable"]
    assert (refused["status"], refused["open"]) == (503, 0)
    assert "journal does not answer" in refused["message"] and "\n" not in refused["message"]


def test_what_a_silent_worker_has_is_given_to_another(outcomes: dict[str, Any]) -> None:
    assert outcomes["silence"] == {"first": "silent", "last": "other", "attempts": 2}


# -- attacks ---------------------------------------------------------------------------------------


def test_of_one_id_that_many_hand_in_at_once_one_prompt_runs(outcomes: dict[str, Any]) -> None:
    assert outcomes["collision"] == {"statuses": [200], "handed": 1, "loads": 1}


def test_a_checkpoint_whose_name_another_node_gives_is_taken(outcomes: dict[str, Any]) -> None:
    assert outcomes["linked"] == {"status": 200}


def test_what_is_damaged_in_the_journal_keeps_nothing_else_from_being_read(outcomes: dict[str, Any]) -> None:
    assert outcomes["damaged"] == {"open": True, "found": True}


def test_no_request_is_an_error_of_the_gateway_or_takes_what_it_does_not_name(outcomes: dict[str, Any]) -> None:
    assert outcomes["requests"] == {"failed": [], "left": [{"outputs": {}}, True, 0]}


def test_who_floods_the_gateway_is_let_go(outcomes: dict[str, Any]) -> None:
    assert outcomes["flood"] == {"large": True, "deaf": True, "told": "status"}


def test_clients_that_are_not_there_leave_no_connection_open(outcomes: dict[str, Any]) -> None:
    assert outcomes["unheard"] == {"connections": 20, "left": 0}


def test_who_hands_in_to_a_frozen_worker_is_answered(outcomes: dict[str, Any]) -> None:
    assert outcomes["frozen"] == {"status": 200, "moved": True}


def test_a_worker_that_freezes_when_it_is_done_holds_nothing_up(outcomes: dict[str, Any]) -> None:
    assert outcomes["half_done"] == {"open": 0, "written": ["two"]}


def test_what_a_gateway_leaves_another_one_finishes_and_not_before(outcomes: dict[str, Any]) -> None:
    assert outcomes["heirs"] == {"early": [], "late": True, "done": True, "again": []}


def test_a_worker_answers_for_its_own_prompts_alone(outcomes: dict[str, Any]) -> None:
    assert outcomes["liar"] == {"open": True, "worker": True}


def test_what_clients_call_themselves_or_hand_in_ends_no_worker(outcomes: dict[str, Any]) -> None:
    assert outcomes["strangers"] == {"outcomes": [[0, 1, 2]] * 5}, "workers lost, the other's attempts, prompts there"


def test_no_job_keeps_the_others_from_being_listed(outcomes: dict[str, Any]) -> None:
    every, some = 11 + 4, 11
    assert outcomes["jobs"] == {"listed": [[200, every], [200, every], [200, 0], [200, some]], "known": [11, 4]}


def test_a_prompt_whose_result_is_damaged_is_done_again(outcomes: dict[str, Any]) -> None:
    assert outcomes["undone"] == {"taken": True, "done": True, "kept": {"outputs": {"n": {}}}}


def test_what_no_gateway_puts_into_a_journals_folder_keeps_none_from_starting(outcomes: dict[str, Any]) -> None:
    assert outcomes["litter"] == {"open": True, "history": True}


def test_pages_of_other_sites_are_refused_by_whatever_name_they_reach_this_machine(outcomes: dict[str, Any]) -> None:
    assert outcomes["origins"] == {"mine": [403], "own": [200], "proxied": [200], "odd": [400, 400]}


def test_no_path_leads_past_the_gateway(outcomes: dict[str, Any]) -> None:
    assert outcomes["detours"] == {"statuses": [404], "cleared": 200, "asked": ["/onediff/panel/clear"]}


def test_what_is_packed_arrives(outcomes: dict[str, Any]) -> None:
    assert outcomes["packed"] == {"found": [200, "a file"]}


# -- what comes late -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scene", "expected"),
    [
        ("on_its_way", {"status": 200, "attempts": 1, "handed": 1}),
        ("belated", {"attempts": 2, "handed": 1}),
        ("lost_while_written", {"status": 200, "handed": [0, 1]}),
        ("refused_late", {"found": [[200, "two"]] * 2}),
        ("runs_it_late", {"started": False, "deleted": True}),
        ("gone_late", {"there": ["second"], "left": 0}),
        ("given_up", {"victims": MOST_ATTEMPTS, "errors": 1, "open": 0}),
        ("deleted_on_its_way", {"status": 200, "early": [], "dropped": True, "open": 0}),
        ("done_when_deleted", {"deleted": False, "kept": True}),
        ("adopted_late", {"found": True, "handed": 0}),
    ],
)
def test_what_a_worker_says_of_a_prompt_that_it_has_no_more_changes_nothing(
    outcomes: dict[str, Any], scene: str, expected: dict[str, Any]
) -> None:
    assert outcomes[scene] == expected


# -- lies ------------------------------------------------------------------------------------------


def test_files_are_kept_whatever_a_worker_calls_them(outcomes: dict[str, Any]) -> None:
    too_long, unread = "x" * 20, "a line feed, which C"
    assert outcomes["names"] == {"ended": True, "load": 0, "lost": [too_long, unread]}


def test_a_prompt_ends_whatever_its_worker_reports(outcomes: dict[str, Any]) -> None:
    assert outcomes["reports"] == {"ended": [[True, 0]]}


def test_a_worker_that_takes_nobody_on_ws_lives_and_its_prompts_end(outcomes: dict[str, Any]) -> None:
    assert outcomes["deaf"] == {"ended": True, "lost": 0, "client": "person"}


def test_a_refusal_ends_a_prompt_whatever_form_it_has(outcomes: dict[str, Any]) -> None:
    assert outcomes["refusals"] == {"said": ["the worker answered 400", "no", "the worker answered 500", "5"]}


def test_what_one_worker_says_of_itself_keeps_no_other_from_being_shown(outcomes: dict[str, Any]) -> None:
    assert outcomes["boasts"] == {"shown": []}


# -- who takes a prompt ----------------------------------------------------------------------------

A, B = ("a.safetensors",), ("b.safetensors",)


@dataclass
class Some:
    """A worker as the choice sees it."""

    name: str
    checkpoint: tuple[str, ...] | None = None
    load: int = 0
    last_used: float = 0.0
    ready: bool = True
    prompts: dict[str, Prompt] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("workers", "chosen"),
    [
        ([Some("fresh"), Some("same", A)], "same"),
        ([Some("fresh"), Some("same", A, 1)], "same"),
        ([Some("other", B), Some("fresh")], "fresh"),
        ([Some("used just now", B, last_used=9), Some("used long ago", B, last_used=1)], "used long ago"),
        ([Some("idle", B), Some("same, full", A, 2)], "idle"),
        ([Some("busy", B, 1), Some("same, full", A, 2)], None),
        ([Some("busy", B, 1), Some("full", B, 2)], "busy"),
        ([Some("same", A, ready=False), Some("fresh")], "fresh"),
        ([], None),
    ],
)
def test_weights_stay_and_nobody_idles(workers: list[Some], chosen: str | None) -> None:
    found = choose(A, workers)
    assert (found.name if found else None) == chosen


def test_front_and_number_are_the_hosts() -> None:
    workflow = {"a": {"class_type": "X", "inputs": {}}}
    numbers = [parse({"prompt": workflow, **more}, 7).number for more in ({}, {"front": True}, {"number": 3})]
    assert numbers == [7.0, -7.0, 3.0]


def test_what_would_end_the_thread_that_runs_prompts_is_refused() -> None:
    nested: dict[str, Any] = {}
    for _ in range(150):
        nested = {"x": [nested]}
    workflow = {"a": {"class_type": "X", "inputs": {}}}
    with pytest.raises(BadPrompt, match="more than 200 lists and objects in each other"):
        parse({"prompt": workflow, "extra_data": nested}, 0)
    assert parse({"prompt": workflow, "extra_data": {"x": [[[[{"y": [1]}]]]] * 3}}, 0)


def test_previews_are_given_to_clients_that_know_no_names_of_prompts() -> None:
    from onediff_comfy.fleet.gateway.clients import without_metadata

    about = json.dumps({"image_type": "image/png", "prompt_id": "p"}).encode()
    newer = struct.pack(">II", 4, len(about)) + about + b"picture"
    assert without_metadata(newer) == struct.pack(">II", 1, 2) + b"picture"
    text = struct.pack(">II", 3, 1) + b"1hello"
    assert without_metadata(text) == text
