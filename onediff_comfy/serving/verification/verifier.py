"""Each graph's first output at each set of sizes is compared with eager's, once on a machine."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.utils._pytree as pytree

from ...capture.handed_over import source_of
from ...capture.target.target import Target
from ...capture.tracing.export_lock import running
from ...compilation.compile_graph import HostServices
from ...compilation.library import GraphLibrary
from ...engines.base import CompiledGraph
from ...messages import first_line, message
from ...runtime.step_cache import ReusableGraph
from ..decision import Serve
from ..executor import EAGER, CallTimes
from ..run import Kind, RunContext
from . import numerics
from .eager_times import EagerTimes
from .other_values import OtherValues

log = logging.getLogger(__name__)

T = TypeVar("T")

_MOST_OPEN = 3
"""So often a comparison may show nothing before ComfyUI's own code does such calls."""
_ENOUGH_NUMBERS = 8
"""Of so many numbers that functions hold a graph is proved, each time that one changes; then it is believed."""


@dataclass(frozen=True)
class Verdict:
    """What a comparison with eager came to.

    Attributes:
        output: what the caller is given: the graph's, where it is right; eager's, where it is wrong or nothing was
            shown, for a forward may use its arguments up and cannot be asked again.
        reason: what is wrong, for people; None where nothing is.
        only_when_reusing: the graph is right, but not when it reuses steps.
    """

    output: Any
    reason: str | None = None
    only_when_reusing: bool = False


class _Further(NamedTuple):
    """Further calls that tell how much a difference means. Ask for them before eager uses its arguments up.

    Attributes:
        others: with other values in what functions hold; None where they hold none, and of what is proved.
        again: of eager, with inputs that are hardly others; None where no input can be.
        lossy: a layer rounds to 8 bits, or there are options.
    """

    others: OtherValues | None
    again: numerics.Again | None
    lossy: bool

    @classmethod
    def of(cls, serve: Serve, is_proved: bool) -> _Further:
        invocation = serve.request.invocation
        lossy = numerics.rounds_to_few_bits(serve.weights.tensors) or serve.options is not None
        again = numerics.again(invocation.forward, invocation.args, invocation.kwargs, few_bits=lossy)
        return cls(None if is_proved else OtherValues.of(serve), again, lossy)


class Verifier:
    """Compares graphs with eager, and times eager beside them.

    Args:
        library: remembers what was proved.
        times: of calls.
        eager_times: says which calls are to be timed eager.
        host: eager runs outside of its ``unplanned``, as the host would run it.

    Attributes:
        done: graphs that need not be asked of again in this run, by the kinds of calls. A graph that was made anew
            under the same key is another.

    Code of extensions may ask which object it runs on, by an address say. Where it may, each object is compared, in
    each process.
    """

    def __init__(
        self,
        library: GraphLibrary,
        times: CallTimes,
        eager_times: EagerTimes,
        host: HostServices,
    ) -> None:
        self._library, self._times, self._eager_times, self._host = library, times, eager_times, host
        self._open: Counter[Kind] = Counter()  # by proof key: comparisons that showed nothing
        self.done: dict[Kind, weakref.ref[CompiledGraph]] = {}  # by proof key: of which none is to run eager any more
        self._proved_of = weakref.WeakKeyDictionary[Target, set[Kind]]()  # each is one object

    def begin_run(self) -> None:
        """Ask again of every kind of call."""
        self.done.clear()

    def is_due(self, serve: Serve, run: RunContext) -> bool:
        """Return True if this call is to run eager as well: to be compared, or only to be timed."""
        kind, request = serve.route.kind, serve.request
        if not self._is_proved(serve):
            return True
        moves = request.invocation.moving is not None
        reusing = run.step_cache is not None
        if not moves and self._eager_times.due(kind, request.call.signature, request.device, reusing):
            return True
        if (moves or self._eager_times.is_over(kind)) and not request.target.tells_objects_apart:
            self.done[serve.proof_key] = weakref.ref(serve.graph)
        return False

    def judge(self, serve: Serve, output: Any, run: RunContext) -> Verdict:
        """Compare a graph's output with eager's, and retire the graph if rounding cannot explain the difference."""
        request, route = serve.request, serve.route
        further = self._unless_it_fails(lambda: _Further.of(serve, self._is_proved(serve)))
        try:
            with self._times.measured(EAGER, request.call.signature, request.device):
                expected = request.invocation.eager()
        except torch.OutOfMemoryError:
            if not self._is_proved(serve):
                raise
            self._eager_times.give_up(route.kind)  # eager was only to be timed: the answer is there
            return Verdict(output)
        verdict: Verdict | None = None
        if further is not None:
            verdict = self._unless_it_fails(lambda: self._compared(serve, (output, expected), further, run))
        return self._shown_nothing(serve, expected) if verdict is None else verdict

    def _unless_it_fails(self, find: Callable[[], T]) -> T | None:
        """Return what ``find`` does; None where it fails, most of all for want of memory. Eager's output will do."""
        try:
            return find()
        except self._host.interruption:
            raise
        except Exception as error:
            log.info("OneDiff: no comparison with eager (%s: %s)", type(error).__name__, first_line(error))
            log.debug("the comparison failed", exc_info=True)
            return None

    def _compared(self, serve: Serve, outputs: tuple[Any, Any], further: _Further, run: RunContext) -> Verdict:
        """Compare a graph's output with eager's."""
        request, route, (output, expected) = serve.request, serve.route, outputs
        dtypes = {tensor.dtype for tensor in (*serve.weights.tensors, *request.call.tensors)}
        allowed = numerics.limit(dtypes, request.device, route.variant.fp8)
        with self._host.unplanned():
            error, tells = numerics.difference(output, expected), numerics.tells(expected)
        if further.others is not None and error <= allowed:
            error = max(error, further.others.difference(serve))
        if not error <= allowed and further.again is not None:
            with serve.undone():
                response = further.again(expected)
            if further.lossy:
                allowed = max(allowed, numerics.excused(response))
            elif response > allowed:  # so is eager itself by rounding, as group norm of an image of one colour
                return self._shown_nothing(serve, expected)
        if not error <= allowed:
            return Verdict(expected, self._disproved(serve, error, allowed))
        if not tells:
            return self._shown_nothing(serve, expected)
        with self._host.unplanned():
            brief_error = self._brief_difference(serve, expected, run)
        if not brief_error <= allowed:
            return Verdict(expected, message("a graph that reuses steps differed from eager"), only_when_reusing=True)
        self._eager_times.took(route.kind, request.call.signature)
        if not self._is_proved(serve):
            self._note_proof(serve)
            log.info("OneDiff: new graph proved against eager, relative error %.1e (at most %.1e)", error, allowed)
        return Verdict(output)

    def _note_proof(self, serve: Serve) -> None:
        verdicts, target = self._library.verdicts, serve.request.target
        if not verdicts.is_proved(*serve.proof_key):
            verdicts.proved(*serve.proof_key)
        if target.tells_objects_apart:
            self._proved_of.setdefault(target, set()).add(serve.proof_key)

    def _shown_nothing(self, serve: Serve, expected: Any) -> Verdict:
        """Give eager's output, and compare a graph that is not proved again in the next call, a few times."""
        if self._is_proved(serve):
            self._eager_times.took(serve.route.kind, serve.request.call.signature)
            return Verdict(expected)
        self._open[serve.proof_key] += 1
        if self._open[serve.proof_key] < _MOST_OPEN:
            return Verdict(expected)
        return Verdict(expected, message("what the model gives tells a right graph from a wrong one in no call so far"))

    def _disproved(self, serve: Serve, error: float, allowed: float) -> str:
        """Return why a graph is wrong. It is retired, unless a trace may have mistaken one call for another."""
        verdicts, route = self._library.verdicts, serve.route
        functions = serve.request.call.functions
        if functions is not None:  # which the trace was mistaken in: the graph may be right for a model without them
            source = source_of(functions.functions[0])
            return message(
                "a graph with {name}, which the options hold, is off by {error:.2g} (at most {allowed:.2g})",
                name=source.partition(":")[2],
                source=source,
                error=error,
                allowed=allowed,
            )
        place, proofs = len(route.sizes), verdicts.proofs(serve.proof_key[0])
        of_another = serve.request.target.tells_objects_apart and verdicts.is_proved(*serve.proof_key)
        if of_another or any(proof[place : place + 1] not in ([], [route.asked]) for proof in proofs):
            return message(
                "a compiled graph that is right for another model is off by {error:.2g} for this one", error=error
            )
        reason = message(
            "a compiled graph differed from eager by {error:.2g} (at most {allowed:.2g}) and was retired",
            error=error,
            allowed=allowed,
        )
        verdicts.retire(route.graph_key, reason)
        return reason

    def _is_proved(self, serve: Serve) -> bool:
        """Return True if the graph is proved for such a call, or for enough others of other numbers."""
        compilation, facts = serve.proof_key
        verdicts = self._library.verdicts
        if verdicts.is_proved(compilation, facts) and self._holds_for(serve, serve.proof_key):
            return True
        if serve.request.call.functions is None:
            return False
        *known, _ = facts
        alike = [proof for proof in verdicts.proofs(compilation) if len(proof) == len(facts) and proof[:-1] == known]
        return sum(self._holds_for(serve, (compilation, tuple(proof))) for proof in alike) >= _ENOUGH_NUMBERS

    def _holds_for(self, serve: Serve, proof_key: Kind) -> bool:
        """Return True if a proof says something of the call's very module, whichever it was found with."""
        target = serve.request.target
        return not target.tells_objects_apart or proof_key in self._proved_of.get(target, ())

    def _brief_difference(self, serve: Serve, expected: Any, run: RunContext) -> float:
        """Return how far the graph is off that reuses what a call found for that very call."""
        graph, weights, tensors = serve.graph, serve.weights.tensors, serve.request.call.tensors
        if not isinstance(graph, ReusableGraph):
            return 0.0
        features = run.step_cache.features(serve.stream) if run.step_cache is not None else None
        try:
            with running(), serve.bringing_options(watched=True):
                if features is None:  # nothing is reused in this run, but it may be in the next
                    _, features = graph.compute(weights, tensors)
                flat, _ = graph.reuse(weights, tensors, features)
        except Exception as error:  # most of all, no memory: eager's result is there, and the run goes on
            log.info("OneDiff: steps cannot be reused (%s: %s)", type(error).__name__, first_line(error))
            log.debug("the brief graph failed", exc_info=True)
            return float("inf")
        return numerics.difference(pytree.tree_unflatten(flat, graph.binding.output), expected)
