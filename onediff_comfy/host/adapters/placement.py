"""Serve a model from where its weights are: whole where all of them are on the device, else block by block.

The host may change where they are between two calls, so each call asks.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import comfy.model_management as memory
import torch
import torch.utils._pytree as pytree

from ...capture.call import NotCovered
from ...capture.tracing.trace_scopes import generators_restored
from ...messages import Message, first_line, message
from ...runtime.device_memory import kept_free, memory_errors, wants_memory
from ...serving.decision import Eager, Invocation, Output
from ...serving.dispatcher import Dispatcher
from ..process.host_compiler import calls_blocks_unplanned, unplanned
from ..process.memory_pressure import ReturningWeights, can_limit, kept_by_host
from ..process.process import library
from ..weights.pinned_module import PinnedModule, can_pin
from ..weights.residency import can_bring, is_streamed
from .blocks import BlockServer
from .functional_call import copied, rebuilt
from .part import Arguments, DiffusionModel, Part
from .video_pieces import PinnedParts, VideoDispatcher, is_video
from .weights_check import WeightsCheck

log = logging.getLogger(__name__)

Sizes = tuple[torch.Size, ...]

_RAN_OUT = message("memory ran out while all of its weights were on the card")
_NOT_BROUGHT = message("its weights do not all fit, and this ComfyUI brings them in a way that is not known")

_LOOKED_AT = 4  # calls, of the same sizes. What is kept after the first is a capture's, too.
_MOST_FAILED = 2  # runs in a row; then some are left out, and twice as many each time
_MOST_LEFT_OUT = 64  # runs
_SPARE = 1.25  # times what a call takes, for comfy-aimdo counts whole pages


class _Failed(NamedTuple):
    """Runs in a row in which calls of one size could not be made with all weights pinned.

    Attributes:
        runs: how many.
        last: the number of the last.
        why: in the last, for people.
    """

    runs: int
    last: int
    why: Message


class ModelServers:
    """Answers calls of the forwards of all models that clones of one accelerated MODEL have.

    Mostly that is one. A node that puts a MODEL on another GPU gives a clone that has a model of its own.

    Args:
        dispatcher: answers calls of a module whose weights are in place.
        in_blocks: see ``ModelServer``.
    """

    def __init__(self, dispatcher: Dispatcher, in_blocks: bool) -> None:
        self._dispatcher, self._in_blocks = dispatcher, in_blocks
        self._by_model, self._lock = WeakKeyDictionary[Any, ModelServer](), threading.Lock()

    def add(self, model: Any) -> None:
        """Serve calls of a model, the host's object (a BaseModel), from where its weights are. It may be known."""
        with self._lock:  # in a run over several GPUs a thread calls each model
            if model not in self._by_model:
                self._by_model[model] = ModelServer(DiffusionModel(model), self._dispatcher, self._in_blocks)

    def __call__(
        self, module: torch.nn.Module, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Return what ``forward``, of a diffusion model, gives."""
        with self._lock:
            known = list(self._by_model.items())
        for model, server in known:
            if module is model.diffusion_model:
                return server(module, forward, args, kwargs)
        return self._dispatcher(module, forward, args, kwargs)


class ModelServer:
    """Answers calls of the forward of a part of a model.

    Args:
        part: what is served, in a model of the host's.
        dispatcher: answers calls of a module whose weights are in place.
        in_blocks: also serve it while not all weights fit. Blocks cannot be compiled in another process, for what is
            traced of them is more than a method.

    Attributes:
        dispatcher: as above.
    """

    def __init__(self, part: Part, dispatcher: Dispatcher, in_blocks: bool) -> None:
        self._part, self.dispatcher = part, dispatcher
        self._blocks = BlockServer(part, dispatcher) if in_blocks else None
        self._pinned: PinnedModule | None = None
        self._looked_in: int | None = None  # the run in which its layers were looked at last
        self._failed: dict[Sizes, _Failed] = {}
        self._room, self._returning = _Room(), ReturningWeights()
        self._begun_in: int | None = None  # the run that has been served block by block last
        self._check = WeightsCheck(part, dispatcher, whole=True)

    def preparing(self, exact: bool = False) -> ModelServer:
        """Return one for the same part whose calls wait for graphs; see ``Dispatcher.preparing``."""
        return ModelServer(self._part, self.dispatcher.preparing(exact), self._blocks is not None)

    def __call__(
        self, module: torch.nn.Module, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Return what ``forward``, of the part, gives. Another extension's is none of the model's."""
        model = self._part.model
        if not isinstance(forward, types.MethodType) or forward.__self__ is not module or not is_streamed(model):
            return self.dispatcher(module, self._part.captured(forward), args, kwargs)
        if not library().recordings.turns.ours:
            # What such a thread calls is recorded when it is gone, and then other weights are in these places.
            self.dispatcher.passed_by(
                module, message("its weights move, and a run over several GPUs needs weights that stay on each of them")
            )
            return forward(*args, **kwargs)
        dynamic = bool(getattr(model, "dynamic_vbars", None))
        sizes = tuple(leaf.shape for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        if dynamic and can_pin() and self._may_be_whole(sizes):
            # The first time a graph is compared with the module's own code, which may use up what it is given, as a
            # UNet takes what a ControlNet gave from lists. Where memory runs out then, another call is given these.
            given = rebuilt((args, kwargs))
            outcome = self._served_whole(model, forward, args, kwargs, sizes)
            if isinstance(outcome, Output):
                return outcome.value
            if outcome is not None and not outcome.ran_out:
                return forward(*args, **kwargs)
            if outcome is not None:
                args, kwargs = given
                if not self._has_blocks():
                    return forward(*args, **kwargs)
        if calls_blocks_unplanned(forward):
            self.dispatcher.passed_by(
                module, message("ComfyUI's own compiler is paused around some of its blocks, and would not stay so")
            )
            return forward(*args, **kwargs)
        if self._blocks is not None and (can_bring() or not dynamic):
            with self._returned(model, sizes) if dynamic else contextlib.nullcontext():
                return self._blocks(module, forward, args, kwargs)
        if not dynamic:
            return self.dispatcher(module, self._part.captured(forward), args, kwargs)
        # Not even to be looked at: what the layers note of pages that are gone cannot be read.
        self.dispatcher.passed_by(module, self._why_left_to_host(forward, sizes))
        return forward(*args, **kwargs)

    def _served_whole(
        self,
        model: Any,
        forward: types.MethodType,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        sizes: Sizes,
    ) -> Output | Eager | None:
        """Answer a call over weights that are all pinned; None where they do not fit.

        What no graph answers the host is to run, with nothing pinned: it, and functions in it, may want the memory.
        """
        module = self._part.module
        if self._check.is_wrong(module, forward.__func__):
            return None
        estimate = max((self._part.memory_required(size) for size in sizes if len(size) > 2), default=0)
        room, run, pinned = self._room.needed(sizes, estimate), self.dispatcher.runs, self._pinned
        if pinned is not None and self._looked_in == run and not pinned.fits(model.device, room):
            return None  # a look at a thousand layers takes 3 ms, and would find no more room
        self._returning.lift()
        self._looked_in = run
        with contextlib.ExitStack() as stack:
            try:
                if pinned is None or not pinned.is_of(module):
                    pinned = self._pinned = PinnedModule(module, self._part.compute_dtype)
                image = stack.enter_context(pinned.in_place(model.device, room))
                if image is None:
                    return None
            except NotCovered as refusal:
                self.dispatcher.passed_by(module, refusal.reason)
                return Eager(refusal.reason)
            except memory.InterruptProcessingException:
                raise
            except Exception as error:  # of the host's own functions, asked for all weights at once
                failed = message("ComfyUI could not bring all of its weights ({error})", error=_of(error))
                self._fail(sizes, _of(error), _RAN_OUT if wants_memory(error) else failed)
                return None
            try:
                with memory_errors():
                    outcome = self._answer(module, image, forward, args, kwargs, sizes)
            except torch.OutOfMemoryError as error:
                outcome = Eager(_of(error), ran_out=True)
        self._note(sizes, outcome, model.device)
        return outcome

    def _may_be_whole(self, sizes: Sizes) -> bool:
        failed = self._failed.get(sizes)
        if failed is None:
            return True
        left_out = 0 if failed.runs < _MOST_FAILED else min(1 << failed.runs, _MOST_LEFT_OUT)
        return self.dispatcher.runs - failed.last > left_out

    def _note(self, sizes: Sizes, outcome: Output | Eager, device: torch.device) -> None:
        """Note what came of a call with all weights pinned.

        Where it lacked memory the rest of the run goes without it, and where a second run in a row does, some others.
        """
        failed = self._failed.get(sizes)
        if failed is not None and failed.last == self.dispatcher.runs:  # there was too little to compare its weights
            return
        if isinstance(outcome, Output):
            self._failed.pop(sizes, None)
            self._room.seen(sizes, device)
        elif outcome.ran_out:
            self._fail(sizes, outcome.reason)

    def _fail(self, sizes: Sizes, reason: str, why: Message = _RAN_OUT) -> None:
        """Note that calls of these sizes could not be made in this run with all weights pinned."""
        failed = self._failed.get(sizes)
        runs = 1 if failed is None else failed.runs + 1
        self._failed[sizes] = _Failed(runs, self.dispatcher.runs, why)
        if runs >= _MOST_FAILED:
            log.warning(
                "OneDiff: a model whose weights all fit could not be run with all of them on the card (%s). The next "
                "images of this size are made with a part of them there, or by ComfyUI alone, which can be slower; it "
                "is tried again after some",
                reason,
            )

    def _why_left_to_host(self, forward: types.MethodType, sizes: Sizes) -> Message:
        """Return why no graph can be looked for that answers a call from Dynamic VRAM."""
        if sizes in self._failed:
            return self._failed[sizes].why
        if self._check.is_wrong(self._part.module, forward.__func__):
            return self._check.reason
        return self._part.not_in_blocks if can_bring() else _NOT_BROUGHT

    def _has_blocks(self) -> bool:
        return self._blocks is not None and can_bring()

    @contextlib.contextmanager
    def _returned(self, model: Any, sizes: Sizes) -> Iterator[None]:
        """Have no more weights come back than stay, in a run's first call. What runs inside is a call in blocks."""
        run, vbars = self.dispatcher.runs, list(model.dynamic_vbars.values())
        if len(vbars) != 1 or not can_limit():
            yield
            return
        if run != self._begun_in:
            self._begun_in = run
            self._returning.begin(vbars[0], model.device, sizes[:1])  # of the latent: prompts differ
        yield
        self._returning.note(vbars[0], model.device)

    def _answer(
        self,
        module: torch.nn.Module,
        image: torch.nn.Module,
        forward: types.MethodType,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        sizes: Sizes,
    ) -> Output | Eager:
        """Return what a graph gives over the weights of the module's image, or the host where both were compared."""
        assert self._pinned is not None  # whose image it is
        if isinstance(self.dispatcher, VideoDispatcher) and is_video(args):
            parts = PinnedParts(module, image, self._pinned, self._check)
            return Output(self.dispatcher.in_pieces(module, forward, args, kwargs, parts))
        on_image, changed = types.MethodType(forward.__func__, image), self._pinned.is_changed
        code = forward.__func__
        is_due = self._check.is_due(module, changed, code)
        less = self._part.shown_by(args, kwargs) if is_due else None
        whole = (args, kwargs) if less is not None or not is_due else copied((args, kwargs))
        captured = self._part.captured(on_image)
        is_first = self._pinned.is_first
        outcome = self.dispatcher.attempt(Invocation(image, captured, args, kwargs, is_first=is_first, on_image=True))
        if not isinstance(outcome, Output) or not is_due:
            return outcome
        try:
            with memory_errors():
                shown_by, by_host = self._shown(forward, less, whole)
                with unplanned():
                    ours = self._called(on_image, shown_by)
                    is_right = self._check.agree(module, changed, ours, by_host, code)
        except torch.OutOfMemoryError as error:
            self._fail(sizes, _of(error))
            return outcome
        if is_right:
            return outcome
        return Output(by_host if less is None else forward(*args, **kwargs))

    def _shown(self, forward: types.MethodType, less: Arguments | None, whole: Arguments) -> tuple[Arguments, Any]:
        """Return arguments, and what the host gives of them: less than those of a call, where its code takes less."""
        if less is not None:
            try:
                return less, self._called(forward, less)
            except torch.OutOfMemoryError:
                raise
            except memory.InterruptProcessingException:
                raise
            except Exception:
                log.debug("a smaller call shows nothing", exc_info=True)
        return whole, self._called(forward, whole)

    def _called(self, forward: Callable[..., Any], arguments: Arguments) -> Any:
        """Return what ``forward`` gives of copies, for it may use them up.

        Whoever draws random numbers behind it gets those that he would have got, and so does the next such call.
        """
        with generators_restored():
            args, kwargs = copied(arguments)
            return forward(*args, **kwargs)


class _Room:
    """How much memory a call needs beside the weights, as it was seen of calls of the same sizes."""

    def __init__(self) -> None:
        self._kept: dict[Sizes, list[int]] = {}  # by PyTorch after each of a few calls: at least what it has taken

    def needed(self, sizes: Sizes, estimate: float) -> float:
        """Return the bytes that are to be free.

        Args:
            estimate: the host's, for one call: twice what was seen to be taken.
        """
        kept = self._kept.get(sizes)
        return estimate if kept is None else min(estimate, _SPARE * min(kept) + kept_by_host())

    def seen(self, sizes: Sizes, device: torch.device) -> None:
        """Note a call that was served whole."""
        kept = self._kept.setdefault(sizes, []) if device.type == "cuda" else None
        if kept is not None and len(kept) < _LOOKED_AT:
            kept.append(kept_free(device))


def _of(error: Exception) -> str:
    """Return one line on an error, for people."""
    return f"{type(error).__name__}: {first_line(error)}"
