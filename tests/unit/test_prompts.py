"""What is done between prompts: not during one, and none begins meanwhile."""

from __future__ import annotations

import sys
import threading
import time
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


def test_who_has_patience_waits_until_the_host_has_cleaned_up_but_never_for_a_prompt(queue: Any) -> None:
    queue.not_empty = threading.Condition(queue.mutex)
    cleaned = threading.Event()

    def clean_up() -> None:
        cleaned.wait(20)
        with queue.not_empty:
            queue.not_empty.wait(20)

    thread = threading.Thread(target=clean_up)
    thread.start()
    threading.Timer(0.2, cleaned.set).start()
    with between_prompts(patience=20) as between:
        assert between
        assert cleaned.is_set()
        queue.not_empty.notify()
    thread.join(20)
    queue.currently_running[0] = ("a prompt",)
    start = time.monotonic()
    with between_prompts(patience=20) as between:
        assert not between
    assert time.monotonic() - start < 10
    queue.currently_running.clear()
    with between_prompts(patience=0.05) as between:  # nobody waits for a prompt any more
        assert not between


def test_while_the_host_cleans_up_after_a_prompt_it_says_so(queue: Any) -> None:
    """The host's thread unloads models and collects garbage when the prompt is done, before it waits for another."""
    queue.not_empty = threading.Condition(queue.mutex)
    cleaned, waits, seen = threading.Event(), threading.Event(), list[bool]()

    def run_prompts() -> None:
        with queue.mutex:
            queue.currently_running.clear()
        waits.set()
        cleaned.wait(20)
        with queue.not_empty:
            waits.set()
            queue.not_empty.wait(20)

    queue.currently_running[0] = ("a prompt",)
    thread = threading.Thread(target=run_prompts)
    thread.start()
    assert waits.wait(20)
    waits.clear()
    with between_prompts() as between:
        seen.append(between)
    cleaned.set()
    assert waits.wait(20)
    with between_prompts() as between:  # it has the mutex until it waits
        seen.append(between)
    with queue.not_empty:
        queue.not_empty.notify()
    with between_prompts() as between:
        seen.append(between)
    thread.join(20)
    assert seen == [False, True, False]


@pytest.mark.parametrize("server", [None, SimpleNamespace(PromptServer=SimpleNamespace(instance=None))])
def test_without_a_server_there_are_no_prompts(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "server", server)
    with between_prompts() as between:
        assert between
