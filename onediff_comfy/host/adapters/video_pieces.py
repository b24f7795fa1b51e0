"""Serve a video VAE piece by piece, as the host decodes and encodes.

A video VAE takes a few frames at a time. Its decoder keeps what the next piece needs of this one, in a list that it is
called with. A capture of the whole would write every piece out. So the host's loop runs as it is, on an image of the
VAE's module whose parts are proxies; and pieces that are like one another share a graph, which takes what is in the
list and gives what is to be in it.

In Dynamic VRAM graphs take the weights from an image of the module while all are pinned. The host's code never runs on
that image but to be traced and compared: hooks, and what a forward leaves on the module, are the module's own.
"""

from __future__ import annotations

import functools
import inspect
import logging
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import comfy
import torch
import torch.utils._pytree as pytree

from ...capture.call import NotCovered
from ...capture.fingerprint.code_ownership import CodeOwnership, HostCode
from ...capture.tracing.trace_scopes import generators_restored
from ...messages import Message, message
from ...runtime.device_memory import memory_errors
from ...serving.decision import Invocation, Output
from ...serving.dispatcher import Dispatcher
from ..process.host_compiler import unplanned
from ..weights.pinned_module import PinnedModule
from .functional_call import FunctionalCall, Told
from .skeleton import Skeleton
from .weights_check import WeightsCheck

log = logging.getLogger(__name__)

_HOST = CodeOwnership(HostCode(comfy.__name__), frozenset())

Structure = tuple[int, str, tuple[object, ...]]
"""What a call looks like: of which part it is, how its arguments hold one another, and each tensor's form and each
other value."""


class PinnedParts:
    """The parts of a module in Dynamic VRAM, as an image of it shows them while all weights are pinned.

    Args:
        module: the host's.
        image: of it, shown by ``pinned``.
        pinned: what shows it.
        check: whether an image has the weights that the host computes with.
    """

    def __init__(
        self, module: torch.nn.Module, image: torch.nn.Module, pinned: PinnedModule, check: WeightsCheck
    ) -> None:
        self._images = {part: image._modules[name] for name, part in module.named_children()}
        self._pinned, self._check = pinned, check
        self._is_short = False  # of memory to compare a part's weights

    def forward_of(self, part: torch.nn.Module, forward: Callable[..., Any]) -> types.MethodType:
        """Return ``forward``, a method of a part's, as a method of the part's image.

        Raises:
            NotCovered: the image does not compute what the part does.
        """
        image = self._images.get(part)
        if image is None or not isinstance(forward, types.MethodType) or forward.__self__ is not part:
            raise NotCovered(_replaced())
        if self._check.is_wrong(part):
            raise NotCovered(self._check.reason)
        if self._is_short:
            raise NotCovered(message("there is too little memory to compare it with ComfyUI's own"))
        if not self._pinned.is_as_shown():
            raise NotCovered(message("functions of other nodes change the VAE while it makes a video"))
        return types.MethodType(forward.__func__, image)

    def checked(
        self, part: torch.nn.Module, call: FunctionalCall, forward: Callable[..., Any], on_image: types.MethodType
    ) -> bool:
        """Return True if a part's image computes what the part does, by this call the first time.

        A graph has answered it, so the code leaves nothing behind.
        """
        changed = self._pinned.is_changed
        if not self._check.is_due(part, changed):
            return True
        try:
            with memory_errors(), unplanned():
                ours, by_host = (_trial(call, each) for each in (on_image, forward))
                return self._check.agree(part, changed, ours, by_host)
        except torch.OutOfMemoryError:
            log.debug("a video's piece could not be compared", exc_info=True)
        self._is_short = True
        return False


def _trial(call: FunctionalCall, forward: Callable[..., Any]) -> Told:
    with generators_restored():
        return call.telling(forward)(**call.arguments)


def _replaced() -> Message:
    """Return why a video is the host's where a method is not the module's own."""
    return message("another extension has replaced how this VAE decodes or encodes videos")


def _is_own(forward: Callable[..., Any], module: torch.nn.Module) -> TypeGuard[types.MethodType]:
    """Return True if this is a method of a module, and of its class."""
    if not isinstance(forward, types.MethodType) or forward.__self__ is not module:
        return False
    return inspect.getattr_static(type(module), forward.__name__, None) is forward.__func__


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
        self,
        module: torch.nn.Module,
        forward: types.MethodType,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        pinned: PinnedParts | None,
    ) -> Any:
        """Return ``forward(*args, **kwargs)``, a method of the module's, in which graphs have answered pieces.

        Args:
            pinned: its parts where it is in Dynamic VRAM.
        """
        if self._skeleton is None or not self._skeleton.is_of(module):
            self._skeleton = Skeleton(module, lambda parent, _child: parent is module)
            self._last, self._repeating = None, set()  # an address is a part's only as long as the part is there
        with self._skeleton.current(functools.partial(self._serve_part, pinned)) as image:
            return forward.__func__(image, *args, **kwargs)

    def _serve_part(
        self,
        pinned: PinnedParts | None,
        part: torch.nn.Module,
        forward: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        answer = self._from_graph(pinned, part, forward, args, kwargs)
        return forward(*args, **kwargs) if answer is None else answer.value

    def _from_graph(
        self,
        pinned: PinnedParts | None,
        part: torch.nn.Module,
        forward: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Output | None:
        """Return what a graph gives for a piece; None where the host has to make it, or where a call is no piece."""
        try:
            call = FunctionalCall(forward, args, kwargs)
            if not any(call.lists):  # nothing is handed on
                return None
            if not self._repeats(_structure(part, call.arguments)):
                reason = message(
                    "the first pieces of a video are ComfyUI's own; graphs serve those that are like one another"
                )
                self._dispatcher.passed_by(part, reason, expected=True)
                return None
            on_image: Any = forward if pinned is None else pinned.forward_of(part, forward)
            image = part if pinned is None else on_image.__self__
            invocation = Invocation(
                image, call.telling(on_image), (), call.arguments, on_image, on_image=pinned is not None
            )
            outcome = self._dispatcher.attempt(invocation)
            if not isinstance(outcome, Output):
                return None
            if pinned is not None and not pinned.checked(part, call, forward, on_image):
                return None
            return Output(call.completed(outcome.value))
        except NotCovered as refusal:
            self._dispatcher.passed_by(part, refusal.reason)
            return None

    def _repeats(self, structure: Structure) -> bool:
        """Return True if pieces with this structure follow one another. Ask once for each piece."""
        if structure == self._last:
            self._repeating.add(structure)
        self._last = structure
        return structure in self._repeating


def _structure(part: torch.nn.Module, arguments: Mapping[str, Any]) -> Structure:
    leaves, holders = pytree.tree_flatten(arguments)
    return id(part), str(holders), tuple(map(_looks, leaves))


def _looks(leaf: object) -> object:
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.dtype, leaf.device
    return type(leaf), leaf if type(leaf) in (bool, int, float, str) else id(leaf)


class VideoDispatcher(Dispatcher):
    """A dispatcher that answers the pieces of a video, and not videos.

    Video VAEs work through the frames in pieces and hand caches from one to the next. A capture would write that
    out piece by piece: minutes of compiling for each number of frames.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pieces = PieceServer(self)

    def preparing(self, exact: bool = False) -> Dispatcher:
        view = super().preparing(exact)
        assert isinstance(view, VideoDispatcher)  # a copy of this one
        view._pieces = PieceServer(view)
        return view

    def __call__(
        self, module: torch.nn.Module, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if is_video(args):
            return self.in_pieces(module, forward, args, kwargs)
        return super().__call__(module, forward, args, kwargs)

    def in_pieces(
        self,
        module: torch.nn.Module,
        forward: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        pinned: PinnedParts | None = None,
    ) -> Any:
        """Return what ``forward`` gives of a video: the host runs it, and graphs answer pieces where they can.

        Args:
            pinned: the module's parts where it is in Dynamic VRAM.
        """
        if not _is_own(forward, module):
            self.passed_by(module, _replaced())
            return forward(*args, **kwargs)
        if _HOST.has_methods_of_others(type(module)):  # which may ask what they run on, and that would be an image
            reason = message("this VAE has code that is not ComfyUI's, so its videos are made by that code alone")
            self.passed_by(module, reason)
            return forward(*args, **kwargs)
        before = self.run.report.calls
        output = self._pieces(module, forward, args, kwargs, pinned)
        if self.run.report.calls == before:
            reason = message("ComfyUI itself decodes and encodes this VAE's videos; graphs serve its single images")
            self.passed_by(module, reason)
        return output


_VIDEO_AXES = 5  # batch, channels, frames, height, width


def is_video(args: Sequence[Any]) -> bool:
    """Return True if a VAE's method is called with more than one frame."""
    data = args[0] if args else None
    return isinstance(data, torch.Tensor) and data.ndim >= _VIDEO_AXES and data.shape[2] > 1
