"""Whether the image of a module has the weights that the host computes with, found out by computing with both.

A graph is proved on an image, so a wrong weight in an image proves itself. The host alone can show that it is right:
the same eager code runs once on the image and once on the module.
"""

from __future__ import annotations

import functools
import logging
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.utils._pytree as pytree

from ...messages import Message, message
from ...serving.dispatcher import Dispatcher
from ...serving.verification import numerics
from ..weights.layer_images import is_changed
from .part import Part

log = logging.getLogger(__name__)

_FORWARD = "forward"

Kind = tuple[str, bool, bool]
"""By which method; with a LoRA or without; in whose image: of a module that is served whole, or of a block."""


class WeightsCheck:
    """Compares what a module's image computes with what the module does.

    That is once in a process for each method of the module's, and once more with a LoRA.

    It is due when a graph has answered a call. Code that a graph can stand for leaves nothing behind, and may be run
    two times more.

    Args:
        part: of a model of the host's, in which the modules are.
        dispatcher: told of calls that are left to the host.
        whole: whether it is of images whose weights stay in the host's pages.
    """

    def __init__(self, part: Part, dispatcher: Dispatcher, whole: bool) -> None:
        self._part, self._dispatcher, self._whole = part, dispatcher, whole

    def is_due(self, module: torch.nn.Module, changed: bool, method: str = _FORWARD) -> bool:
        """Return True if nothing is known of a module.

        Args:
            changed: whether it computes with other weights than the model file's now; see ``is_changed``.
            method: the name of what is called of it. Each of them need not use all weights.
        """
        return (method, changed, self._whole) not in _verdicts().get(module, {})

    def is_wrong(self, module: torch.nn.Module, method: str = _FORWARD) -> bool:
        """Return True if a module's image was seen to compute something else."""
        known = _verdicts().get(module, {})
        return False in known.values() and known.get((method, is_changed(module), self._whole)) is False

    def agree(
        self, module: torch.nn.Module, changed: bool, on_image: Any, by_host: Any, method: str = _FORWARD
    ) -> bool:
        """Return True if what both computed is the same but for rounding. It is remembered; the rest as before."""
        error = numerics.difference(on_image, by_host)
        tensors = (leaf for leaf in pytree.tree_leaves(by_host) if isinstance(leaf, torch.Tensor))
        allowed = numerics.limit({self._part.compute_dtype, *(leaf.dtype for leaf in tensors)}, self._part.device)
        is_right = _verdicts().setdefault(module, {})[method, changed, self._whole] = error <= allowed
        if not is_right:
            log.warning("OneDiff: %s (off by %.2g, at most %.2g)", self.reason, error, allowed)
            self._dispatcher.passed_by(module, self.reason)
        return is_right

    @property
    def reason(self) -> Message:
        return message("its weights as they are brought are not what ComfyUI computes with")


@functools.cache
def _verdicts() -> WeakKeyDictionary[torch.nn.Module, dict[Kind, bool]]:
    """Return what is known of each module."""
    return WeakKeyDictionary()
