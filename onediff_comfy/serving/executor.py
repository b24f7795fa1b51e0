"""Running the graph that serves a call, what to do where memory runs out, and how long calls take on their device."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import torch
import torch.utils._pytree as pytree

from ..capture.call import Signature
from ..capture.handed_over import ChangedState, changes_state
from ..capture.tracing.export_lock import running
from ..compilation.library import GraphLibrary
from ..engines.base import Outputs
from ..messages import first_line, message
from ..runtime.cuda_graphs import RecordedGraph
from ..runtime.device_memory import wants_memory
from ..runtime.launch_bound import RecordWhen
from ..runtime.recording import NOWHERE
from ..runtime.step_cache import ReusableGraph, StepCache
from .decision import Out, Output, Serve
from .resolution.variant_policy import VariantPolicy
from .run import RunContext

log = logging.getLogger(__name__)

EAGER = "eager"
"""In place of a graph key: the host's own forward, which a new graph is compared with."""

Moment = float | torch.cuda.Event
"""When something happens: seconds of a clock, or an event among a GPU's kernels."""
_MOST_UNREAD = 64
"""Calls that are noted and not added up."""
_TIMED_OF_MOVING = 7
"""Of so many calls of a graph whose weights move one is timed: a step has sixty of them, as short as noting two events
is long. Models have an even number of blocks, and then it is another of them in each step."""


@dataclass
class _Calls:
    """Seconds of calls of one kind."""

    count: int = 0
    total: float = 0.0
    fastest: float = float("inf")
    slowest: float = 0.0
    last: float = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.total += seconds
        self.last = seconds
        self.fastest, self.slowest = min(self.fastest, seconds), max(self.slowest, seconds)


class CallTimes:
    """Seconds that calls took, by graph key, and the fastest of each kind of call. Thread-safe.

    On a GPU a call returns long before its kernels end, so events are put before and behind them and read once they
    have passed. What was noted is added up when somebody asks.

    Args:
        clock: seconds that only grow; times what does not run on a GPU.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}
        self._calls: dict[tuple[str, Signature], _Calls] = {}
        self._unread: deque[tuple[str, Signature | None, Moment, Moment, int]] = deque()

    @contextlib.contextmanager
    def measured(self, key: str, signature: Signature | None, device: torch.device) -> Iterator[None]:
        """Count what runs inside, on ``device``: a call with ``signature`` of the graph ``key``. Not what raises."""
        begun = self.begin(device)
        yield
        self.end(begun, key, signature, device, stands_for=1)

    def begin(self, device: torch.device) -> Moment:
        """Return when a call begins on ``device``, for ``end``: seconds, or an event."""
        if device.type != "cuda":
            return self._clock()
        before = torch.cuda.Event(enable_timing=True)
        before.record(torch.cuda.current_stream(device))
        return before

    def end(self, begun: Moment, key: str, signature: Signature | None, device: torch.device, stands_for: int) -> None:
        """Note that a call with ``signature`` of the graph ``key`` ends now.

        Without a signature it counts for the graph's ``seconds`` alone: a call that leaves out most of the work says
        nothing of how long others take.

        Args:
            stands_for: so many calls, of which the others are not timed.
        """
        self._unread.append((key, signature, begun, self.begin(device), stands_for))
        if len(self._unread) > _MOST_UNREAD:
            with self._lock:
                self._read_passed()

    def seconds(self) -> dict[str, float]:
        """Return what each graph's calls took so far; on a GPU, of the calls that have ended."""
        with self._lock:
            self._read_passed()
            return {key: seconds for key, seconds in self._seconds.items() if key != EAGER}

    def fastest(self, key: str, signature: Signature) -> tuple[float, int]:
        """Return the fastest such call of the graph ``key`` in seconds, and of how many; infinite of none."""
        with self._lock:
            self._read_passed()
            calls = self._calls.get((key, signature), _Calls())
            return calls.fastest, calls.count

    def last(self, key: str, signature: Signature) -> float | None:
        """Return the seconds of the last call with ``signature`` of the graph ``key`` that has ended; None of none."""
        with self._lock:
            self._read_passed()
            calls = self._calls.get((key, signature))
            return None if calls is None else calls.last

    def usual(self, key: str, signature: Signature) -> float | None:
        """Return the seconds that calls with ``signature`` of the graph ``key`` take on average; None of none.

        Without the slowest, as long as there are others: the first call loads kernels.
        """
        with self._lock:
            self._read_passed()
            calls = self._calls.get((key, signature))
            if calls is None:
                return None
            return calls.total if calls.count == 1 else (calls.total - calls.slowest) / (calls.count - 1)

    def _read_passed(self) -> None:
        while self._unread:
            key, signature, begun, ended, stands_for = self._unread[0]
            if isinstance(ended, float):
                seconds = ended - cast(float, begun)
            elif ended.query():
                seconds = cast(torch.cuda.Event, begun).elapsed_time(ended) / 1000
            else:
                return
            self._unread.popleft()
            self._seconds[key] = self._seconds.get(key, 0.0) + seconds * stands_for
            if signature is not None:
                self._calls.setdefault((key, signature), _Calls()).add(seconds)


@dataclass(frozen=True)
class Failed:
    """What came of a graph that raised.

    Attributes:
        reason: for people.
        for_good: it would fail again. Not so where memory ran out.
    """

    reason: str
    for_good: bool = True


class Executor:
    """Runs compiled graphs.

    Args:
        library: whose recordings hold memory.
        times: told how long calls take.
        policy: knows why a target has no graph that can reuse steps.
        record_only_launch_bound: of the calls that could be replayed through CUDA graphs, replay those alone that wait
            for the CPU to launch kernels. A recording keeps the memory of everything that is computed in it.
    """

    def __init__(
        self, library: GraphLibrary, times: CallTimes, policy: VariantPolicy, record_only_launch_bound: bool
    ) -> None:
        self._library, self.times, self._policy = library, times, policy
        self._record_when = RecordWhen.LAUNCH_BOUND if record_only_launch_bound else RecordWhen.ALWAYS
        self._moving = Counter[str]()  # calls of each graph whose weights move

    def run(self, serve: Serve, run: RunContext, due: bool = False, out: Out | None = None) -> Output | Failed | None:
        """Return the output of a call, as the host's forward gives it; None if its functions decide not as assumed.

        Where memory runs out, give back all that recordings hold, and run the graph once more.

        Args:
            due: the output is to be compared with eager's: nothing is reused, and functions that the graph calls may
                not change what they keep, which is put back.
            out: gives tensors that outputs may be left in. If there is no output, they are as they were.
        """
        reuse = False
        if run.step_cache is not None:
            functions = serve.request.call.functions
            if functions is not None and not functions.are_as_assumed():
                return None
            reuse = self._reuses(serve, run.step_cache) and not due
        signature, device = None if reuse else serve.request.call.signature, serve.request.device
        flat: Outputs | None = None
        ran_out = False
        stands_for = 1 if serve.request.invocation.moving is None else self._stands_for(serve.route.graph_key)
        try:
            begun = self.times.begin(device) if stands_for else None
            try:
                flat = self._outputs(serve, run, reuse, due, out)
            except RuntimeError as error:
                if not wants_memory(error):
                    raise
                ran_out = True
            if ran_out:  # nothing is handled here: an exception would hold the first try's tensors, and its recording
                self._make_room(run)
                flat = self._outputs(serve, run, False, due, out)
            if flat is None:
                return None
            if begun is not None:
                self.times.end(begun, serve.route.graph_key, signature, device, stands_for)
        except ChangedState:
            assert serve.request.call.functions is not None
            return Failed(changes_state(serve.request.call.functions))
        except Exception as error:
            if wants_memory(error):
                return Failed(message("the compiled graph ran out of memory"), for_good=False)
            log.debug("compiled graph failed", exc_info=True)
            kind, line = type(error).__name__, first_line(error)
            return Failed(message("the compiled graph failed ({kind}: {first_line})", kind=kind, first_line=line))
        return Output(pytree.tree_unflatten(flat, serve.graph.binding.output), serve.was_known and not due)

    def _stands_for(self, graph_key: str) -> int:
        """Return for how many calls of a graph, whose weights move, this one is timed; 0 if it is not."""
        calls = self._moving[graph_key]
        self._moving[graph_key] = calls + 1
        return 0 if calls % _TIMED_OF_MOVING else _TIMED_OF_MOVING

    def _reuses(self, serve: Serve, step_cache: StepCache) -> bool:
        """Return True if the step cache wants this call to reuse what an earlier step found. Ask once for each call."""
        if serve.stream is None:
            step_cache.cannot_reuse(message("a call does not say which prompt it is for"))
            return False
        if not isinstance(serve.graph, ReusableGraph):
            step_cache.cannot_reuse(self._policy.why_no_reuse(serve.request.target))
            return False
        return step_cache.reuses(serve.stream)

    def end_run(self) -> None:
        """Record what threads of other GPUs called in the run that is over, if there is memory for what comes next."""
        recordings = self._library.recordings
        with running():
            if not recordings.turns.record_what_was_left():
                released = recordings.release()
                log.warning("OneDiff: no memory to record a run over several GPUs; released %d MB", released >> 20)
        recordings.release_if_short()

    def _make_room(self, run: RunContext) -> None:
        if run.step_cache is not None:
            run.step_cache.forget()
        released = self._library.recordings.release(ran_out=True)
        torch.cuda.empty_cache()
        log.warning("OneDiff: out of memory; released %d MB of CUDA graph recordings and tried again", released >> 20)

    def _outputs(self, serve: Serve, run: RunContext, reuse: bool, watched: bool, out: Out | None) -> Outputs | None:
        graph, weights, tensors = serve.graph, serve.weights, serve.request.call.tensors
        functions = serve.request.call.functions
        confirmed = None if functions is None else functions.are_as_assumed
        with running(), serve.bringing_options(watched) if serve.options is not None else contextlib.nullcontext():
            if isinstance(graph, RecordedGraph):
                when = serve.request.invocation.moving or self._record_when
                into = NOWHERE if out is None else out(graph.binding.places)
                return graph.run(weights.tensors, weights.addresses, tensors, when, confirmed, into)
            if confirmed is not None and not confirmed():
                return None
            if run.step_cache is not None and serve.stream is not None and isinstance(graph, ReusableGraph):
                return run.step_cache.call(graph, serve.stream, weights.tensors, tensors, reuse)
            return graph(weights.tensors, tensors)
