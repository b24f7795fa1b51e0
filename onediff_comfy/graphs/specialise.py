"""Graphs for one set of sizes: which sizes get one, and that nobody waits for it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

from ..capture.call import Call, Signature
from ..capture.target import Target
from ..settings import SPECIALISE_AFTER_RUNS
from . import skeleton
from .library import GraphLibrary, NotYet
from .making import Maker
from .timing import RunTimes

log = logging.getLogger(__name__)

Kind = tuple[str, Signature]
"""Calls that a graph answers: the graph's key, and their signature."""

# Calls after which an exact graph must have been as fast as the general one: the first ones load kernels and record.
_TRIED_AFTER_CALLS = 12
_SLOWER = 1.02  # less is noise


class Specialiser:
    """Has exact graphs made in the background, for sizes that are wanted and for sizes that come often.

    Args:
        library: where graphs are kept.
        wanted: whether calls of this signature are to have a graph of their own, however rare they are.
    """

    def __init__(self, library: GraphLibrary, wanted: Callable[[Signature], bool]) -> None:
        self._library = library
        self.wanted = wanted
        self._runs: Counter[Kind] = Counter()
        self._counted: set[Kind] = set()  # in this run
        self._given_up: set[Kind] = set()
        self._replaced: dict[Kind, str] = {}  # calls of an exact graph, and the general one that served them before

    def begin_run(self) -> None:
        """A run begins, in which each kind of call counts once."""
        self._counted.clear()

    def ready(
        self, maker: Callable[[], Maker], target: Target, forward: Callable[..., Any], call: Call, general: str
    ) -> bool:
        """Whether an exact graph is in memory for a call that the graph with the key ``general`` serves.

        Where none is, and there should be one, another process is set to work; a later run finds it.
        """
        background, kind = self._library.background, (general, call.signature)
        if background is None or kind in self._counted or kind in self._given_up:
            return False
        self._counted.add(kind)
        self._runs[kind] += 1
        wanted = self.wanted(call.signature)
        if not wanted and self._runs[kind] < SPECIALISE_AFTER_RUNS:
            return False
        make = maker()
        if not wanted and not make.engine.specialises(make.device):
            self._given_up.add(kind)
            return False
        key = make.call_key(target, call, general=False)
        outcome = background.outcome(key)
        if outcome is not None:
            self._library.forget_candidates(key)
        try:
            for candidate in self._library.candidates(key):
                if self._library.useful(candidate.graph_key) and self._library.loaded_soon(
                    candidate.graph_key, make.engine, make.device
                ):
                    self._library.metrics.count("specialised")
                    self._replaced[candidate.graph_key, call.signature] = general
                    return True
            if outcome is not None:
                log.info("OneDiff: no graph for these sizes alone (%s); the general one serves", outcome)
                self._given_up.add(kind)
            elif not background.busy():
                background.start(key, make.job(target, forward, call, general=False))
        except NotYet:
            pass
        except (skeleton.Unpicklable, AttributeError) as error:
            log.debug("not specialised: %s", error)
            self._given_up.add(kind)
        return False

    def regretted(self, call: Call, exact: str, times: RunTimes) -> bool:
        """Whether the graph with the key ``exact`` has turned out slower than the general one that it replaced.

        A compiler that knows all sizes mostly finds something faster, but not always. Then it is left
        alone from now on, in later processes too.
        """
        kind = (exact, call.signature)
        general = self._replaced.get(kind)
        if general is None:
            return False
        seconds, calls = times.fastest(exact, call.signature)
        if calls < _TRIED_AFTER_CALLS:
            return False
        del self._replaced[kind]
        before, _ = times.fastest(general, call.signature)
        if seconds <= before * _SLOWER:
            return False
        log.info(
            "OneDiff: a graph for these sizes alone takes %.1f ms a call, the general one %.1f ms; it is put aside",
            seconds * 1e3,
            before * 1e3,
        )
        self._given_up.add((general, call.signature))
        self._library.put_aside(exact)
        return True
