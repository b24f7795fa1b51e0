"""Graphs for one set of sizes: which sizes get one, and that nobody waits for it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from ...capture.call import Signature
from ...compilation import weightless_pickle
from ...compilation.compile_graph import Maker
from ...compilation.graph_builder import Pending
from ...compilation.library import GraphLibrary
from ...settings import SPECIALISE_AFTER_RUNS
from ..decision import Request
from ..executor import CallTimes

log = logging.getLogger(__name__)

Kind = tuple[str, Signature]
"""Calls that a graph answers: the graph's key, and their signature."""

# Calls after which an exact graph must have been as fast as the general one: the first ones load kernels and record.
_TRIED_AFTER_CALLS = 12
SLOWER = 1.02  # less is noise


class Specializer:
    """Has exact graphs made in the background, for sizes that are wanted and for sizes that come often.

    Args:
        library: where graphs are kept.
        wanted: returns True if calls of a signature are to have a graph of their own, however rare they are.
    """

    def __init__(self, library: GraphLibrary, wanted: Callable[[Signature], bool]) -> None:
        self._library = library
        self.wanted = wanted
        self._runs: Counter[Kind] = Counter()
        self._given_up: set[Kind] = set()
        self._replaced: dict[Kind, str] = {}  # calls of an exact graph, and the general one that served them before

    def is_ready(self, request: Request, general: str, maker: Callable[[], Maker]) -> bool:
        """Return True if an exact graph is in memory for a call that the graph with the key ``general`` serves.

        Where none is, and there should be one, another process is set to work; a later run finds it. Ask once a run.
        """
        background, signature = self._library.background, request.call.signature
        kind = (general, signature)
        if background is None or kind in self._given_up:
            return False
        self._runs[kind] += 1
        wanted = self.wanted(signature)
        if not wanted and self._runs[kind] < SPECIALISE_AFTER_RUNS:
            return False
        make = maker()
        if not wanted and not make.engine.specialises(make.device):
            self._given_up.add(kind)
            return False
        key = make.call_key(request.target, request.call, general=False)
        outcome = background.outcome(key)
        if outcome is not None:
            self._library.index.forget_candidates(key)
        for candidate in self._library.index.candidates(key):
            if self._library.verdicts.useful(candidate.graph_key):
                graph = self._library.builder.loaded_soon(candidate.graph_key, make.engine, make.device)
                if isinstance(graph, Pending):
                    return False
                if graph is not None:
                    self._library.metrics.count("specialised")
                    self._replaced[candidate.graph_key, signature] = general
                    return True
        if outcome is not None:
            log.info("OneDiff: no graph for these sizes alone (%s); the general one serves", outcome)
            self._given_up.add(kind)
        elif not background.busy():
            try:
                background.start(key, make.job(request.target, request.invocation.forward, request.call, general=False))
            except (weightless_pickle.Unpicklable, AttributeError) as error:
                log.debug("not specialised: %s", error)
                self._given_up.add(kind)
        return False

    def is_regression(self, request: Request, exact: str, times: CallTimes) -> bool:
        """Return True if the graph with the key ``exact`` is slower than the general one that it replaced.

        A compiler that knows all sizes mostly finds something faster, but not always. Then it is left
        alone from now on, in later processes too.
        """
        call = request.call
        kind = (exact, call.signature)
        general = self._replaced.get(kind)
        if general is None:
            return False
        seconds, calls = times.fastest(exact, call.signature)
        if calls < _TRIED_AFTER_CALLS:
            return False
        del self._replaced[kind]
        before, _ = times.fastest(general, call.signature)
        if seconds <= before * SLOWER:
            return False
        log.info(
            "OneDiff: a graph for these sizes alone takes %.1f ms a call, the general one %.1f ms; it is put aside",
            seconds * 1e3,
            before * 1e3,
        )
        self._given_up.add((general, call.signature))
        self._library.verdicts.put_aside(exact)
        return True
