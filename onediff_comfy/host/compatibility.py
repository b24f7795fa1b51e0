"""What we rely on of the host, and whether this host still has it.

Hosts change. What is used of them is declared here, and looked at once when it is first needed; where something
is missing, or can no longer be used as we use it, the kind of object that needs it passes through its node
unaccelerated, with one message that names it. What we can do without is not listed: there the code asks first.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..messages import Message, message
from .use import Use

log = logging.getLogger(__name__)

KINDS = {"model": "MODEL", "vae": "VAE", "clip": "CLIP", "control_net": "CONTROL_NET"}
"""The kinds of objects that can be accelerated: the host's name of each, by the name of a node's input for it."""


def _there(module: str, *paths: str) -> Iterator[Use]:
    return (Use(module, path) for path in paths)


_EXTENSION, _PATCHER, _MEMORY = "comfy.patcher_extension", "comfy.model_patcher", "comfy.model_management"


def _order_of_wrappers(executor_class: Any) -> bool:
    """Return True if a wrapper can replace the bottom of the stack, and the wrappers behind it still run."""
    order: list[str] = []

    def named(name: str) -> Callable[..., Any]:
        def wrapper(executor: Any, *args: Any, **kwargs: Any) -> Any:
            order.append(name)
            return executor(*args, **kwargs)

        return wrapper

    def ours(executor: Any, *args: Any, **kwargs: Any) -> Any:
        def served(*inner_args: Any, **inner_kwargs: Any) -> Any:
            order.append("served")
            return executor.original(*inner_args, **inner_kwargs)

        behind = executor.wrappers[executor.idx + 1 :]
        return executor_class.new_class_executor(served, executor.class_obj, behind).execute(*args, **kwargs)

    thing = object()
    stack = executor_class.new_class_executor(lambda x, y: (x, y), thing, [named("before"), ours, named("behind")])
    return stack.execute(1, y=2) == (1, 2) and order == ["before", "behind", "served"]


RELIED_ON: Mapping[str, tuple[Use, ...]] = {
    "everything": (
        Use("comfy.cli_args", "args"),
        Use(_MEMORY, "get_torch_device", ()),
        Use(_MEMORY, "get_total_memory", ("dev",)),
        Use(_MEMORY, "throw_exception_if_processing_interrupted", ()),
        Use("comfy.ldm.modules.attention", "attention_pytorch", ("q", "k", "v", "heads")),
        # How VAEs compute attention: each holds one of these.
        *_there("comfy.ldm.modules.diffusionmodules.model", "normal_attention", "xformers_attention"),
        Use("comfy.ldm.modules.diffusionmodules.model", "pytorch_attention", ("q", "k", "v")),
        # By these we know that a layer changes its weights while it runs. Without them a LoRA could be lost.
        *_there("comfy.ops", "CastWeightBiasOp.weight_function", "CastWeightBiasOp.bias_function"),
        Use(_PATCHER, "ModelPatcherDynamic.load", mentions=("_v",)),
        Use(_EXTENSION, "CallbacksMP.ON_DETACH"),
        Use(_PATCHER, "ModelPatcher.add_callback_with_key", ("self", "call_type", "key", "callback")),
        Use(_PATCHER, "ModelPatcher.remove_callbacks_with_key", ("self", "call_type", "key")),
        Use(
            _PATCHER,
            "ModelPatcher.clone",
            ("self",),
            ("disable_dynamic", "model_override"),
            mentions=("parent", "hook_backup", "cached_patcher_init"),
        ),
        Use(_PATCHER, "ModelPatcher.get_clone_model_override", ("self",)),
        Use(_PATCHER, "ModelPatcher.__init__", mentions=("model", "load_device", "offload_device")),
    ),
    "MODEL": (
        *_there(_EXTENSION, "WrappersMP.DIFFUSION_MODEL", "WrappersMP.APPLY_MODEL", "WrappersMP.OUTER_SAMPLE"),
        Use(_EXTENSION, "WrapperExecutor.new_class_executor", ("original", "class_obj", "wrappers")),
        Use(_EXTENSION, "WrapperExecutor.__init__", mentions=("original", "class_obj", "wrappers", "idx")),
        Use(_EXTENSION, "WrapperExecutor", works=_order_of_wrappers),
        Use(_PATCHER, "ModelPatcher.add_wrapper_with_key", ("self", "wrapper_type", "key", "wrapper")),
        Use(_PATCHER, "ModelPatcher.remove_wrappers_with_key", ("self", "wrapper_type", "key")),
        Use(_PATCHER, "ModelPatcher.get_wrappers", ("self", "wrapper_type", "key")),
        Use(_PATCHER, "ModelPatcher.get_model_object", ("self", "name")),
        Use(_PATCHER, "ModelPatcher.get_attachment", ("self", "key")),
        Use(_PATCHER, "ModelPatcher.set_attachments", ("self", "key", "attachment")),
        Use("comfy.samplers", "CFGGuider.__init__", mentions=("model_patcher",)),
        Use("comfy.model_base", "BaseModel.__init__", mentions=("diffusion_model", "latent_format")),
        # By these weights are brought to the device that do not stay there.
        Use("comfy.ops", "cast_bias_weight", ("s", "input", "dtype", "device", "bias_dtype")),
        Use(_PATCHER, "ModelPatcher.load", mentions=("model_lowvram", "prev_comfy_cast_weights", "device")),
        Use(_MEMORY, "get_free_memory", ("dev", "torch_free_too")),
        Use(_MEMORY, "minimum_inference_memory", ()),
        Use("comfy.model_base", "BaseModel.get_dtype_inference", ("self",)),
    ),
    "step cache": (
        # By these we know when a step begins, and that weights change from one to another.
        *_there(_EXTENSION, "WrappersMP.PREDICT_NOISE"),
        Use("comfy.samplers", "CFGGuider.outer_predict_noise", mentions=("PREDICT_NOISE",)),
        Use("comfy.samplers", "CFGGuider.sample", mentions=("conds",)),
        Use("comfy.samplers", "preprocess_conds_hooks", mentions=("hooks",)),
        Use("comfy.hooks", "HookGroup.__init__", mentions=("hooks",)),
        Use("comfy.hooks", "Hook.__init__", mentions=("hook_keyframe",)),
        Use("comfy.hooks", "HookKeyframeGroup.__init__", mentions=("keyframes",)),
    ),
    "warm-up": (
        Use(_MEMORY, "intermediate_device", ()),
        Use(_MEMORY, "soft_empty_cache", ()),
        Use(_MEMORY, "InterruptProcessingException"),
        Use("comfy.utils", "ProgressBar", ("total",), ("node_id",)),
        Use("comfy.utils", "ProgressBar.update_absolute", ("self", "value")),
        Use("comfy.sample", "fix_empty_latent_channels", ("model", "latent_image")),
        Use("comfy.sample", "prepare_noise", ("latent_image", "seed")),
        Use(
            "comfy.sample",
            "sample",
            ("model", "noise", "steps", "cfg", "sampler_name", "scheduler", "positive", "negative", "latent_image"),
            ("disable_pbar", "seed"),
        ),
    ),
    "files": (
        *_there("folder_paths", "models_dir", "folder_names_and_paths"),
        Use("folder_paths", "add_model_folder_path", ("folder_name", "full_folder_path"), ("is_default",)),
        Use("folder_paths", "get_filename_list", ("folder_name",)),
        Use("folder_paths", "get_folder_paths", ("folder_name",)),
        Use("folder_paths", "get_full_path", ("folder_name", "filename")),
        Use("comfy_execution.graph_utils", "ExecutionBlocker", ("message",)),
    ),
    "VAE": (
        Use(
            "comfy.sd",
            "VAE.__init__",
            mentions=("first_stage_model", "patcher", "vae_dtype", "latent_channels", "latent_dim"),
        ),
        Use("comfy.sd", "VAE.spacial_compression_decode", ("self",)),
        *_there("comfy.sd", "VAE.decode", "VAE.decode_tiled", "VAE.encode", "VAE.encode_tiled"),
    ),
    "CONTROL_NET": (
        Use("comfy.controlnet", "ControlNet.__init__", mentions=("control_model", "control_model_wrapped")),
        Use("comfy.controlnet", "ControlNet.copy", ("self",)),
        Use("comfy.controlnet", "ControlBase.__init__", mentions=("previous_controlnet",)),
        Use("comfy.controlnet", "ControlBase.copy_to", ("self", "c")),
        Use("comfy.controlnet", "ControlLora", ("control_weights",), ("global_average_pooling",)),
        Use("comfy.controlnet", "ControlLora.__init__", mentions=("control_weights",)),
        Use("comfy.controlnet", "ControlLora.pre_run", ("self", "model", "percent_to_timestep_function")),
        Use("comfy.controlnet", "ControlLora.cleanup", ("self",)),
        Use(_PATCHER, "ModelPatcher", ("model",), ("load_device", "offload_device")),
    ),
    "CLIP": (
        Use("comfy.sd", "CLIP.__init__", mentions=("cond_stage_model", "patcher")),
        Use("comfy.sd", "CLIP.clone", ("self",)),
    ),
}
"""What we use of the host, by the kind of object that cannot be accelerated without it."""


BRINGS_WEIGHTS = (
    Use("comfy.ops", "cast_modules_with_vbar", ("comfy_modules", "dtype", "device", "bias_dtype", "non_blocking")),
    Use(
        "comfy.ops",
        "resolve_cast_module_with_vbar",
        ("s", "dtype", "device", "bias_dtype", "compute_dtype", "want_requant"),
    ),
    Use(_MEMORY, "current_stream", ("device",)),
    Use("comfy.model_prefetch", "cleanup_prefetched_modules"),
)
"""By these a block's weights in Dynamic VRAM are brought. Hosts without them get resident forms instead."""
HOLDS_WEIGHTS = (Use("comfy_aimdo.model_vbar", "ModelVBAR.set_watermark_limit", ("self", "size_bytes")),)
"""By these no weights are taken off a device in the middle of a recording. Without them more memory has to be free.

Nor are any in the middle of a call for which all weights of a model are there.
"""
LIMITS_WEIGHTS = (
    Use("comfy_aimdo.model_vbar", "ModelVBAR.set_watermark", ("self", "size_bytes")),
    *_there("comfy_aimdo.model_vbar", "ModelVBAR.get_residency", "ModelVBAR.loaded_size"),
)
"""By these no more weights come back to a device than there is room for. Without them some come and go again."""

PINS_WEIGHTS = (
    Use(_MEMORY, "current_loaded_models"),
    Use(
        "comfy.ops",
        "cast_bias_weight",
        ("s", "input", "dtype", "device", "bias_dtype", "offloadable", "compute_dtype"),
    ),
    Use("comfy.ops", "uncast_bias_weight", ("s", "weight", "bias", "offload_stream")),
    Use("comfy_aimdo.model_vbar", "vbar_fault", ("alloc",)),
    Use("comfy_aimdo.model_vbar", "vbar_unpin", ("alloc",)),
    Use("comfy_aimdo.model_vbar", "vbar_signature_compare", ("a", "b")),
    *HOLDS_WEIGHTS,
)
"""By these all weights of a model in Dynamic VRAM are brought and stay, while it runs. As above without them."""

PLACES_WEIGHTS = (
    *_there(_EXTENSION, "CallbacksMP.ON_LOAD"),
    Use(_PATCHER, "ModelPatcherDynamic.load", mentions=("_v", "_v_signature")),
    Use("comfy_aimdo.model_vbar", "ModelVBAR.alloc", mentions=("offset",)),
    Use("comfy_aimdo.model_vbar", "ModelVBAR.free_memory", ("self", "size_bytes")),
    Use("comfy_aimdo.model_vbar", "ModelVBAR.prioritize", ("self",)),
    *_there("comfy_aimdo.model_vbar", "ModelVBAR.get_residency", "ModelVBAR.loaded_size"),
)
"""By these weights are given other places in Dynamic VRAM. Without them those of some blocks are all elsewhere."""

PAUSES_COMPILER = (
    Use("comfy.model_prefetch", "malloc_graph_begin"),
    Use("comfy.model_prefetch", "pause_malloc_graph", ()),
    Use("comfy.model_prefetch", "cleanup_malloc_graph", ()),
)
"""By these the host's own compiler, where there is one, takes no notice of what is ours. Without them ours steps aside
while it is at work."""

_MEANWHILE = {
    "everything": "nothing is accelerated",
    "MODEL": "no MODEL is accelerated",
    "step cache": "no step is reused",
    "warm-up": "nothing can be compiled ahead",
    "files": "no compiled graph is saved to a file or loaded from one",
    "VAE": "no VAE is accelerated",
    "CONTROL_NET": "no CONTROL_NET is accelerated",
    "CLIP": "no CLIP is accelerated",
}


@functools.cache
def host_changed(kind: str) -> Message | None:
    """Return what this host lacks of what is needed for one kind of object; None if all is there.

    Look once in a process. The first time that something is missing, the log says so.

    Args:
        kind: a key of ``RELIED_ON``; "everything" is part of each.
    """
    if kind != "everything":
        changed = host_changed("everything")
        if changed is not None:
            return changed
    for use in RELIED_ON[kind]:
        problem = use.problem()
        if problem is not None:
            return _told(kind, use, problem)
    for use in RELIED_ON[kind]:
        try:
            works = use.works is None or use.works(use.found())
        except Exception:
            log.debug("%s was tried and failed", use, exc_info=True)
            works = False
        if not works:
            return _told(kind, use, message("it works differently now"))
    return None


def host_changes() -> list[Message]:
    """Return all that ``host_changed`` has to say."""
    return list(dict.fromkeys(changed for kind in RELIED_ON if (changed := host_changed(kind)) is not None))


def _told(kind: str, use: Use, problem: Message) -> Message:
    reason = message(
        "this ComfyUI{version} has another {use} than onediff-comfy knows ({problem}); update onediff-comfy",
        version=_host_version(),
        use=use,
        problem=problem,
    )
    log.warning("OneDiff: %s. Until then %s, and images come out as without it.", reason, _MEANWHILE[kind])
    return reason


def _host_version() -> str:
    try:
        return f" {importlib.import_module('comfyui_version').__version__}"
    except (ImportError, AttributeError):
        return ""
