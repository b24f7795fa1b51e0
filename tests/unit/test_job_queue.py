"""compilation/job_queue.py: one job at a time and one per key; a caller may stop waiting and loses nothing."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeout
from types import SimpleNamespace
from typing import Any

import pytest

from onediff_comfy.compilation import job_queue
from onediff_comfy.compilation.job_queue import Jobs, Waited

WAIT = 10.0  # seconds after which a test is broken, not slow


def no_wait(_seconds: float) -> None: ...


class Caller(threading.Thread):
    """Calls ``jobs.run`` in a thread of its own and keeps what came out."""

    def __init__(self, jobs: Jobs[Any], key: str, function: Callable[[], Any], while_waiting: Any = no_wait) -> None:
        super().__init__(daemon=True)
        self._call = lambda: jobs.run(key, function, while_waiting)
        self.outcome: Any = None
        self.start()

    def run(self) -> None:
        try:
            self.outcome = self._call()
        except BaseException as error:
            self.outcome = error

    def result(self) -> Any:
        self.join(WAIT)
        assert not self.is_alive()
        return self.outcome


class Work:
    """A function that says when it began, and ends when it is told to."""

    def __init__(self, result: Any = "result") -> None:
        self.began, self.may_end = threading.Event(), threading.Event()
        self.runs = 0
        self._result = result

    def __call__(self) -> Any:
        self.runs += 1
        self.began.set()
        assert self.may_end.wait(WAIT)
        if isinstance(self._result, BaseException):
            raise self._result
        return self._result


class Stop(BaseException):
    """As the host's interruption: no Exception."""


def stop(_seconds: float) -> None:
    raise Stop


def test_the_result_comes_back() -> None:
    assert Jobs[int]().run("a", lambda: 3, no_wait) == 3


def test_the_work_is_done_away_from_the_callers_thread() -> None:
    worker = Jobs[threading.Thread]().run("a", threading.current_thread, no_wait)
    assert worker is not threading.current_thread()
    assert worker.daemon, "quitting must not wait for a compiler"


def test_two_callers_of_one_key_share_one_run() -> None:
    jobs, work = Jobs[Any](), Work()
    first = Caller(jobs, "a", work)
    assert work.began.wait(WAIT)
    waited = threading.Event()
    second = Caller(jobs, "a", lambda: pytest.fail("a second run"), lambda _seconds: waited.set())
    assert waited.wait(WAIT)
    work.may_end.set()
    assert first.result() == second.result() == "result"
    assert work.runs == 1


def test_different_keys_never_run_at_once() -> None:
    jobs = Jobs[None]()
    inside, most, lock = 0, 0, threading.Lock()

    def work() -> None:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        threading.Event().wait(0.01)
        with lock:
            inside -= 1

    callers = [Caller(jobs, str(number), work) for number in range(6)]
    assert [caller.result() for caller in callers] == [None] * 6
    assert most == 1


def test_a_caller_that_stops_waiting_does_not_stop_the_job() -> None:
    jobs, work = Jobs[Any](), Work()
    with pytest.raises(Stop):
        jobs.run("a", work, stop)
    assert work.began.wait(WAIT)
    joined = threading.Event()
    later = Caller(jobs, "a", lambda: "a second run", lambda _seconds: joined.set())
    assert joined.wait(WAIT)
    work.may_end.set()
    assert later.result() == "result"
    assert work.runs == 1


def test_one_caller_stopping_does_not_disturb_another() -> None:
    jobs, work = Jobs[Any](), Work()
    stays, goes = Caller(jobs, "a", work), Caller(jobs, "a", work, stop)
    assert isinstance(goes.result(), Stop)
    work.may_end.set()
    assert stays.result() == "result"


def test_while_waiting_is_told_growing_seconds() -> None:
    jobs, work = Jobs[Any](), Work()
    told: list[float] = []

    def listen(seconds: float) -> None:
        told.append(seconds)
        if len(told) == 3:
            work.may_end.set()

    jobs.begin("a", work)
    assert work.began.wait(WAIT)  # before that it would be seconds until its turn, which are counted apart
    jobs.run("a", work, listen)
    assert len(told) >= 3
    assert told == sorted(told)
    assert 0.05 < told[0] < WAIT


def test_a_caller_knows_whether_it_waits_for_its_turn_or_for_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, other, own = Jobs[Any](), Work(), Work()
    first = Caller(jobs, "other", other)
    assert other.began.wait(WAIT)
    told: list[Waited] = []
    # A second passes after each time that it is told how long it has waited.
    monkeypatch.setattr(job_queue, "time", SimpleNamespace(monotonic=lambda: float(len(told))))

    def listen(waited: Waited) -> None:
        told.append(waited)
        if len(told) == 3:
            other.may_end.set()
        if [waited.for_turn for waited in told].count(False) == 3:
            own.may_end.set()

    assert jobs.run("own", own, listen) == first.result() == "result"
    turn, job = ([waited for waited in told if waited.for_turn is it] for it in (True, False))
    assert told == [*turn, *job]
    assert len(turn) >= 3 and turn == list(range(len(turn)))
    assert len(job) >= 3 and job == list(range(1, len(job) + 1)), "what it took to wait is not what the job takes"


def test_whoever_joins_a_job_that_runs_does_not_wait_for_a_turn() -> None:
    jobs, work = Jobs[Any](), Work()
    first = Caller(jobs, "a", work)
    assert work.began.wait(WAIT)
    told: list[bool] = []
    jobs.run("a", work, lambda waited: (told.append(waited.for_turn), work.may_end.set()))
    assert first.result() == "result"
    assert not any(told)


def test_whoever_waits_for_a_job_that_ends_just_then_does_not_wait_for_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, work = Jobs[Any](), Work()
    first = jobs.begin("a", work)
    assert work.began.wait(WAIT)

    def ends_meanwhile(futures: Sequence[Future[Any]], timeout: float) -> Any:
        found = wait(futures, timeout)
        work.may_end.set()
        assert first.result(WAIT) == "result"
        return found

    monkeypatch.setattr(job_queue, "wait", ends_meanwhile)
    told: list[bool] = []
    assert jobs.run("a", work, lambda waited: told.append(waited.for_turn)) == "result"
    assert told == [False]


@pytest.mark.parametrize("error", [ValueError("v"), Stop("s"), SystemExit(1), TimeoutError("t"), FutureTimeout("f")])
def test_whatever_the_job_raises_comes_out_of_every_caller_and_the_next_call_tries_again(error: BaseException) -> None:
    jobs, work = Jobs[Any](), Work(error)
    waited = threading.Event()
    first = Caller(jobs, "a", work)
    assert work.began.wait(WAIT)
    second = Caller(jobs, "a", work, lambda _seconds: waited.set())
    assert waited.wait(WAIT)
    work.may_end.set()
    assert first.result() is error
    assert second.result() is error
    assert work.runs == 1
    assert jobs.run("a", lambda: "again", no_wait) == "again"


def test_a_failed_job_does_not_block_other_keys() -> None:
    jobs = Jobs[int]()
    with pytest.raises(Stop):
        jobs.run("a", lambda: stop(0.0), no_wait)  # type: ignore[arg-type, return-value]
    assert jobs.run("b", lambda: 1, no_wait) == 1


def test_a_finished_job_is_forgotten() -> None:
    """Results are kept by the cache, not here: what it evicted must be made anew."""
    jobs, runs = Jobs[Work](), []
    for _ in range(2):
        made = weakref.ref(jobs.run("a", lambda: runs.append(1) or Work(), no_wait))
        for thread in threading.enumerate():  # the job's holds its result until it ends
            if thread.name.startswith("onediff-compile-"):
                thread.join(WAIT)
        gc.collect()
        assert made() is None
    assert len(runs) == 2


def test_a_job_that_outlasts_several_polls_gives_its_result() -> None:
    polls: list[float] = []
    release = threading.Event()

    def count(waited: Waited) -> None:
        if not waited.for_turn:  # as the first may be, before its thread has begun
            polls.append(waited)
        if len(polls) == 3:
            release.set()

    assert Jobs[bool]().run("a", lambda: release.wait(30), count) is True
    assert polls == sorted(polls)
    assert len(polls) >= 3


def test_work_between_jobs_waits_for_the_running_one_and_holds_up_the_next() -> None:
    jobs, order = Jobs[None](), []
    started, release = threading.Event(), threading.Event()

    def first() -> None:
        started.set()
        release.wait(30)
        order.append("first")

    running = threading.Thread(target=lambda: jobs.run("a", first, no_wait))
    running.start()
    started.wait(30)
    with jobs.between_jobs(lambda _: release.set()):
        order.append("between")
        later = threading.Thread(target=lambda: jobs.run("b", lambda: order.append("second"), no_wait))
        later.start()
        later.join(0.3)
        order.append("still between")
    running.join(30)
    later.join(30)
    assert order == ["first", "between", "still between", "second"]


def test_a_person_may_stop_waiting_for_their_turn() -> None:
    jobs = Jobs[None]()
    started, release = threading.Event(), threading.Event()

    def job() -> None:
        started.set()
        release.wait(30)

    running = threading.Thread(target=lambda: jobs.run("a", job, no_wait))
    running.start()
    started.wait(30)

    def stop(_: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), jobs.between_jobs(stop):
        pytest.fail("it was not our turn")
    release.set()
    running.join(30)
    with jobs.between_jobs(stop):
        pass


def test_a_job_that_waits_for_another_process_holds_up_no_other() -> None:
    jobs, order = Jobs[str](), list[str]()
    waits, released = threading.Event(), threading.Event()

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        waits.set()
        assert released.wait(WAIT)
        order.append("begins")
        yield
        order.append("ends")

    def late(waited: Waited) -> None:
        assert waited < WAIT

    begun = jobs.begin("a", lambda: order.append("works") or "made", around())
    assert waits.wait(WAIT)
    assert jobs.run("b", lambda: "another", late) == "another" and not begun.running()
    with jobs.between_jobs(late):
        pass
    released.set()
    assert begun.result(WAIT) == "made"
    assert order == ["begins", "works", "ends"]
