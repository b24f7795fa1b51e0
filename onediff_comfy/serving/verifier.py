"""Each graph's first output at each set of sizes is compared with eager's, once on a machine."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch.utils._pytree as pytree

from ..capture.alone import running
from ..graphs.library import GraphLibrary
from ..graphs.step_cache import ReusableGraph
from ..messages import first_line, message
from . import numerics
from .call_timing import EAGER, CallTimes
from .decision import Serve
from .run import RunContext

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Verdict:
    """What a comparison with eager came to.

    Attributes:
        output: what the caller is given: the graph's, where it is right; eager's, where it is wrong, for a forward may
            use its arguments up and cannot be asked again.
        reason: what is wrong, for people; None where nothing is.
        only_when_reusing: the graph is right, but not when it reuses steps.
    """

    output: Any
    reason: str | None = None
    only_when_reusing: bool = False


class Verifier:
    """Compares graphs with eager, and times eager beside them.

    Args:
        library: remembers what was proved, and how long eager took.
        times: of calls.
    """

    def __init__(self, library: GraphLibrary, times: CallTimes) -> None:
        self._library, self._times = library, times
        self._eager_is_warm = False
        self._time_again: tuple[str, tuple[int, ...]] | None = None

    def is_due(self, serve: Serve) -> bool:
        """Return True if this call is to be compared with eager, or eager to be timed by it."""
        proof_key = serve.route.proof_key
        return not self._library.is_proved(*proof_key) or proof_key == self._time_again

    def judge(self, serve: Serve, output: Any, run: RunContext) -> Verdict:
        """Compare a graph's output with eager's, and retire the graph if rounding cannot explain the difference."""
        request, route = serve.request, serve.route
        with self._times.measured(EAGER, request.call.signature, request.device):
            expected = request.invocation.eager()
        dtypes = {tensor.dtype for tensor in (*serve.weights, *request.call.tensors)}
        allowed = numerics.limit(dtypes, request.device, route.variant.fp8)
        error = numerics.difference(output, expected)
        if not error <= allowed:
            reason = message(
                "a compiled graph differed from eager by {error:.2g} (at most {allowed:.2g}) and was retired",
                error=error,
                allowed=allowed,
            )
            self._library.retire(route.graph_key, reason)
            return Verdict(expected, reason)
        if not self._brief_difference(serve, expected, run) <= allowed:
            return Verdict(expected, message("a graph that reuses steps differed from eager"), only_when_reusing=True)
        if self._note_eager_time(serve):
            self._library.proved(*route.proof_key)
            log.info("OneDiff: new graph proved against eager, relative error %.1e (at most %.1e)", error, allowed)
        return Verdict(output)

    def _note_eager_time(self, serve: Serve) -> bool:
        """Note how long eager took. Return True if the graph's proof is new too."""
        proof_key = serve.route.proof_key
        seconds = self._times.usual(EAGER, serve.request.call.signature) or 0.0
        if proof_key == self._time_again and self._library.is_proved(*proof_key):
            self._time_again = None
            self._library.eager_took(*proof_key, seconds)
            return False
        if self._eager_is_warm:
            self._library.eager_took(*proof_key, seconds)
        else:  # its first call loads kernels and says nothing of its speed: once more, at the next call
            self._eager_is_warm, self._time_again = True, proof_key
        return True

    def _brief_difference(self, serve: Serve, expected: Any, run: RunContext) -> float:
        """Return how far the graph is off that reuses what a call found for that very call."""
        graph, weights, tensors = serve.graph, serve.weights, serve.request.call.tensors
        if not isinstance(graph, ReusableGraph):
            return 0.0
        features = run.step_cache.features(serve.stream) if run.step_cache is not None else None
        try:
            with running():
                if features is None:  # nothing is reused in this run, but it may be in the next
                    _, features = graph.compute(weights, tensors)
                flat, _ = graph.reuse(weights, tensors, features)
        except Exception as error:  # most of all, no memory: eager's result is there, and the run goes on
            log.info("OneDiff: steps cannot be reused (%s: %s)", type(error).__name__, first_line(error))
            log.debug("the brief graph failed", exc_info=True)
            return float("inf")
        return numerics.difference(pytree.tree_unflatten(flat, graph.binding.output), expected)
