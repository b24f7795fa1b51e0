"""One run of an accelerated object, a sampling for instance: how its calls are to be served, and what answered them."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ..capture.call import Signature
from ..messages import Message, joined, message
from ..metrics import Metrics
from ..runtime.step_cache import StepCache
from .decision import Eager, Invocation, Served

log = logging.getLogger(__name__)

Kind = tuple[str, tuple[int, ...]]
"""Calls that a graph answers: its key, and what its symbols stand for."""

_LEAST_GAIN = 1.05
"""Less than this is noise, and no reason to boast."""


class RunReport:
    """Counts what answered calls.

    Args:
        metrics: of one accelerated object; count along.
        made: counts the graphs that are made, for any object.
        gain: tells how many times faster than eager a graph answers calls of one kind; None where that is not known.
    """

    def __init__(self, metrics: Metrics, made: Metrics, gain: Callable[[Kind, Signature], float | None]) -> None:
        self._made, self._gain = made, gain
        self._made_before = made.graphs_made()
        self._lock = threading.Lock()
        self._by_graph = metrics.tally(self)
        self._served: Counter[Kind] = Counter()
        self._signatures: dict[Kind, Signature] = {}
        self._eager: Counter[str] = Counter()
        self._notes: dict[str, None] = {}  # in their order, each once

    @property
    def served(self) -> int:
        """Return how many calls compiled graphs answered."""
        return sum(self._served.values())

    @property
    def calls(self) -> int:
        return self.served + sum(self._eager.values())

    def graph_answered(self, route: Served, signature: Signature) -> bool:
        """Count a call that a graph answered. Return True if it is the first of its kind in this run."""
        kind = route.kind
        with self._lock:
            self._served[kind] += 1
            self._by_graph[route.graph_key] += 1
            if kind in self._signatures:
                return False
            self._signatures[kind] = signature
            if route.note:
                self._notes[route.note] = None
            return True

    def note(self, text: str) -> None:
        """Tell people of this once the run is over."""
        with self._lock:
            self._notes[text] = None

    def eager_answered(self, reason: str) -> None:
        self._eager[reason] += 1

    def status(self, what: str) -> Message:
        """Return ``compiled graph · 1024×1024 b1 · 1.7x · 0 recompiles``, and why calls were not accelerated.

        Args:
            what: what the run made.
        """
        if not self._served:
            return _reasons(self._eager)
        first = message("compiled graph")
        if self._eager:
            first = message("{served} of {calls} calls accelerated", served=self.served, calls=self.calls)
        gain = self.gain()
        times = f"{gain:.1f}x" if gain is not None and gain >= _LEAST_GAIN else ""
        line = joined(" · ", filter(None, (first, what, times, self._graphs_made())))
        return joined("\n", filter(None, (line, *self._notes, _reasons(self._eager) if self._eager else "")))

    def gain(self) -> float | None:
        """Return how many times faster than eager the graph of most calls is; None where that is not known."""
        (kind, _), *_ = self._served.most_common(1)
        return self._gain(kind, self._signatures[kind])

    def _graphs_made(self) -> Message:
        """Return what was compiled or loaded meanwhile."""
        made = self._made.graphs(since=self._made_before)
        seconds = {
            how: sum(graph["seconds"] for graph in made if graph["how"] == how) for how in ("compiled", "loaded")
        }
        if seconds["compiled"]:
            return message("compiled in {seconds} s", seconds=_rounded(seconds["compiled"]))
        if seconds["loaded"]:
            return message("loaded in {seconds} s", seconds=_rounded(seconds["loaded"]))
        return message("0 recompiles")


@dataclass(frozen=True, eq=False)
class RunContext:
    """One sampling run.

    Attributes:
        report: counts what answered the run's calls.
        compile: one of ``COMPILE_CHOICES``. Unless it is ``wait``, calls run eager while another process compiles.
        over: all its calls are answered, so nothing is compiled that somebody would wait for.
        exact: also make the graphs for one size alone that the node is to have, and wait for them.
        reusing: serve by graphs that can leave deep layers out.
        step_cache: decides in each step whether they do. None where everything is computed.
    """

    report: RunReport
    compile: str = "wait"
    over: bool = False
    exact: bool = False
    reusing: bool = False
    step_cache: StepCache | None = None

    def of_call(self, invocation: Invocation) -> RunContext:
        """Return the run as a call sees it: of a block alone, whose weights move, no deep layers are left out."""
        if not (self.reusing and invocation.moving is not None):
            return self
        return replace(self, reusing=False, step_cache=None)

    def of_part(self) -> RunContext:
        """Return the run as a part of a split batch sees it: one part is no earlier step of another."""
        return replace(self, step_cache=None)


class Teller:
    """Tells people what the host answered, and why.

    Args:
        metrics: of one accelerated object.
        show: shows a short status text to the person, on the node.
    """

    def __init__(self, metrics: Metrics, show: Callable[[str], None]) -> None:
        self._metrics, self.show = metrics, show
        self._warned: set[str] = set()

    def fell_back(self, module: torch.nn.Module, eager: Eager, run: RunContext) -> None:
        """Count a call that the host answers; say so once for each reason."""
        reason = eager.reason
        run.report.eager_answered(reason)
        self._metrics.fell_back(reason)
        if eager.expected or reason in self._warned:
            return
        self._warned.add(reason)
        self.show(message("not accelerated: {reason}", reason=reason))
        log.warning(
            "OneDiff: %s runs without acceleration: %s. The image is right, only not faster.",
            type(module).__name__,
            reason,
        )

    def ended(self, report: RunReport, module: torch.nn.Module, what: str) -> None:
        """Say what served a run over ``module``, in the log and on the node.

        Args:
            what: what the run made, for people.
        """
        if not report.calls:
            uncalled = message("the model was not called in this run")
            log.warning("OneDiff: %s (%s)", uncalled, type(module).__name__)
            self.show(uncalled)
            return
        log.info("OneDiff: %d of %d model calls served by compiled graphs", report.served, report.calls)
        self.show(report.status(what))


def _rounded(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds < 10 else f"{seconds:.0f}"


def _reasons(eager: Counter[str]) -> Message:
    """Return why calls were not accelerated, most of them first."""
    return joined("\n", (message("not accelerated: {reason}", reason=reason) for reason, _ in eager.most_common()))
