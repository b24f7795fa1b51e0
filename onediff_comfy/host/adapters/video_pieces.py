"""Serve a video VAE piece by piece, as the host decodes and encodes.

A video VAE takes a few frames at a time. Its decoder keeps what the next piece needs of this one, in a list that it is
called with. A capture of the whole would write every piece out. So the host's loop runs as it is, on an image of the
VAE's module whose parts are proxies; and pieces that are like one another share a graph, which takes what is in the
list and gives what is to be in it.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from ...capture.call import NotCovered
from ...messages import message
from ...serving.decision import Invocation, Output
from ...serving.dispatcher import Dispatcher
from .functional_call import FunctionalCall
from .skeleton import Skeleton

Structure = tuple[int, str, tuple[object, ...]]
"""What a call looks like: of which part it is, how its arguments hold one another, and each tensor's form and each
other value."""


class PieceServer:
    """Answers calls of a VAE's module for videos.

    A piece is served that looks like the one before it, in this video or an earlier one. A video's first pieces do not:
    there is nothing yet in the list. Nor do an encoder's, which take turns in what they leave. A graph for each of
    these would take as long to compile, and answer one call in a video.

    Args:
        dispatcher: answers calls of the parts.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._skeleton: Skeleton | None = None
        self._last: Structure | None = None
        self._repeating: set[Structure] = set()  # of all videos so far

    def __call__(
        self, module: torch.nn.Module, forward: types.MethodType, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Return ``forward(*args, **kwargs)``, a method of the module's, in which graphs have answered pieces."""
        if self._skeleton is None or not self._skeleton.is_of(module):
            self._skeleton = Skeleton(module, lambda parent, _child: parent is module, parts_as_images=True)
            self._last, self._repeating = None, set()  # an address is an image's only as long as the image is there
        with self._skeleton.current(self._serve_part) as image:
            return forward.__func__(image, *args, **kwargs)

    def _serve_part(
        self,
        image: torch.nn.Module,
        forward: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        answer = self._from_graph(image, forward, args, kwargs)
        return forward(*args, **kwargs) if answer is None else answer.value

    def _from_graph(
        self, image: torch.nn.Module, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Output | None:
        """Return what a graph gives for a piece; None where the host has to make it, or where a call is no piece."""
        try:
            call = FunctionalCall(forward, args, kwargs)
            if not any(call.lists):  # nothing is handed on
                return None
            if not self._repeats(_structure(image, call.arguments)):
                reason = message(
                    "the first pieces of a video are ComfyUI's own; graphs serve those that are like one another"
                )
                self._dispatcher.passed_by(image, reason, expected=True)
                return None
            invocation = Invocation(image, call.telling(forward), (), call.arguments, forward)
            outcome = self._dispatcher.attempt(invocation)
            return Output(call.completed(outcome.value)) if isinstance(outcome, Output) else None
        except NotCovered as refusal:
            self._dispatcher.passed_by(image, refusal.reason)
            return None

    def _repeats(self, structure: Structure) -> bool:
        """Return True if pieces with this structure follow one another. Ask once for each piece."""
        if structure == self._last:
            self._repeating.add(structure)
        self._last = structure
        return structure in self._repeating


def _structure(image: torch.nn.Module, arguments: Mapping[str, Any]) -> Structure:
    leaves, holders = pytree.tree_flatten(arguments)
    return id(image), str(holders), tuple(map(_looks, leaves))


def _looks(leaf: object) -> object:
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.dtype, leaf.device
    return type(leaf), leaf if type(leaf) in (bool, int, float, str) else id(leaf)
