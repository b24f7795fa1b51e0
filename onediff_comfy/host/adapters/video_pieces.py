"""Serve a video VAE piece by piece, as the host decodes and encodes.

A video VAE takes a few frames at a time. Its decoder keeps what the next piece needs of this one, in a list that it is
called with. A capture of the whole would write every piece out. So the host's loop runs as it is, on an image of the
VAE's module whose parts are proxies; and pieces that are like one another share a graph, which takes what is in the
list and gives what is to be in it.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.utils._pytree as pytree

from ...capture.call import NotCovered
from ...messages import message
from ...serving.decision import Eager, Output
from .functional_call import FunctionalCall
from .module_image import ModuleImage
from .module_proxy import ModuleProxy

Structure = tuple[str, tuple[object, ...]]
"""What a call looks like: how its arguments hold one another, and each tensor's form and each other value."""


class Server(Protocol):
    """What a dispatcher is here."""

    def attempt(
        self, module: torch.nn.Module, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Output | Eager: ...

    def passed_by(self, module: torch.nn.Module, reason: str, expected: bool = False) -> None: ...


class PieceServer:
    """Answers calls of a VAE's module for videos.

    A piece is served that looks like the one before it, in this video or an earlier one. A video's first pieces do not:
    there is nothing yet in the list. Nor do an encoder's, which take turns in what they leave. A graph for each of
    these would take as long to compile, and answer one call in a video.

    Args:
        server: answers calls of the parts.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._image: ModuleImage | None = None
        self._parts: dict[str, torch.nn.Module] = {}
        self._last: Structure | None = None
        self._repeating: set[Structure] = set()  # of all videos so far

    def __call__(
        self, module: torch.nn.Module, forward: types.MethodType, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Return ``forward(*args, **kwargs)``, a method of the module's, in which graphs have answered pieces."""
        with self._image_of(module).current() as image:
            return forward.__func__(image, *args, **kwargs)

    def _image_of(self, module: torch.nn.Module) -> ModuleImage:
        """Return the image of a module whose children with weights are proxies; the same while they are the same."""
        parts = {
            name: child
            for name, child in module._modules.items()
            if child is not None and next(child.parameters(), None) is not None
        }
        same = self._parts.keys() == parts.keys() and all(self._parts[name] is part for name, part in parts.items())
        if self._image is None or self._image.module is not module or not same:
            proxies = {
                name: ModuleProxy(part, functools.partial(self._serve_part, name), ("forward",))
                for name, part in parts.items()
            }
            self._image = ModuleImage(module, instead={"_modules": {**module._modules, **proxies}})
            self._parts = parts
        return self._image

    def _serve_part(
        self,
        name: str,
        part: torch.nn.Module,
        forward: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        try:
            call = FunctionalCall(forward, args, kwargs)
        except NotCovered as refusal:
            self._server.passed_by(part, refusal.reason)
            return forward(*args, **kwargs)
        if not any(call.lists):  # nothing is handed on, so this is no piece
            return forward(*args, **kwargs)
        if not self._repeats(_structure(name, call.arguments)):
            reason = message(
                "the first pieces of a video are ComfyUI's own; graphs serve those that are like one another"
            )
            self._server.passed_by(part, reason, expected=True)
            return forward(*args, **kwargs)
        outcome = self._server.attempt(part, call.telling(forward), (), call.arguments)
        if isinstance(outcome, Output):
            try:
                return call.completed(outcome.value)
            except NotCovered as refusal:
                self._server.passed_by(part, refusal.reason)
        return forward(*args, **kwargs)

    def _repeats(self, structure: Structure) -> bool:
        """Return True if pieces with this structure follow one another. Ask once for each piece."""
        if structure == self._last:
            self._repeating.add(structure)
        self._last = structure
        return structure in self._repeating


def _structure(name: str, arguments: Mapping[str, Any]) -> Structure:
    leaves, holders = pytree.tree_flatten(arguments)
    return f"{name} {holders}", tuple(map(_looks, leaves))


def _looks(leaf: object) -> object:
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.dtype, leaf.device
    return type(leaf), leaf if type(leaf) in (bool, int, float, str) else id(leaf)
