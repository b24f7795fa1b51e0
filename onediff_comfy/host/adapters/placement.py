"""Serve a model from where its weights are: whole where all of them are on the device, else block by block.

The host may change where they are between two calls, so each call asks.
"""

from __future__ import annotations

import functools
import logging
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import comfy.model_management as memory
import torch
import torch.utils._pytree as pytree

from ...capture.call import NotCovered
from ...messages import message
from ...serving.dispatcher import Dispatcher
from ...serving.verification import numerics
from ..process.host_compiler import calls_blocks_unplanned, unplanned
from ..process.process import library
from ..weights.pinned_module import PinnedModule, can_pin, has_patches
from ..weights.residency import can_bring, is_streamed
from .blocks import BlockServer

log = logging.getLogger(__name__)


class ModelServer:
    """Answers calls of a model's forward.

    Args:
        model: the host's model object (a BaseModel).
        dispatcher: answers calls of a module whose weights are in place.
        in_blocks: also serve it while not all weights fit. Blocks cannot be compiled in another process, for what is
            traced of them is more than a method.
    """

    def __init__(self, model: Any, dispatcher: Dispatcher, in_blocks: bool) -> None:
        self._model, self._dispatcher = weakref.ref(model), dispatcher  # other clones may have another model
        self._blocks = BlockServer(model, dispatcher) if in_blocks else None
        self._pinned: PinnedModule | None = None
        self._not_whole: set[tuple[torch.Size, ...]] = set()
        self._is_wrong = False

    def __call__(
        self, module: torch.nn.Module, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Return what ``forward``, of a diffusion model or an image of it, gives.

        In a run over several GPUs there are other models than ours; another extension's forward is none of the model's.
        """
        model = self._model()
        ours = model is not None and module._modules is model.diffusion_model._modules
        if not (ours and is_streamed(model) and isinstance(forward, types.MethodType) and forward.__self__ is module):
            return self._dispatcher(module, forward, args, kwargs)
        if not library().recordings.turns.ours:
            # What such a thread calls is recorded when it is gone, and then other weights are in these places.
            self._dispatcher.passed_by(
                module, message("its weights move, and a run over several GPUs needs weights that stay on each of them")
            )
            return forward(*args, **kwargs)
        dynamic = bool(getattr(model, "dynamic_vbars", None))
        sizes = tuple(leaf.shape for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        if dynamic and can_pin() and not self._is_wrong and sizes not in self._not_whole:
            answered = self._served_whole(model, forward, args, kwargs, sizes)
            if answered is not None:
                return answered[0]
        if calls_blocks_unplanned(forward):
            self._dispatcher.passed_by(
                module, message("ComfyUI's own compiler is paused around some of its blocks, and would not stay so")
            )
            return forward(*args, **kwargs)
        if self._blocks is None or (dynamic and not can_bring()):
            return self._dispatcher(module, forward, args, kwargs)
        return self._blocks(module, forward, args, kwargs)

    def _served_whole(
        self,
        model: Any,
        forward: types.MethodType,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        sizes: tuple[torch.Size, ...],
    ) -> tuple[Any] | None:
        """Return the output of a call with all weights pinned; None where they do not fit."""
        module = model.diffusion_model
        if self._pinned is None or not self._pinned.is_of(module):
            self._pinned = PinnedModule(module, model.get_dtype_inference())
        # The host's estimate for one call. It is twice what was seen to be taken, and a recording takes it once more.
        room = max((model.memory_required(size) for size in sizes if len(size) > 2), default=0)
        try:
            with self._pinned.in_place(model.device, room) as image:
                if image is None:
                    return None
                on_image = types.MethodType(forward.__func__, image)
                by_host = self._disproved(model, forward, on_image, args, kwargs)
                return by_host or (self._dispatcher(image, on_image, args, kwargs),)
        except NotCovered as refusal:
            self._dispatcher.passed_by(module, refusal.reason)
            return (forward(*args, **kwargs),)
        except memory.InterruptProcessingException:
            raise
        except Exception as error:  # not even eager ran: with all weights pinned, or on an image
            log.warning("OneDiff: not served whole from Dynamic VRAM (%s: %s)", type(error).__name__, error)
            self._not_whole.add(sizes)
            return None

    def _disproved(
        self,
        model: Any,
        forward: types.MethodType,
        on_image: types.MethodType,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> tuple[Any] | None:
        """Return the host's output if its forward computes something else with the image's weights; None if not.

        Graphs are proved on the image. That it has the host's weights, the host alone can show: the same code runs with
        both. It is asked once in a process for a model as it is, and once with a LoRA.
        """
        module = model.diffusion_model
        proved, kind = _proved().setdefault(module, set()), has_patches(module)
        if kind in proved:
            return None
        expected = forward(*_copied(args), **_copied(kwargs))
        with unplanned():
            error = numerics.difference(on_image(*_copied(args), **_copied(kwargs)), expected)
        dtypes = {model.get_dtype_inference(), *(leaf.dtype for leaf in pytree.tree_leaves(expected))}
        allowed = numerics.limit(dtypes, model.device)
        if error <= allowed:
            proved.add(kind)
            return None
        reason = message("its weights in Dynamic VRAM are not what ComfyUI computes with")
        log.warning("OneDiff: %s (off by %.2g, at most %.2g)", reason, error, allowed)
        self._dispatcher.passed_by(module, reason)
        self._is_wrong = True
        return (expected,)


def _copied(arguments: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, torch.clone, arguments)


@functools.cache
def _proved() -> WeakKeyDictionary[torch.nn.Module, set[bool]]:
    """Return for which modules the pages were seen to hold what the host computes with: without, and with a LoRA."""
    return WeakKeyDictionary()
