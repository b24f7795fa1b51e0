"""Where a request's graph comes from: memory, disk, a compilation here, or one in another process."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...cache.call_index import reader_of
from ...cache.keys import asker, same_widths
from ...capture.call import ChangesState, NotCovered, Signature, Structure
from ...capture.handed_over import Functions
from ...capture.option_probe import OptionRead
from ...compilation import weightless_pickle
from ...compilation.background import Background
from ...compilation.compile_graph import HostServices, Maker, TargetCall
from ...compilation.graph_builder import Pending, waiting_for_turn
from ...compilation.job_queue import Waited
from ...compilation.library import GraphLibrary
from ...engines.base import CompiledGraph, Engine, EngineError
from ...messages import first_line, message
from ..decision import Request, Served
from ..module_guard import ModuleGuard
from ..run import RunContext

log = logging.getLogger(__name__)

MOST_VALUES = 12
"""For so many values of plain arguments graphs are made, each a trace and perhaps a compilation."""


@dataclass(frozen=True, eq=False)
class Provided:
    """A graph that serves a request.

    Attributes:
        request: with all the options in its signature that its target turned out to read.
    """

    request: Request
    route: Served
    graph: CompiledGraph


@dataclass(frozen=True)
class _OnlyHere:
    """No other process can make a graph.

    Attributes:
        reason: for people.
        error: that says so where nothing is made here.
    """

    reason: object
    error: type[NotCovered | EngineError]


class GraphProvider:
    """Finds graphs, and has them made.

    Args:
        library: where graphs are kept.
        host: what is needed of the host.
        guard: splits a request anew once more is known of its options.
        show: shows a short status text to the person, on the node.
    """

    def __init__(
        self, library: GraphLibrary, host: HostServices, guard: ModuleGuard, show: Callable[[str], None]
    ) -> None:
        self._library, self._host, self._guard, self._show = library, host, guard, show
        self._values: dict[tuple[str, Signature], set[Structure]] = {}  # of calls that graphs were made for
        self._made_again: set[str] = set()  # by call key: what another process had made, and was gone

    def kept(self, request: Request, maker: Maker, exact: bool) -> Provided | None:
        """Return the most specialised graph that exists for a request, in memory or on disk.

        A call waits for a graph to be loaded, in background mode too. Eager code gives way to another thread's at each
        operator: ten steps of SDXL beside a graph of 79 MB being loaded, and that graph's first, took 6 seconds where
        2.5 of loading and half a second of steps would do (H200; benchmarks/NOTES.md, section 35).

        Args:
            exact: none that is for all sizes.
        """
        tensors = request.call.signature.tensors
        for general in (False,) if exact else (False, True):
            for candidate in self._library.index.candidates(maker.call_key(request.target, request.call, general)):
                sizes = candidate.shapes.values(tensors)
                if sizes is None or not self._library.verdicts.useful(candidate.graph_key):
                    continue
                builder = self._library.builder
                graph = builder.loaded(candidate.graph_key, maker.engine, maker.device, self._while_loading)
                if graph is not None:
                    return _provided(request, candidate.graph_key, sizes, maker, graph)
        return None

    def made(self, request: Request, maker: Maker, general: bool, run: RunContext) -> Provided | Pending | None:
        """Return a graph made for this request, or for those like it of all sizes; None if it does not serve it.

        Raises:
            NotCovered, EngineError: it cannot be made.
        """
        learned: set[str] = set()
        while True:
            target, call = request.target, request.call
            self._refuse_ever_other_values(target.fingerprint, call.signature)
            kind = f"{maker.call_key(target, call, general=True)} {same_widths(call.signature).lines()}"
            names = kind, kind if general else maker.call_key(target, call, general=False)
            known = self._library.failures.reason(*names)
            if known is not None:
                raise NotCovered(known)
            try:
                if run.compile != "wait" and self._library.background is not None:
                    elsewhere = self._made_in_background(self._library.background, request, maker, general)
                    if not isinstance(elsewhere, _OnlyHere):
                        return elsewhere
                    if run.compile == "background":
                        raise elsewhere.error(_not_in_background(elsewhere.reason))
                    if run.over:
                        return Pending(message("a graph is made with the next image"))
                with self._failures_noted(*names):
                    options = request.arguments.get(self._host.options_name) or {}
                    what = TargetCall(target, request.invocation.forward, call, options)
                    made = maker.make(self._library, what, general, self._show)
            except OptionRead as read:
                if read.name in learned:  # to know of it changes nothing
                    raise NotCovered(
                        message("the model reads {name} in a way that no trace shows", name=read.name)
                    ) from read
                learned.add(read.name)
                self._library.index.learn_option(reader_of(target.fingerprint, call.code), read.name)
                request = self._guard.up_to_date(request)
                # A call that reads more has another name, under which its graph may be known.
                found = self.kept(request, maker, not general)
                if found is not None:
                    return found
                continue
            except ChangesState as refusal:
                self._guard.learn(request, refusal)
                raise
            if made is None:
                return None
            key, graph = made
            sizes = graph.shapes.values(call.signature.tensors)
            return None if sizes is None else _provided(request, key, sizes, maker, graph)

    def _refuse_ever_other_values(self, fingerprint: str, signature: Signature) -> None:
        """Count a graph that is about to be made for a call.

        Raises:
            NotCovered: many were made already for calls that differ in plain values alone, and more would be.
        """
        any_values = replace(signature.any_sizes(), structure=_any_values(signature.structure))
        known = self._values.setdefault((fingerprint, any_values), set())
        known.add(signature.structure)
        if len(known) > MOST_VALUES:
            known.discard(signature.structure)
            raise NotCovered(message("plain values among its arguments are others in each call"))

    def give_up(self, functions: Functions) -> None:
        """Make no more graphs for functions of this code: they were wrong."""
        self._guard.give_up(functions)

    def _while_loading(self, waited: Waited) -> None:
        self._host.check_interrupted()
        loading = message("loading the compiled graph, {seconds:.0f} s", seconds=waited)
        self._show(waiting_for_turn(waited) if waited.for_turn else loading)

    def _made_in_background(
        self, background: Background, request: Request, maker: Maker, general: bool
    ) -> Provided | Pending | _OnlyHere | None:
        """Have another process make a graph; None if it found that none is for all sizes and for these.

        Raises:
            EngineError: it ended before it could make one.
            OptionRead: it found that the target reads an option that is not part of the call.
        """
        if request.call.functions is not None:
            return _OnlyHere(message("the code that nodes put into the model stays here"), EngineError)
        if type(maker.engine).to_parts is Engine.to_parts:
            unkept = message("graphs of the {engine} engine are not kept in files", engine=maker.engine.name)
            return _OnlyHere(unkept, EngineError)
        key = maker.call_key(request.target, request.call, general)
        outcome = background.outcome(key)
        if outcome is None:
            return _begun(background, key, request, maker, general)
        if outcome.option is not None:
            raise OptionRead(outcome.option)
        self._library.index.forget_candidates(key)
        if outcome.died:  # that says nothing of graphs for all sizes, nor of this one another time
            raise EngineError(_not_in_background(outcome.failure))
        if outcome.failure is not None:
            return _OnlyHere(outcome.failure, NotCovered)
        found = self.kept(request, maker, exact=not general)
        if found is not None or (general and outcome.graph is None):
            return found
        if key in self._made_again:
            raise EngineError(_not_in_background(message("its graph is not in the cache folder")))
        self._made_again.add(key)  # somebody has cleared the folder since, which says nothing of graphs
        return _begun(background, key, request, maker, general)

    @contextlib.contextmanager
    def _failures_noted(self, family: str, key: str) -> Iterator[None]:
        """Note what fails inside: it would fail for the next node too. Not what a person can mend meanwhile."""
        try:
            yield
        except (EngineError, MemoryError, torch.OutOfMemoryError, OSError, self._host.interruption):
            raise
        except NotCovered as refusal:
            self._library.failures.add(family, key, refusal.reason)
            raise
        except Exception as error:
            log.debug("making a graph failed", exc_info=True)
            self._library.failures.add(family, key, compiling_failed(error))
            raise NotCovered(compiling_failed(error)) from error


def compiling_failed(error: Exception) -> str:
    """Return what a person is told of an error that only a compiler's author can mend."""
    return message("compiling failed ({kind}: {first_line})", kind=type(error).__name__, first_line=first_line(error))


def _not_in_background(why: object) -> str:
    return message("it cannot be compiled in the background ({why}); choose compile: wait", why=why)


def _begun(background: Background, key: str, request: Request, maker: Maker, general: bool) -> Pending | _OnlyHere:
    """Have another process make a graph, unless it does that already or is busy with another."""
    if background.seconds(key) is None:
        try:
            background.start(key, maker.job(request.target, request.invocation.forward, request.call, general))
        except (weightless_pickle.Unpicklable, AttributeError) as error:
            return _OnlyHere(error, EngineError)
    reason = message("a graph is being compiled in the background")
    return Pending(reason, lambda: _progress(background, key))


def _progress(background: Background, key: str) -> str | None:
    seconds = background.seconds(key)
    if seconds is not None:
        return message("compiling in the background, {seconds:.0f} s", seconds=seconds)
    return message("waiting for another compilation in the background") if background.busy() else None


def _provided(
    request: Request, graph_key: str, sizes: Mapping[str, int], maker: Maker, graph: CompiledGraph
) -> Provided:
    asked = asker(request.target.fingerprint, request.call.signature)
    return Provided(request, Served(graph_key, tuple(sizes.values()), asked, maker.variant), graph)


def _any_values(structure: Any) -> Any:
    """Return a call's structure with plain values left open."""
    if not isinstance(structure, tuple):
        return structure
    return structure[:2] if structure[:1] == ("value",) else tuple(map(_any_values, structure))
