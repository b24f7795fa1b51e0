"""Serve a model block by block, because not all of its weights are on the device at once.

A transformer is a list of blocks that its forward calls one after the other. The forward runs as the host wrote it, on
an image of the model whose lists hold proxies. A proxy has the host bring its block's weights, and a graph of the block
answers. Blocks of one kind share one graph, which is given other weights in each call. While the device computes one
block, the host's streams bring the next, since launching a block takes a fraction of the time that it computes.
"""

from __future__ import annotations

import contextlib
import logging
import types
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from ...capture.call import NotCovered
from ...messages import Message, message
from ...runtime.device_memory import wants_memory
from ...runtime.launch_bound import Backlog, MovingWeights
from ...serving.decision import Eager, Invocation, Output, search_failed
from ...serving.dispatcher import Dispatcher
from ..process.host_compiler import unplanned
from ..process.process import library
from ..weights.residency import StreamedModules, attributes_of, formats_of, structure_of
from .functional_call import FunctionalCall, Told
from .module_proxy import Serve
from .part import Part
from .reused_blocks import ReusedBlocks
from .skeleton import Skeleton
from .weights_check import WeightsCheck

log = logging.getLogger(__name__)

T = TypeVar("T")

_CONTAINERS = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)


_ASKED = 2
"""So many calls of one form that no graph answers in a run, and their weights are not brought for us any more."""


class BlockServer:
    """Answers calls of a model's forward, block by block.

    An image of a block is for graphs: it is traced, and compared with what they give, once it is known that no more
    comes of its code than an output. What no graph answers the host runs, on the block itself. Its code may keep
    something there, or in a table under the block's name, and the image is of many blocks.

    Args:
        part: of a model of the host's, in which the blocks are.
        dispatcher: answers calls of a module whose weights are in place.
    """

    def __init__(self, part: Part, dispatcher: Dispatcher) -> None:
        self._part, self._dispatcher = part, dispatcher
        self._check = WeightsCheck(part, dispatcher, whole=False)
        self._kinds: dict[Hashable, list[StreamedModules]] = {}
        self._streamed: dict[torch.nn.Module, StreamedModules] = {}  # by block
        self._called: set[torch.nn.Module] = set()  # blocks
        self._backlog = Backlog()
        self._unanswered = _Unanswered()
        self._skeleton: Skeleton | None = None
        self._reused: ReusedBlocks | None = None  # made with the skeleton

    def __call__(
        self, module: torch.nn.Module, forward: types.MethodType, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Return ``forward(*args, **kwargs)``, a method of the module's, in which graphs have answered the blocks."""
        skeleton = self._skeleton
        if skeleton is None or not skeleton.is_of(module):
            skeleton = self._skeleton = Skeleton(module, _is_block)
            self._kinds, self._streamed, self._called = {}, {}, set()
            self._reused = ReusedBlocks(module, self._serve_block)

        def run(serve: Serve, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            with skeleton.current(serve) as image:
                return forward.__func__(image, *args, **kwargs)

        step_cache = self._dispatcher.run.step_cache
        if step_cache is None or self._reused is None:
            return run(self._serve_block, args, kwargs)
        return self._reused.answer(step_cache, run, forward, args, kwargs)

    def _serve_block(
        self,
        block: torch.nn.Module,
        forward: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        streamed = self._streamed.get(block)
        if streamed is None or not streamed.knows(block, self._dispatcher.runs):
            streamed = self._streamed[block] = self._kind_of(block, self._part.compute_dtype)
        image, is_first = streamed.image, block not in self._called
        self._called.add(block)
        if self._dispatcher.is_held_back(Invocation(image, forward, (), {}, None, MovingWeights(), is_first)):
            return forward(*args, **kwargs)
        try:
            return self._answered(block, streamed, forward, args, kwargs)
        except NotCovered as refusal:
            reason = refusal.reason  # and no more in here: what runs while an exception is handled is slower
        self._dispatcher.passed_by(block, reason)
        return forward(*args, **kwargs)

    def _kind_of(self, block: torch.nn.Module, compute_dtype: torch.dtype) -> StreamedModules:
        """Return the image that shows ``block``. One whose attributes change keeps its own."""
        structure, formats, before = structure_of(block), formats_of(block, compute_dtype), self._streamed.get(block)
        if before is not None and (before.structure, before.formats) == (structure, formats):
            return before
        kinds = self._kinds.setdefault((structure, attributes_of(block)), [])
        known = next((kind for kind in kinds if kind.formats == formats), None)
        if known is None:
            known = StreamedModules(block, compute_dtype, self._backlog)
            kinds.append(known)
        return known

    def _answered(
        self,
        block: torch.nn.Module,
        streamed: StreamedModules,
        forward: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Return what a block gives, from a graph or from the host.

        Raises:
            NotCovered: the host has to run the block itself, for this reason. Nothing has happened to what it is given.
        """
        if self._check.is_wrong(block):
            raise NotCovered(self._check.reason)
        call, image = FunctionalCall(forward, args, kwargs), streamed.image
        if (reason := self._unanswered.reason(self._dispatcher.runs, block, call)) is not None:
            raise NotCovered(reason)
        with self._unanswered.noting(block, call), contextlib.ExitStack() as stack:
            try:
                in_place = stack.enter_context(streamed.in_place(block, self._part.device))
            except NotCovered:
                raise
            except Exception as error:  # of the host's own functions, asked for all of a block's weights at once
                log.debug("a block's weights could not be brought", exc_info=True)
                in_place, failed = None, search_failed(error)
            if in_place is None:  # most likely for want of memory, and the host's own forward may want as much
                library().recordings.release(ran_out=True)
                raise NotCovered(failed)
            ran = stack.enter_context(contextlib.ExitStack())
            ran.callback(streamed.put_back, block)
            on_image = call.telling(image.forward)
            invocation = Invocation(image, on_image, (), call.arguments, image.forward, in_place.moving, on_image=True)
            is_due = in_place.settled and self._check.is_due(block, in_place.is_changed)
            out = call.out if in_place.settled and not is_due else None  # else the host may answer on what is given
            outcome = _unless_memory_is_short(lambda: self._dispatcher.attempt(invocation, out))
            if outcome is None:  # for the image's own code, which a graph is compared with the first time
                raise NotCovered(_too_little_to_compare())
            is_due = is_due and isinstance(outcome, Output)
            trial = _unless_memory_is_short(lambda: _unplanned(on_image, call)) if is_due else None
            if isinstance(outcome, Output) and outcome.by_graph_alone and not is_due:
                ran.pop_all()  # no code of the block's has run, which could have left something on its image
        self._unanswered.note(block, call, outcome)
        if not isinstance(outcome, Output):
            return forward(*args, **kwargs)
        told = outcome.value
        if is_due:  # by now the host's own forward is free to bring the weights its way
            by_host = trial and _unless_memory_is_short(lambda: _unplanned(call.telling(forward), call))
            if trial is None or by_host is None:
                raise NotCovered(_too_little_to_compare())
            with unplanned():
                told = told if self._check.agree(block, in_place.is_changed, trial, by_host) else by_host
        return call.completed(told)


class _Unanswered:
    """Calls of blocks that no graph has answered in this run, by form, and why."""

    def __init__(self) -> None:
        self._run: int | None = None
        self._found: dict[Hashable, list[str]] = {}

    def reason(self, run: int, block: torch.nn.Module, call: FunctionalCall) -> str | None:
        """Return why the host is to run such a call without a graph being asked for; None if one is."""
        if run != self._run:
            self._run, self._found = run, {}
        reasons = self._found.get((block, call.form), []) if self._found else []
        return reasons[-1] if len(reasons) >= _ASKED else None

    @contextlib.contextmanager
    def noting(self, block: torch.nn.Module, call: FunctionalCall) -> Iterator[None]:
        """Note why a call cannot be answered, if that comes out inside: of bringing weights, or of a comparison."""
        try:
            yield
        except NotCovered as refusal:
            self.note(block, call, Eager(refusal.reason))
            raise

    def note(self, block: torch.nn.Module, call: FunctionalCall, outcome: Output | Eager) -> None:
        """Note what became of a call. A graph that is on its way is asked for again."""
        if isinstance(outcome, Eager) and not outcome.expected:
            self._found.setdefault((block, call.form), []).append(outcome.reason)
        elif self._found:
            self._found.pop((block, call.form), None)


def _unplanned(telling: Callable[..., Told], call: FunctionalCall) -> Told:
    with unplanned():
        return telling(**call.arguments)


def _unless_memory_is_short(run: Callable[[], T]) -> T | None:
    """Return what ``run`` does; None where memory ran out, after recordings have given theirs back.

    The host's library takes weights for what is allocated, and cannot take that. To compare a block is more than the
    host would do, so that there is no memory for it is nothing for people to see.
    """
    try:
        return run()
    except RuntimeError as error:
        if not wants_memory(error):
            raise
    # Nothing is handled here: an exception would hold what was computed.
    library().recordings.release(ran_out=True)
    return None


def _too_little_to_compare() -> Message:
    return message("there is too little memory to compare it with ComfyUI's own")


def blocks_of(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the blocks that a module is served by, one after the other."""
    for child in module.children():
        if _is_block(module, child):
            yield child
        else:
            yield from blocks_of(child)


def _is_block(parent: torch.nn.Module, child: torch.nn.Module) -> bool:
    return isinstance(parent, torch.nn.ModuleList) and not isinstance(child, _CONTAINERS)
