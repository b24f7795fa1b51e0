"""Functions that decide by the noise level: a graph is found before the level is known, and runs only after."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from test_functions_handed_over import HOST, Net

from onediff_comfy.cache.memory import GraphCache
from onediff_comfy.capture.functions import readings
from onediff_comfy.capture.functions.readings import Arriving, Values
from onediff_comfy.compilation.library import GraphLibrary
from onediff_comfy.engines.eager import EagerGraph
from onediff_comfy.metrics import Metrics
from onediff_comfy.serving.dispatcher import Dispatcher
from onediff_comfy.serving.module_guard import ModuleGuard

LEVELS = (1.0, 0.75, 0.6, 0.5, 0.2, 0.05)
FIRST, AS_ASSUMED, NOT_AS_ASSUMED, KNOWN = (
    ["waited", "found", "found", "computed"],  # the model is looked at as well
    ["found", "waited", "computed"],
    ["found", "waited", "waited", "found", "computed"],
    ["waited", "found", "computed"],
)


class Between:
    """A patch that asks, as IP-Adapter_plus does, whether it is between its start and its end."""

    def __init__(self, start: float = 0.8, end: float = 0.3) -> None:
        self.start, self.end = start, end

    def __call__(self, out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        level = extra["sigmas"].detach().cpu()[0].item()
        return out * 1.5 if level <= self.start and level >= self.end else out


class Calls:
    """Calls of a model with one patch, each compared with eager.

    Attributes:
        events: what became of the last call.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, are_here: bool = False) -> None:
        self.events: list[str] = []
        self.library = GraphLibrary(GraphCache(1 << 30), Metrics())
        self.dispatcher = Dispatcher("eager", self.library, HOST)
        self.net, self.patch = Net().eval().requires_grad_(False), Between()
        self._watch(monkeypatch, are_here)

    def _watch(self, monkeypatch: pytest.MonkeyPatch, here: bool) -> None:
        events, get, compute = self.events, GraphCache.get, EagerGraph.__call__

        class FromDevice(Arriving):
            """Values that a device has not computed yet when they are asked for, or has."""

            @property
            def are_here(self) -> bool:
                return here

            def get(self) -> Values:
                events.append("waited")
                return super().get()

        monkeypatch.setattr(readings, "Arriving", FromDevice)
        monkeypatch.setattr(GraphCache, "get", lambda *args: (events.append("found"), get(*args))[1])
        monkeypatch.setattr(EagerGraph, "__call__", lambda *args: (events.append("computed"), compute(*args))[1])

    def run(self, levels: Sequence[float | None] = LEVELS, change: Callable[[], None] | None = None) -> list[list[str]]:
        """Return what became of each call of a run, after the host's look at the model.

        Args:
            levels: of the noise; None where a call has none.
            change: made before the last call.
        """
        self.dispatcher.begin_run()
        happened = []
        for number, level in enumerate(levels):
            if change is not None and number == len(levels) - 1:
                change()
            self.events.clear()
            x, options = torch.randn(2, 4), {"patches": {"output": [self.patch]}}
            if level is not None:
                options["sigmas"] = torch.full((2,), level)
            with torch.inference_mode():
                output = self.dispatcher(self.net, self.net.forward, (x,), {"transformer_options": options})
                happened.append(list(self.events))
                torch.testing.assert_close(output, self.net(x, options))
        self.dispatcher.end_run(self.net)
        return happened


def test_a_graph_is_found_before_the_level_is_known_and_runs_after(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    calls.run()
    calls.run()
    assert calls.run() == [FIRST, NOT_AS_ASSUMED, AS_ASSUMED, AS_ASSUMED, NOT_AS_ASSUMED, AS_ASSUMED]


def test_what_is_known_is_not_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, and where the GPU was done before it was asked."""
    calls = Calls(monkeypatch, are_here=True)
    calls.run()
    calls.run()
    assert calls.run() == [FIRST, *[KNOWN] * 5]


def test_a_graph_that_left_memory_is_not_made_again_for_what_is_only_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    calls.run()
    calls.run((1.0, 0.9))
    x, options = torch.randn(2, 4), {"patches": {"output": [calls.patch]}, "sigmas": torch.full((2,), 1.0)}
    calls.dispatcher.begin_run()
    captured = []
    with torch.inference_mode():
        for level in (1.0, 0.5):
            calls.library.cache.clear()
            before = calls.library.metrics.snapshot()["captured"]
            options["sigmas"] = torch.full((2,), level)
            output = calls.dispatcher(calls.net, calls.net.forward, (x,), {"transformer_options": options})
            torch.testing.assert_close(output, calls.net(x, options))
            captured.append(calls.library.metrics.snapshot()["captured"] - before)
    assert captured == [1, 1], "for the side that it is on, and not for the one before"


class Summing(Between):
    """Between start and end it decides by what is computed, which no graph can."""

    def __call__(self, out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        level = extra["sigmas"][0].item()
        return out * float(out.sum()) if self.end <= level <= self.start else out


def test_a_call_that_no_graph_can_answer_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, looked = Calls(monkeypatch), []
    calls.patch = Summing()
    for _ in range(2):
        calls.run()
    request = ModuleGuard.request
    monkeypatch.setattr(
        ModuleGuard, "request", lambda *args, **options: (looked.append(1), request(*args, **options))[1]
    )
    calls.run((0.75, 0.6, 0.5))
    assert len(looked) == 3
    assert calls.library.metrics.snapshot()["fallbacks"]


def test_no_graph_is_made_for_what_is_only_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these calls crosses over to a side, and one is the first there."""
    known = Calls(monkeypatch, are_here=True)
    known.run()
    calls = Calls(monkeypatch)
    calls.run()
    counts, right = calls.library.metrics.snapshot(), known.library.metrics.snapshot()
    same = ("captured", "proved", "served", "retired", "failed", "fallbacks")
    assert {name: counts[name] for name in same} == {name: right[name] for name in same}
    assert counts["served"] == len(LEVELS) and not counts["fallbacks"]


def test_a_start_that_is_changed_in_the_middle_of_a_run_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """With it the level is on another side, though it is that of the call before."""
    calls = Calls(monkeypatch)
    for _ in range(2):
        calls.run((0.75, 0.75))
    calls.run((0.75, 0.75, 0.75), lambda: setattr(calls.patch, "start", 0.4))
    assert not calls.library.metrics.snapshot()["fallbacks"]


class Optional(Between):
    """Where there is no level, something else is done."""

    def __call__(self, out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        return super().__call__(out, extra) if "sigmas" in extra else out * 2


def test_a_level_that_is_missing_now_is_not_that_of_the_call_before(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    calls.patch = Optional()
    for _ in range(2):
        calls.run((0.5, 0.5, None, 0.5))
    assert calls.library.metrics.snapshot()["served"] == 8
