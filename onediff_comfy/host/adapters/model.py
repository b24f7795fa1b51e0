"""Attach a dispatcher to a clone of a ComfyUI MODEL.

The clone gets four wrappers under our key, through the host's own patcher API: one around each
sampling run, one around the sampler in it, one around the diffusion model's forward, and one around what calls the
diffusion model, for families whose forward asks for no wrappers. With a step cache there is a fifth, around each
prediction that a sampler asks for. The MODEL that came in is not touched, and without the node nothing of ours is left
on it.
"""

from __future__ import annotations

import copy
import logging
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from comfy.patcher_extension import WrapperExecutor, WrappersMP

from ...buckets import BucketSet
from ...capture.call import Signature
from ...capture.shape_range import batch_tensor
from ...messages import Message, message
from ...runtime.step_cache import StepCache
from ...serving.dispatcher import Dispatcher
from ...serving.options import Options, no_sizes
from ..preparation.latents import latent_ratio
from ..process.process import NodeOrigin, accelerated, set_budget
from ..report.owners import owners_of
from ..report.status import status_of
from ..report.unused import say_if_unused
from ..weights.dynamic_vram import needs_resident_form, resident_clone, resident_on_other_gpus
from .adapter import Adapter, module_at
from .attach import KEY, dispatcher_for, pass_through, release_on_detach, unfit
from .conditioning import keep_on_device
from .module_proxy import ModuleProxy
from .placement import ModelServer

log = logging.getLogger(__name__)

# Of the first image in background mode: as long as a fast GPU needs for one.
_COMPILE_DELAY_S = 2.0
_STEP_CACHE = f"{KEY}_step_cache"
_AROUND_SAMPLER = getattr(WrappersMP, "SAMPLER_SAMPLE", "sampler_sample")  # a host without it only keeps prompts itself


def accelerate(
    model: Any,
    engine: str,
    node_id: str | None = None,
    compile: str = "wait",
    buckets: BucketSet | None = None,
    precision: str = "lossless",
    budget_mb: int | None = None,
) -> Any:
    """Return a clone of ``model`` whose diffusion model is served by compiled graphs.

    Args:
        model: a ComfyUI MODEL (a ModelPatcher).
        engine: one of ``settings.ENGINE_NAMES``.
        node_id: the node that shows what is going on.
        compile: one of ``settings.COMPILE_CHOICES``.
        buckets: sizes that get graphs of their own.
        precision: one of ``settings.PRECISIONS``.
        budget_mb: megabytes that all graphs together may hold from now on; 0 for a share of the device's memory, None
            for as many as before.

    Returns:
        The accelerated clone; or, where nothing can be captured, ``model`` itself, after a warning
        that says why. A workflow never fails because it could not be made faster.
    """
    if budget_mb is not None:
        set_budget(budget_mb)
    if not _modules(model):
        reason = unfit("model", model, message("a model with a diffusion model in it"))
        return pass_through(model, reason, node_id, name="the model")
    specialize = no_sizes if buckets is None else _sizes_of(buckets, latent_ratio(model))
    options = Options(precision, specialize, compile, compile_delay_s=_COMPILE_DELAY_S)
    dispatcher = dispatcher_for("MODEL", engine, node_id, options)
    accelerated()[dispatcher] = NodeOrigin("MODEL", node_id, latent_ratio(model))
    resident = resident_clone(model, "MODEL") if needs_resident_form(model) else None
    clone = model.clone() if resident is None else resident
    _serve_by(clone, dispatcher, in_blocks=compile != "background")
    release_on_detach(clone)
    say_if_unused(dispatcher, node_id)
    return clone


def preparing(model: Any, exact: bool = False) -> Any:
    """Return a clone of an accelerated MODEL whose calls wait for their graphs, whatever was chosen on the node.

    Args:
        model: what ``accelerate`` gave, or a clone of it. A MODEL that is not accelerated comes back as it is.
        exact: wait for the graph of one size too, if the size is in the node's buckets.
    """
    dispatcher = find_dispatcher(model)
    if dispatcher is None:
        return model
    clone = model.clone()
    _serve_by(clone, dispatcher.preparing(exact), in_blocks=True)
    return clone


_modules = module_at("model", "diffusion_model")


def _serve_by(clone: Any, dispatcher: Dispatcher, in_blocks: bool) -> None:
    """Have ``dispatcher`` serve the calls of a MODEL of our own, in place of what may serve them already.

    Args:
        in_blocks: see ``ModelServer``.
    """
    around_forward = ForwardWrapper(dispatcher, ModelServer(clone.model, dispatcher, in_blocks))
    wrappers = {
        WrappersMP.DIFFUSION_MODEL: around_forward,
        WrappersMP.APPLY_MODEL: _ApplyWrapper(around_forward),
        WrappersMP.OUTER_SAMPLE: _RunWrapper(dispatcher),
        _AROUND_SAMPLER: keep_on_device,
    }
    for place, wrapper in wrappers.items():
        clone.remove_wrappers_with_key(place, KEY)
        clone.add_wrapper_with_key(place, KEY, wrapper)


@dataclass(frozen=True)
class _StepCacheRequest:
    """A wish on a patcher: its runs are to reuse what deep layers computed."""

    threshold: float
    node_id: str | None


def with_step_cache(model: Any, threshold: float, node_id: str | None = None) -> Any:
    """Return a clone of an accelerated MODEL whose runs reuse what deep layers computed in an earlier step.

    Args:
        model: what ``accelerate`` gave, or a clone of it.
        threshold: see ``StepCache``; at 0 every step is computed.
        node_id: the node that shows how many calls were reused.

    Returns:
        The clone; or, where ``model`` is not accelerated, itself, after a warning that says so.
    """
    if find_dispatcher(model) is None:
        reason = message("this model is not accelerated; connect the output of OneDiff Model Speedup")
        return pass_through(model, reason, node_id, name="the model")
    clone = model.clone()
    clone.set_attachments(_STEP_CACHE, _StepCacheRequest(threshold, node_id))
    clone.remove_wrappers_with_key(WrappersMP.PREDICT_NOISE, KEY)
    clone.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, KEY, _around_prediction)
    return clone


def _around_prediction(executor: WrapperExecutor, *args: Any, **kwargs: Any) -> Any:
    """Begin a step of the step cache: the sampler asks for a prediction, however often the model is called for it."""
    dispatcher = find_dispatcher(executor.class_obj.model_patcher)
    if dispatcher is not None:
        dispatcher.begin_step()
    return executor(*args, **kwargs)


def _strengths_change(conditionings: Mapping[str, Sequence[Mapping[str, Any]]]) -> bool:
    """Return True if hooks change the weights from one step to another.

    All keyframes but the first are for later steps. The hooks that the host has registered do not tell: of two of one
    origin, of which one has keyframes, it keeps the first.
    """
    groups = [conditioning.get("hooks") for of_one_name in conditionings.values() for conditioning in of_one_name]
    return any(len(hook.hook_keyframe.keyframes) > 1 for group in groups if group is not None for hook in group.hooks)


def _reused(step_cache: StepCache) -> Message:
    """Return what a step cache did in a run, for people."""
    if not step_cache.reused and (step_cache.others or not step_cache.calls):
        reason = max(step_cache.others, key=step_cache.others.__getitem__, default="")
        return message("no step was reused: {reason}", reason=reason or message("no compiled graph answered a call"))
    return message("{reused} of {calls} calls reused", reused=step_cache.reused, calls=step_cache.calls)


def find_dispatcher(model: Any) -> Dispatcher | None:
    """Return what serves the calls of an accelerated MODEL; None if it is not accelerated."""
    if not hasattr(model, "get_wrappers"):
        return None
    for wrapper in model.get_wrappers(WrappersMP.DIFFUSION_MODEL, KEY):
        if isinstance(wrapper, ForwardWrapper):
            return wrapper.dispatcher
    return None


def _sizes_of(buckets: BucketSet, ratio: int) -> Callable[[Signature], bool]:
    """Return a test of signatures: True if the call's size is in ``buckets``.

    The host runs the positive and the negative prompt together where memory allows, so a batch of n
    images comes as n or 2n.
    """

    def wanted(signature: Signature) -> bool:
        index = batch_tensor(signature.tensors)
        shape = signature.tensors[index].shape if index is not None else ()
        if len(shape) < 4:
            return False
        height, width = (size * ratio for size in shape[-2:])
        batches = {shape[0]} | ({shape[0] // 2} if shape[0] % 2 == 0 else set())
        return any(buckets.holds(width, height, batch) for batch in batches)

    return wanted


class ForwardWrapper:
    """Serve the diffusion model's forward, below every other extension's wrapper.

    Others may have put wrappers before ours and behind it. Ours replaces only the bottom of the stack, the model's own
    code, so that all of theirs still run, in their order.

    Args:
        dispatcher: answers calls.
        serve: asks it, wherever the weights are.
    """

    def __init__(self, dispatcher: Dispatcher, serve: ModelServer) -> None:
        self.dispatcher, self.serve = dispatcher, serve
        self.reached_by: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def __call__(self, executor: WrapperExecutor, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # somebody else's torch.compile is tracing through us
            return executor(*args, **kwargs)
        self.reached_by.add(executor.class_obj)

        def served(*inner_args: Any, **inner_kwargs: Any) -> Any:
            return self.serve(executor.class_obj, executor.original, inner_args, inner_kwargs)

        behind = executor.wrappers[executor.idx + 1 :]
        return WrapperExecutor.new_class_executor(served, executor.class_obj, behind).execute(*args, **kwargs)


class _ApplyWrapper:
    """Serve diffusion models whose forward asks for no wrappers, around the host's ``apply_model``.

    The first call of a module shows if its forward does; the host runs it, once and on its own arguments, for code that
    nodes put into the model may count. If it does not reach our wrapper, all later calls go to a passing copy of the
    host's model object that holds a proxy of the diffusion model. The object itself, which other clones share, keeps
    its own. Like ``ForwardWrapper`` this replaces the bottom of the stack of wrappers.
    """

    def __init__(self, around_forward: ForwardWrapper) -> None:
        self._around_forward = around_forward
        self._stand_ins: dict[int, ModuleProxy] = {}  # by id of the module, which each of them holds

    def __call__(self, executor: WrapperExecutor, *args: Any, **kwargs: Any) -> Any:
        model, method = executor.class_obj, executor.original
        module, reached_by = model.diffusion_model, self._around_forward.reached_by
        if torch.compiler.is_compiling() or not isinstance(method, types.MethodType):  # replaced by another extension
            return executor(*args, **kwargs)

        def apply(*inner_args: Any, **inner_kwargs: Any) -> Any:
            if model.diffusion_model is not module:  # another extension's is there for this call, as torch.compile's
                return self._passed_by(executor, inner_args, inner_kwargs)
            if module in reached_by:
                return method(*inner_args, **inner_kwargs)
            if id(module) not in self._stand_ins:
                output = method(*inner_args, **inner_kwargs)
                if module not in reached_by:
                    self._stand_ins[id(module)] = ModuleProxy(module, self._around_forward.serve, ("forward",))
                    first = message("the first call of a model of this kind is ComfyUI's")
                    self._around_forward.dispatcher.passed_by(module, first, expected=True)
                return output
            return method.__func__(_holding(model, self._stand_ins[id(module)]), *inner_args, **inner_kwargs)

        behind = executor.wrappers[executor.idx + 1 :]
        return WrapperExecutor.new_class_executor(apply, model, behind).execute(*args, **kwargs)

    def _passed_by(self, executor: WrapperExecutor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a model that a node behind ours has put in the place of its own, and count that as a call not served.

        It may ask for our wrapper all the same; then the dispatcher has counted the call.
        """
        dispatcher = self._around_forward.dispatcher
        asked = dispatcher.calls
        output = executor.original(*args, **kwargs)
        if dispatcher.calls == asked:
            others = owners_of(executor.wrappers[executor.idx + 1 :])
            dispatcher.passed_by(
                executor.class_obj.diffusion_model,
                message(
                    "{node}, behind OneDiff Model Speedup, runs the model in a way of its own; use one of the two",
                    node=others,
                ),
            )
        return output


def _holding(model: Any, diffusion_model: ModuleProxy) -> Any:
    """Return a shallow copy of the host's model object with another diffusion model."""
    image = copy.copy(model)
    # Found before the layer of that name, which is in a dict that the copy shares.
    vars(image)["diffusion_model"] = diffusion_model
    return image


class _RunWrapper:
    """Begin and end a run of the dispatcher around each sampling run."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def __call__(self, executor: WrapperExecutor, *args: Any, **kwargs: Any) -> Any:
        guider = executor.class_obj
        patcher = guider.model_patcher
        asked: _StepCacheRequest | None = patcher.get_attachment(_STEP_CACHE)
        step_cache = StepCache(asked.threshold) if asked is not None and asked.threshold else None
        if step_cache is not None and _strengths_change(guider.conds):
            step_cache.refuse(message("keyframes of a hook change the weights during the run"))
        on_other_gpus = resident_on_other_gpus(patcher)
        if on_other_gpus:
            log.info("OneDiff: a run over %d GPUs; its CUDA graphs are recorded when it is over", on_other_gpus + 1)
        self._dispatcher.begin_run(step_cache)
        try:
            result = executor(*args, **kwargs)
        finally:
            if asked is not None and step_cache is not None:
                self._dispatcher.end_step_cache()
                status_of(asked.node_id)(_reused(step_cache))
        self._dispatcher.end_run(patcher.model.diffusion_model, _size_of(result, latent_ratio(patcher)))
        return result


def _size_of(latent: Any, ratio: int) -> str:
    """Return the image size of a latent ``[batch, channels, (frames,) height, width]``: ``1024×1024 b1``."""
    if not isinstance(latent, torch.Tensor) or latent.ndim < 4:
        return ""
    height, width = (side * ratio for side in latent.shape[-2:])
    return f"{width}×{height} b{len(latent)}"


ADAPTER = Adapter(
    node=message("OneDiff Model Speedup"),
    accelerate=accelerate,
    find_dispatcher=find_dispatcher,
    modules=_modules,
    patcher=lambda model: model,
    dtype=lambda model: model.model.get_dtype_inference(),
    preparing=preparing,
)
