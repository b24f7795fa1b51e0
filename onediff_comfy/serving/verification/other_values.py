"""A second proof of a graph with functions: of other values in the tensors that they hold.

A graph that is proved serves whatever those tensors hold. A weight of one, or an image of zeros, hides that a trace
took another way than the host: then the first output is right, and the next image would not be. So copies of the
functions are called by the host's own code, with other values, and so is the graph.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree

from ...capture.tracing.export_lock import running
from ...capture.tracing.trace_scopes import generators_restored
from ...capture.values.tensors import put_back
from ...engines.base import CompiledGraph, Outputs
from ...runtime.cuda_graphs import RecordedGraph
from ...runtime.step_cache import ReusableGraph
from ..decision import Serve
from . import numerics

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OtherValues:
    """A call whose functions hold other values.

    Attributes:
        tensors: of the call, for its graph.
        held: by the functions.
        args: of the call, for the host's own code.
        kwargs: likewise.
        options: of the call, where its graph calls a function of theirs.
    """

    tensors: Sequence[torch.Tensor]
    held: Sequence[torch.Tensor]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    options: Mapping[str, Any] | None

    @classmethod
    def of(cls, serve: Serve) -> OtherValues | None:
        """Return such a call; None where functions hold no tensors. Ask before eager uses the arguments up."""
        call, invocation = serve.request.call, serve.request.invocation
        functions = call.functions
        if functions is None or not any(map(torch.is_floating_point, functions.held)):
            return None
        held, copies = functions.with_other_values()
        instead = {id(f): copy for f, copy in zip(functions.functions, copies, strict=True)}

        def other(leaf: Any) -> Any:
            return leaf.clone() if isinstance(leaf, torch.Tensor) else instead.get(id(leaf), leaf)

        options = serve.options and dict(serve.options)
        args, kwargs, options = pytree.tree_map(other, (tuple(invocation.args), dict(invocation.kwargs), options))
        own = [tensor.clone() for tensor in call.tensors[: call.own_tensors]]
        return cls([*own, *functions.tensors(serve.request.device, held)], held, args, kwargs, options)

    def difference(self, serve: Serve) -> float:
        """Return how far the graph is off: not at all where there is no memory to tell, and all where eager raises."""
        try:
            # No function that was traced writes to what it holds; one that a graph only calls may.
            with generators_restored(), put_back(() if self.options is None else self.held):
                expected = serve.request.invocation.forward(*self.args, **self.kwargs)
            with running(), replace(serve, options=self.options).bringing_options(watched=True):
                flat = _outputs(serve.graph, serve.weights.tensors, self.tensors)
        except torch.OutOfMemoryError:
            return 0.0
        except Exception:  # code may look at what it holds: a mask of zeros and ones, of which others are none
            log.debug("functions do not take other values than they hold", exc_info=True)
            return float("inf")
        return numerics.difference(pytree.tree_unflatten(flat, serve.graph.binding.output), expected)


def _outputs(graph: CompiledGraph, weights: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> Outputs:
    if isinstance(graph, ReusableGraph):
        return graph.compute(weights, tensors)[0]
    return (graph.inner if isinstance(graph, RecordedGraph) else graph)(weights, tensors)
