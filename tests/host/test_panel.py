"""The sidebar's routes in a real ComfyUI: nothing that a prompt may be using is taken away from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pictures import FAMILIES, Counters, assert_same_picture, latent_of, pair_of

from dev.host import ComfyServer, HostError

FLUX = FAMILIES["flux"]
ASKED = {"free": {}, "clear": {}, "remove": {"keys": ["0" * 64]}}


@pytest.fixture(scope="module")
def alone(start_server: Callable[..., ComfyServer]) -> Iterator[ComfyServer]:
    """A server of their own: what is freed here, tests of the shared one would compile again."""
    with start_server() as server:
        yield server


def test_while_a_prompt_runs_nothing_is_freed_or_removed_and_the_answer_is_in_words(alone: ComfyServer) -> None:
    refused: dict[str, str] = {}

    def ask(kind: str, data: dict[str, Any]) -> None:
        if kind != "progress":  # between two steps of the sampler
            return
        for path, body in ASKED.items():
            try:
                refused.setdefault(path, str(alone.post(f"/onediff/panel/{path}", body)))
            except HostError as error:
                refused[path] = str(error)

    latent_of(alone.run(FLUX.workflow(801, "eager"), on_event=ask))
    assert list(refused) == list(ASKED)
    for path, answer in refused.items():
        assert "answered 409" in answer, (path, answer)
        assert "is making a picture that may use these graphs; try again when it is done" in answer


def test_when_it_is_done_memory_is_freed_and_the_next_picture_is_right(alone: ComfyServer) -> None:
    latent_of(alone.run(FLUX.workflow(802, "eager")))
    assert alone.get_json("/onediff/report")["graphs_in_memory"] > 0
    assert alone.post("/onediff/panel/free")["freed_bytes"] >= 0
    assert alone.get_json("/onediff/report")["graphs_in_memory"] == 0
    counters = Counters(alone)
    ours, plain = pair_of(alone.run(FLUX.compared(803, "eager")))
    assert_same_picture(ours, plain)
    assert (counters.served, counters.fallbacks) == (FLUX.steps, {})
