"""What leaves memory, by the sidebar or the host: nothing that a prompt may be using; and then all of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from pictures import FAMILIES, Counters, assert_same_picture, latent_of, pair_of

from dev.host import ComfyServer, HostError

FLUX, SD15 = FAMILIES["flux"], FAMILIES["sd15"]
ASKED = {"free": {}, "clear": {}, "remove": {"keys": ["0" * 64]}}


def test_while_a_prompt_runs_nothing_is_freed_or_removed_and_the_answer_is_in_words(emptied: ComfyServer) -> None:
    refused: dict[str, str] = {}

    def ask(kind: str, data: dict[str, Any]) -> None:
        if kind != "progress" or refused:  # between two steps of the sampler, the first time that they are told
            return
        for path, body in ASKED.items():
            try:
                refused[path] = str(emptied.post(f"/onediff/panel/{path}", body))
            except HostError as error:
                refused[path] = str(error)
        emptied.post("/interrupt")

    # So many steps that they outlast the questions. Else "clear" takes the graphs that other tests look for.
    result = emptied.run(dataclasses.replace(FLUX, steps=10_000).workflow(801, "eager"), on_event=ask)
    assert result.interrupted
    assert list(refused) == list(ASKED)
    for path, answer in refused.items():
        assert "answered 409" in answer, (path, answer)
        assert "is making a picture that may use these graphs; try again when it is done" in answer


def test_when_it_is_done_memory_is_freed_and_the_next_picture_is_right(emptied: ComfyServer) -> None:
    latent_of(emptied.run(FLUX.workflow(802, "eager")))
    assert emptied.get_json("/onediff/report")["graphs_in_memory"] > 0
    assert emptied.post("/onediff/panel/free")["freed_bytes"] >= 0
    assert emptied.get_json("/onediff/report")["graphs_in_memory"] == 0
    counters = Counters(emptied)
    ours, plain = pair_of(emptied.run(FLUX.compared(803, "eager")))
    assert_same_picture(ours, plain)
    assert (counters.served, counters.fallbacks) == (FLUX.steps, {})


def test_graphs_outlive_an_unloading_and_accelerated_objects_do_not(emptied: ComfyServer) -> None:
    _unload(emptied)
    emptied.post("/onediff/panel/free")
    counters = Counters(emptied)
    expected = latent_of(emptied.run(SD15.workflow(1, "eager")))
    assert [thing["kind"] for thing in emptied.get_json("/onediff/report")["objects"]] == ["MODEL"]
    for _ in range(2):
        _unload(emptied)
        found = emptied.get_json("/onediff/report")
        assert found["objects"] == [], "something keeps what was unloaded"
        assert found["graphs_in_memory"] == 1
        assert torch.equal(latent_of(emptied.run(SD15.workflow(1, "eager"))), expected)
    assert (counters.captured, counters.compiled, counters.fallbacks) == (1, 1, {})
    assert emptied.get_json("/onediff/report")["recording_bytes"] == 0 or torch.cuda.is_available()


def _unload(server: ComfyServer) -> None:
    server.free()
    server.run({"collect": {"class_type": "CollectGarbage", "inputs": {}}})
