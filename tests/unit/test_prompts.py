"""What is done between prompts: not during one, and none begins meanwhile."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from onediff_comfy.host.process.prompts import between_prompts


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The host's, as far as it is looked at."""
    found = SimpleNamespace(mutex=threading.RLock(), currently_running={})
    server = SimpleNamespace(PromptServer=SimpleNamespace(instance=SimpleNamespace(prompt_queue=found)))
    monkeypatch.setitem(sys.modules, "server", server)
    return found


def _can_start(queue: Any) -> bool:
    """Whether the thread that runs prompts could take one now."""
    taken: list[bool] = []

    def take() -> None:
        taken.append(queue.mutex.acquire(blocking=False))

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return taken[0]


def test_no_prompt_begins_meanwhile(queue: Any) -> None:
    with between_prompts() as between:
        assert between
        assert not _can_start(queue)
    assert _can_start(queue)


def test_during_a_prompt_it_says_so(queue: Any) -> None:
    queue.currently_running[0] = ("a prompt",)
    with between_prompts() as between:
        assert not between


@pytest.mark.parametrize("server", [None, SimpleNamespace(PromptServer=SimpleNamespace(instance=None))])
def test_without_a_server_there_are_no_prompts(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "server", server)
    with between_prompts() as between:
        assert between
