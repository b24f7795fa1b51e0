"""Running the graph that serves a call, and what to do where memory runs out."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree

from ..capture.export_lock import running
from ..compilation.library import GraphLibrary
from ..messages import first_line, message
from ..runtime.cuda_graphs import RecordedGraph
from ..runtime.step_cache import ReusableGraph
from .call_timing import CallTimes
from .decision import Serve
from .resolution.variant_policy import VariantPolicy
from .run import RunContext

log = logging.getLogger(__name__)


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
        self._library, self._times, self._policy = library, times, policy
        self._record_only_launch_bound = record_only_launch_bound

    def run(self, serve: Serve, run: RunContext, reuse: bool) -> Any:
        """Return the output of a call.

        Args:
            reuse: take the deep layers' work from an earlier step, as ``reuses`` said.

        Returns:
            The output as the host's forward gives it; or ``Failed``.
        """
        signature = None if reuse else serve.request.call.signature
        try:
            with self._times.measured(serve.route.graph_key, signature, serve.request.device):
                flat = self._run(serve, run, reuse)
        except torch.OutOfMemoryError:
            return Failed(message("the compiled graph ran out of memory"), for_good=False)
        except Exception as error:
            log.debug("compiled graph failed", exc_info=True)
            kind, line = type(error).__name__, first_line(error)
            return Failed(message("the compiled graph failed ({kind}: {first_line})", kind=kind, first_line=line))
        return pytree.tree_unflatten(flat, serve.graph.binding.output)

    def reuses(self, serve: Serve, run: RunContext) -> bool:
        """Return True if the step cache wants this call to reuse what an earlier step found. Ask once for each call."""
        if run.step_cache is None:
            return False
        if serve.stream is None:
            run.step_cache.cannot_reuse(message("a call does not say which prompt it is for"))
            return False
        if not isinstance(serve.graph, ReusableGraph):
            run.step_cache.cannot_reuse(self._policy.why_no_reuse(serve.request.target))
            return False
        return run.step_cache.reuses(serve.stream)

    def _run(self, serve: Serve, run: RunContext, reuse: bool) -> Sequence[torch.Tensor]:
        """Run a graph; where memory runs out, give back all that recordings hold and run it once more."""
        try:
            return self._run_once(serve, run, reuse)
        except torch.OutOfMemoryError:
            if run.step_cache is not None:
                run.step_cache.forget()
            released = self._library.recordings.release()
            log.warning(
                "OneDiff: out of memory; released %d MB of CUDA graph recordings and tried again", released >> 20
            )
        torch.cuda.empty_cache()
        return self._run_once(serve, run, reuse=False)

    def _run_once(self, serve: Serve, run: RunContext, reuse: bool) -> Sequence[torch.Tensor]:
        graph, weights, tensors = serve.graph, serve.weights, serve.request.call.tensors
        with running():
            if run.step_cache is not None and serve.stream is not None and isinstance(graph, ReusableGraph):
                return run.step_cache.call(graph, serve.stream, weights, tensors, reuse)
            if isinstance(graph, RecordedGraph):
                return graph.run(weights, tensors, self._record_only_launch_bound)
            return graph(weights, tensors)
