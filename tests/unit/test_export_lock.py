"""capture/tracing/export_lock.py: who captures is alone, and who runs is not."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from onediff_comfy.capture.tracing.export_lock import capturing, running

Inside = Callable[[], AbstractContextManager[None]]
WAIT = 10.0  # seconds after which a test is broken, not slow
MOMENT = 0.2  # seconds after which a thread that has not entered is taken to wait


def enters(first: Inside, second: Inside, within: float) -> bool:
    """Whether another thread gets into ``second`` while this one is in ``first``; it always does afterwards.

    Args:
        within: the seconds that it has for it: a ``MOMENT`` where it should not, ``WAIT`` where it should.
    """
    entered = threading.Event()

    def enter() -> None:
        with second():
            entered.set()

    thread = threading.Thread(target=enter, daemon=True)
    with first():
        thread.start()
        meanwhile = entered.wait(within)
    assert entered.wait(WAIT)
    thread.join(WAIT)
    return meanwhile


@pytest.mark.parametrize(
    ("first", "second", "together"),
    [(running, running, True), (running, capturing, False), (capturing, running, False), (capturing, capturing, False)],
)
def test_who_captures_is_alone(first: Inside, second: Inside, together: bool) -> None:
    assert enters(first, second, WAIT if together else MOMENT) is together


@contextlib.contextmanager
def after_one_within_another() -> Iterator[None]:
    with capturing():
        with capturing(), running():
            pass
        yield


def test_a_thread_does_not_wait_for_itself_and_others_still_do() -> None:
    assert not enters(after_one_within_another, running, MOMENT)


def test_after_an_error_others_get_in() -> None:
    for inside in (running, capturing):
        with pytest.raises(ValueError, match="inside"), inside():
            raise ValueError("inside")
        assert enters(running, running, WAIT)
