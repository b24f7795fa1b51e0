"""Attach a dispatcher to a clone of a ComfyUI MODEL.

The clone gets four wrappers under our key, through the host's own patcher API: one around each
sampling run, one around the sampler in it, one around the diffusion model's forward, and one around what calls the
diffusion model, for families whose forward asks for no wrappers. With a step cache there is a fifth, around each
prediction that a sampler asks for. The MODEL that came in is not touched, and without the node nothing of ours is left
on it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from comfy.patcher_extension import CallbacksMP, WrapperExecutor, WrappersMP

from ...buckets import BucketSet
from ...capture.call import Signature
from ...capture.shape_range import batch_tensor
from ...messages import message
from ...serving.dispatcher import Dispatcher
from ...serving.options import Options, no_sizes
from ..preparation.latents import latent_ratio
from ..process.process import NodeOrigin, accelerated, set_budget
from ..report.unused import say_if_unused
from ..weights.dynamic_vram import needs_resident_form, resident_clone
from ..weights.page_order import can_place, spread_over_blocks
from .adapter import Adapter, module_at
from .attach import KEY, dispatcher_for, pass_through, release_on_detach, unfit
from .blocks import blocks_of
from .forward_wrappers import ApplyWrapper, ForwardWrapper
from .placement import ModelServers
from .sampling_runs import STEP_CACHE, RunWrapper, SamplerWrapper, StepCacheRequest

log = logging.getLogger(__name__)

# Of the first image in background mode: as long as a fast GPU needs for one.
_COMPILE_DELAY_S = 2.0
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
    around_run = RunWrapper(dispatcher)
    servers = ModelServers(dispatcher, in_blocks)
    servers.add(clone.model)
    around_forward = ForwardWrapper(around_run, servers)
    wrappers = {
        WrappersMP.DIFFUSION_MODEL: around_forward,
        WrappersMP.APPLY_MODEL: ApplyWrapper(around_forward),
        WrappersMP.OUTER_SAMPLE: around_run,
        _AROUND_SAMPLER: SamplerWrapper(around_run),
    }
    for place, wrapper in wrappers.items():
        clone.remove_wrappers_with_key(place, KEY)
        clone.add_wrapper_with_key(place, KEY, wrapper)
    if in_blocks and can_place():
        clone.remove_callbacks_with_key(CallbacksMP.ON_LOAD, KEY)
        clone.add_callback_with_key(CallbacksMP.ON_LOAD, KEY, _place_weights)


def _place_weights(patcher: Any, *_loaded: Any) -> None:
    """Give weights places in Dynamic VRAM. The host asks for it in the middle of loading, which must not fail."""
    try:
        spread_over_blocks(patcher.model, blocks_of(patcher.model.diffusion_model))
    except Exception as error:
        log.warning("OneDiff: a model's weights stay where ComfyUI has put them, which can be slower (%r)", error)


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
    clone.set_attachments(STEP_CACHE, StepCacheRequest(threshold, node_id))
    clone.remove_wrappers_with_key(WrappersMP.PREDICT_NOISE, KEY)
    clone.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, KEY, _around_prediction)
    return clone


def _around_prediction(executor: WrapperExecutor, *args: Any, **kwargs: Any) -> Any:
    """Begin a step of the step cache: the sampler asks for a prediction, however often the model is called for it."""
    dispatcher = find_dispatcher(executor.class_obj.model_patcher)
    if dispatcher is not None:
        dispatcher.begin_step()
    return executor(*args, **kwargs)


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


ADAPTER = Adapter(
    node=message("OneDiff Model Speedup"),
    accelerate=accelerate,
    find_dispatcher=find_dispatcher,
    modules=_modules,
    patcher=lambda model: model,
    dtype=lambda model: model.model.get_dtype_inference(),
    preparing=preparing,
)
