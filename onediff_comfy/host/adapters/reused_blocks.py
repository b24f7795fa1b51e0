"""Reuse what deep blocks computed in an earlier step, where a model is served block by block.

Then there is no graph of the whole model that ``capture/rewrites/step_cache_split.py`` could cut in two. But the
model's forward runs as the host wrote it, and each block that it calls is ours to answer, or to leave out
(``block_order.py``). The weights of one that is left out are not brought to the device either.

Which blocks a forward calls, and in which order, is seen in one call and expected of the next. What the forward does
with what they hand on, nobody says. So before anything is reused the brief form is run once on a call whose output is
known: given what that call found, it must give that output.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol

import comfy.model_management as memory
import torch
import torch.utils._pytree as pytree

from ...capture.call import NotCovered, bind
from ...capture.tracing.trace_scopes import generators_restored
from ...messages import Message, message
from ...runtime.step_cache import Features, StepCache
from ...serving.verification import numerics
from ..process.host_compiler import tracing
from ..process.services import OPTIONS, prompts_of
from ..weights.layer_images import Look
from .block_order import BriefForward, Order, WholeForward
from .functional_call import copied, rebuilt
from .module_image import is_plain
from .module_proxy import Serve

log = logging.getLogger(__name__)

_PREFETCH = "prefetch_dynamic_vbars"
"""An option: the host brings a block's weights while the one before is computed."""
_PROMPTS = "uuids"
"""The option that says which prompts a call is for: others in each run."""
_MOST_KINDS = 64
_MOST_KEPT = 1 / 8
"""Of the device's memory: of a long video more weights had to make way for it in each step that is computed."""
_OURS = ("wrappers", "callbacks")
"""Options whose functions are called around a forward, and not in it."""


class RunForward(Protocol):
    """Runs a model's forward."""

    def __call__(self, serve: Serve, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return its output, of a call in which ``serve`` answers the blocks."""


class ReusedBlocks:
    """Answers calls of a model's forward, and leaves deep blocks out where a step cache wants it.

    Args:
        module: whose forward it is. What is left out are blocks in its own lists, and none further down.
        serve: computes a block.
    """

    def __init__(self, module: torch.nn.Module, serve: Serve) -> None:
        lists = ((name, child) for name, child in module._modules.items() if isinstance(child, torch.nn.ModuleList))
        self._list_of = {block: name for name, blocks in lists for block in blocks}
        self._module, self._serve = module, serve
        self._orders: dict[Hashable, Order] = {}  # by kind of call
        self._run: StepCache | None = None  # the last, and why nothing is reused in it; None where something may be
        self._refusals: dict[Order, Message | None] = {}

    def answer(
        self, step_cache: StepCache, run: RunForward, forward: types.MethodType, args: Sequence[Any], kwargs: Any
    ) -> Any:
        """Return what ``forward`` gives for these arguments."""
        if self._run is not step_cache:  # extensions may have changed the model's code since
            self._run, self._refusals = step_cache, {}
        try:
            call = _ForwardCall(forward, args, kwargs)
        except NotCovered as refusal:
            step_cache.cannot_reuse(refusal.reason)
            return run(self._serve, args, kwargs)
        order = self._orders.get(call.kind)
        prompts, reason = prompts_of(call.options), self._why_not(call, order)
        if prompts is None or reason is not None:
            step_cache.cannot_reuse(reason or message("a call does not say which prompt it is for"))
            return run(self._serve, args, kwargs)
        stream = call.kind, prompts, order  # what was found in another order is of no use
        features = step_cache.features(stream) if step_cache.reuses(stream) else None
        if order is not None and features is not None:
            brief = BriefForward(order, features, self._serve)
            try:
                with tracing():
                    output = run(brief, (), call.in_brief())
                brief.end()
            except NotCovered as refusal:
                step_cache.refuse(refusal.reason)
            else:
                step_cache.took(stream, brief.early)
                return output
        return self._computed(step_cache, run, call, stream)

    def _computed(
        self,
        step_cache: StepCache,
        run: RunForward,
        call: _ForwardCall,
        stream: tuple[Hashable, Hashable, Order | None],
    ) -> Any:
        """Return what a forward gives that computes everything, and note what it found."""
        *_, order = stream
        unseen = order is not None and order not in self._refusals and step_cache.refusal is None
        look, again = (Look(tuple(self._module.modules())), call.once_more()) if unseen else (None, None)
        whole = WholeForward(order, self._serve, self._list_of)
        output = run(whole, call.args, call.kwargs)
        features = whole.features()
        if order is None or features is None:
            if len(self._orders) >= _MOST_KINDS:  # an option may have another value in each step
                self._orders.clear()
            self._orders[call.kind] = Order.of(whole.calls)
            return output
        if look is not None and again is not None:
            self._refusals[order] = self._tried(order, features, look, lambda brief: run(brief, (), again), output)
        if self._refusals.get(order, "") is None:
            step_cache.found(stream, features)
            if step_cache.nbytes > _MOST_KEPT * memory.get_total_memory(features.early.device):
                step_cache.refuse(message("what is kept to reuse steps would take too much of the memory"))
        return output

    def _tried(
        self, order: Order, features: Features, look: Look, run_again: Callable[[Serve], Any], expected: Any
    ) -> Message | None:
        """Run the brief form of a call once. Return why nothing is to be reused; None if something may be.

        Args:
            features: what the call has found.
            look: what the model looked like before the call.
            run_again: runs the forward with the call's arguments.
            expected: what the call gave.
        """
        if not look.holds():  # it may count its calls, and one more would be wrong
            return message("the model's forward changes what it keeps")
        brief = BriefForward(order, features, self._serve)
        try:
            with tracing(), generators_restored():
                found = run_again(brief)
                brief.end()
        except memory.InterruptProcessingException:
            raise
        except Exception as error:  # a forward that is handed what its blocks never give
            log.debug("the brief form of a forward failed: %r", error)
            found = None
        dtypes = {leaf.dtype for leaf in pytree.tree_leaves(expected) if isinstance(leaf, torch.Tensor)}
        allowed = numerics.limit({*dtypes, features.early.dtype}, features.early.device)
        if numerics.difference(found, expected) <= allowed:
            return None
        return message("the model needs what each of its blocks gives")

    def _why_not(self, call: _ForwardCall, order: Order | None) -> Message | None:
        """Return why calls in this order cannot reuse anything; None if they may."""
        if order is not None and order.first is None:
            return message("this model has no blocks that could be left out")
        if order is not None and (refusal := self._refusals.get(order)) is not None:
            return refusal
        if call.has_objects or any(map(_has_hooks, self._module.modules())):
            # They may count their calls, and one more than the host's would be wrong.
            return message("functions of other nodes take part, and not all of the model is on the device at once")
        return None


def _has_hooks(layer: torch.nn.Module) -> bool:
    return bool(layer._forward_hooks or layer._forward_pre_hooks)


class _ForwardCall:
    """A call of a model's forward.

    Attributes:
        args: as given.
        kwargs: likewise.
        options: the host's, of the call.
        kind: what it has in common with others that call their blocks in the same order, and need the same of them.

    Raises:
        NotCovered: the forward takes arguments that have no names.
    """

    def __init__(self, forward: types.MethodType, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs
        self._named = bind(forward, args, kwargs)
        self.options: Mapping[str, Any] = self._named.get(OPTIONS) or {}
        said = {name: value for name, value in self.options.items() if name not in (*_OURS, _PROMPTS)}
        self._said = [leaf for leaf in pytree.tree_leaves(said) if not isinstance(leaf, torch.Tensor)]
        leaves, spec = pytree.tree_flatten({name: value for name, value in self._named.items() if name != OPTIONS})
        self.kind: Hashable = (forward.__func__, str(spec), tuple(map(_described, (*leaves, *self._said))))

    @property
    def has_objects(self) -> bool:
        """Return True if the forward may call a function of another extension's, or write to an object of its."""
        return not all(is_plain(leaf) or isinstance(leaf, type) for leaf in self._said)

    def in_brief(self) -> dict[str, Any]:
        """Return the arguments of a brief forward, by name: containers of its own, for a forward may take from them.

        No weights are brought that nobody computes with.
        """
        others = {name: rebuilt(value) for name, value in self._named.items() if name != OPTIONS}
        return {**others, OPTIONS: {**self.options, **self._ahead}} if OPTIONS in self._named else others

    def once_more(self) -> dict[str, Any]:
        """Return the arguments of a brief forward that is run besides, by name: what it writes to is nobody's."""
        others = {name: copied(value) for name, value in self._named.items() if name != OPTIONS}
        own = {name: value if name in _OURS else copied(value) for name, value in self.options.items()}
        return {**others, OPTIONS: {**own, **self._ahead}} if OPTIONS in self._named else others

    @property
    def _ahead(self) -> dict[str, Any]:
        return {_PREFETCH: False} if _PREFETCH in self.options else {}


def _described(leaf: Any) -> Hashable:
    """Return what calls of one kind have in common of an argument."""
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.device
    return type(leaf), repr(leaf) if is_plain(leaf) else ""
