"""The values that the parts of the serving layer hand to one another. None of them changes once it is made."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.utils._pytree as pytree

from ..cache.keys import LOSSLESS, Variant
from ..capture.call import Call, Signature
from ..capture.target.held_objects import PlacedWeights
from ..capture.target.target import Target
from ..capture.tracing.opaque_function import options_given
from ..capture.tracing.trace_scopes import generators_restored
from ..engines.base import CompiledGraph
from ..messages import Message, first_line, message
from ..runtime.launch_bound import MovingWeights
from ..runtime.recording import Into

Out = Callable[[Any], Into]
"""Returns the caller's tensors that outputs of a graph may be left in, by their numbers, which are in the places of an
output as it is put together. A graph that leaves them there copies each once, and not for the caller to copy again."""
RouteKey = tuple[str, Signature, bool]
"""What a route is for: the target's fingerprint, the call's signature, and whether the run may reuse steps."""


@dataclass(frozen=True, eq=False)
class Invocation:
    """The host's call of a module.

    Attributes:
        module: whose weights ``forward`` uses.
        forward: the host's own code: the fallback, and the reference.
        args: of the call.
        kwargs: likewise.
        method: of the module's, where ``forward`` is a function of ours around it.
        moving: where the weights are, if they may be elsewhere in the next call.
        is_first: the host may have to read the weights from a file for it, which no other call waits for.
        on_image: ``module`` is another object than the host's, which stands for it.
    """

    module: torch.nn.Module
    forward: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    method: Callable[..., Any] | None = None
    moving: MovingWeights | None = None
    is_first: bool = False
    on_image: bool = False

    def eager(self) -> Any:
        """Return what the host's own code gives."""
        return self.forward(*self.args, **self.kwargs)

    def without_data(self) -> Invocation:
        """Return the same call with tensors of one element that only look as large: it keeps no memory of an image."""
        args, kwargs = pytree.tree_map_only(torch.Tensor, _shape_only, (tuple(self.args), dict(self.kwargs)))
        return replace(self, args=args, kwargs=kwargs)


def _shape_only(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


@dataclass(frozen=True, eq=False)
class Request:
    """An invocation that a graph may serve.

    Attributes:
        invocation: what the host called.
        target: its module, as code and weights.
        arguments: by name.
        call: the same, as structure and tensors.
        device: where it computes: that of its largest tensor, for scalars may be elsewhere.
        key: what a route for it is found by.
        is_checked: the module was looked at in this run. Before that no more is known than that each of its attributes
            is the object that it was.
    """

    invocation: Invocation
    target: Target
    arguments: Mapping[str, Any]
    call: Call
    device: torch.device
    key: RouteKey
    is_checked: bool = True

    @property
    def is_assumed(self) -> bool:
        """Return True if its functions are assumed to decide as in the call before.

        What they decide by is on the device, behind kernels that are not done. A graph may be found meanwhile, and run
        only once it is known.
        """
        return self.call.functions is not None and self.call.functions.are_assumed

    @property
    def reusing(self) -> bool:
        """Return True if the run may be served by graphs that can leave deep layers out."""
        return self.key[2]


@dataclass(frozen=True)
class Served:
    """A route: this graph answers.

    Attributes:
        graph_key: of the graph.
        sizes: what its symbols stand for.
        asked: a number of the target and the kind of call, sizes left open, that the route is for.
        variant: what was given up for speed.
        note: what the person should know of it: that it is not what was asked for, and why. Mostly nothing.
    """

    graph_key: str
    sizes: tuple[int, ...]
    asked: int
    variant: Variant = LOSSLESS
    note: str = ""

    @cached_property
    def kind(self) -> tuple[str, tuple[int, ...]]:
        """Return what is timed: a graph at one set of sizes."""
        return self.graph_key, self.sizes

    @cached_property
    def proved_for(self) -> tuple[int, ...]:
        """Return what a compilation of the graph is proved for where a call has no functions.

        Two targets may have one graph and not be the same at these sizes: a trace takes a batch for two or more.
        """
        return *self.sizes, self.asked


@dataclass(frozen=True)
class Refused:
    """A route: no graph can answer, for this reason."""

    reason: str


@dataclass(frozen=True, eq=False)
class Serve:
    """A decision: this graph answers, with the weights that are in place now.

    Attributes:
        proof_key: what a proof is of, the graph's compilation; and for what, the route's numbers and those that
            functions of the call hold.
        stream: what the call shares with the same call in other steps of a run; None where that is not known.
        options: of the call, where the graph calls a function of theirs; else None.
        was_known: the graph was in memory, and nothing had to be looked for.
    """

    request: Request
    route: Served
    graph: CompiledGraph
    weights: PlacedWeights
    proof_key: tuple[str, tuple[int, ...]]
    stream: Hashable = None
    options: Mapping[str, Any] | None = None
    was_known: bool = False

    @contextlib.contextmanager
    def bringing_options(self, watched: bool = False) -> Iterator[None]:
        """Run the graph inside, if it calls a function of the options.

        Args:
            watched: it is not what answers the call, or not alone; see ``undone``.

        Raises:
            ChangedState: see ``undone``.
        """
        options = self.options or {}
        own = {**options} if watched else options  # what functions leave in them, the call that answers leaves once
        with options_given(own), self.undone() if watched else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Put back what functions of the call change, and generators that they draw from: they are called once more.

        Raises:
            ChangedState: they changed something that is no tensor.
        """
        functions = self.request.call.functions
        with generators_restored(), functions.unchanged() if functions is not None else contextlib.nullcontext():
            yield


@dataclass(frozen=True, eq=False)
class Output:
    """An answer: what a graph gave, or eager where the two were compared.

    Attributes:
        value: None or anything else.
        by_graph_alone: no code of the module has run for it, neither to be compared nor to be captured.
    """

    value: Any
    by_graph_alone: bool = False


@dataclass(frozen=True)
class Eager:
    """A decision: the host's own code answers.

    Attributes:
        reason: why, for people.
        expected: nothing is wrong: a graph is on its way, and the log need not say so at every call.
        ran_out: there was too little memory for its graph, beside what is on the device now.
    """

    reason: str
    expected: bool = False
    ran_out: bool = False


def search_failed(error: Exception) -> Message:
    """Return the reason for a call whose graph was not found, because something raised what nobody foresaw."""
    kind, line = type(error).__name__, first_line(error)
    return message("looking for its graph failed ({kind}: {first_line})", kind=kind, first_line=line)
