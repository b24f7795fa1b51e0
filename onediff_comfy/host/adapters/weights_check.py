"""Whether the image of a module has the weights that the host computes with, found out by computing with both.

A graph is proved on an image, so a wrong weight in an image proves itself. The host alone can show that it is right:
the same eager code runs once on the image and once on the module.
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.utils._pytree as pytree

from ...messages import Message, message
from ...serving.dispatcher import Dispatcher
from ...serving.verification import numerics
from ..weights.layer_images import is_changed
from .part import Part

log = logging.getLogger(__name__)

_MOST_KNOWN = 16  # of a module: an extension may have its methods replaced by others and others

Code = Callable[..., Any] | None
"""The function of a method of a module's; None for its class's ``forward``."""


class _Verdict(NamedTuple):
    """What is known of a module's image: whether it computes what the module does.

    Attributes:
        code: that was called. Each method need not use all weights, nor one that an extension has put in its place.
        changed: with a LoRA, or without.
        whole: the image is of a module that is served whole, or of a block.
        is_right: whether it does.
    """

    code: Callable[..., Any]
    changed: bool
    whole: bool
    is_right: bool


class WeightsCheck:
    """Compares what a module's image computes with what the module does.

    That is once in a process for each function that is called of the module, and once more with a LoRA.

    It is due when a graph has answered a call. Code that a graph can stand for leaves nothing behind, and may be run
    two times more.

    Args:
        part: of a model of the host's, in which the modules are.
        dispatcher: told of calls that are left to the host.
        whole: whether it is of images whose weights stay in the host's pages.
    """

    def __init__(self, part: Part, dispatcher: Dispatcher, whole: bool) -> None:
        self._part, self._dispatcher, self._whole = part, dispatcher, whole

    def is_due(self, module: torch.nn.Module, changed: bool, code: Code = None) -> bool:
        """Return True if nothing is known of a module.

        Args:
            changed: whether it computes with other weights than the model file's now; see ``is_changed``.
            code: what is called of it.
        """
        return self._known(module, changed, code) is None

    def is_wrong(self, module: torch.nn.Module, code: Code = None) -> bool:
        """Return True if a module's image was seen to compute something else."""
        some_wrong = not all(verdict.is_right for verdict in _verdicts().get(module, ()))
        return some_wrong and self._known(module, is_changed(module), code) is False

    def agree(self, module: torch.nn.Module, changed: bool, on_image: Any, by_host: Any, code: Code = None) -> bool:
        """Return True if what both computed is the same but for rounding. It is remembered; the rest as before."""
        error = numerics.difference(on_image, by_host)
        tensors = (leaf for leaf in pytree.tree_leaves(by_host) if isinstance(leaf, torch.Tensor))
        allowed = numerics.limit({self._part.compute_dtype, *(leaf.dtype for leaf in tensors)}, self._part.device)
        is_right = error <= allowed
        known = _verdicts().setdefault(module, deque(maxlen=_MOST_KNOWN))
        known.append(_Verdict(code or type(module).forward, changed, self._whole, is_right))
        if not is_right:
            log.warning("OneDiff: %s (off by %.2g, at most %.2g)", self.reason, error, allowed)
            self._dispatcher.passed_by(module, self.reason)
        return is_right

    def _known(self, module: torch.nn.Module, changed: bool, code: Code) -> bool | None:
        meant = code or type(module).forward
        for verdict in _verdicts().get(module, ()):
            if verdict.code is meant and verdict.changed == changed and verdict.whole == self._whole:
                return verdict.is_right
        return None

    @property
    def reason(self) -> Message:
        return message("its weights as they are brought are not what ComfyUI computes with")


@functools.cache
def _verdicts() -> WeakKeyDictionary[torch.nn.Module, deque[_Verdict]]:
    """Return what is known of each module."""
    return WeakKeyDictionary()
