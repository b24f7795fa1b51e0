"""What torch.export would change or follow beyond the forward that it traces, held still for the time of a trace."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import logging
import random
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.fx.config as fx_config
import torch.fx.experimental.proxy_tensor as proxy_tensor
import torch.nn.modules.module as module_hooks
import torch.utils._pytree as pytree

from ..target.held_objects import holders_of, same_content
from ..values.tensors import has_fake

_NO_LINES = "do_not_emit_stack_traces"
_NO_MODELS = {*sys.stdlib_module_names, torch.__name__, "sympy", np.__name__} - {"__main__"}
"""Packages whose functions are no model's."""


@contextlib.contextmanager
def attributes_restored(layers: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Put every attribute, weight and child of the layers back as the same object.

    torch.export leaves copies in place of a module's own lists and dicts, and others may hold those. And a forward may
    make a layer or a buffer when it is called first. What it made in a trace holds no numbers.
    """
    before = [dict(layer.__dict__) for layer in layers]
    held = [(holder, dict(holder)) for layer in layers for holder in holders_of(layer)]
    try:
        yield
    finally:
        for layer, attributes in zip(layers, before, strict=True):
            for name in layer.__dict__.keys() - attributes.keys():
                del layer.__dict__[name]
            layer.__dict__.update(attributes)
        for holder, content in held:
            if not same_content(holder, content):
                holder.clear()
                holder.update(content)


@contextlib.contextmanager
def leftovers_removed(module: torch.nn.Module) -> Iterator[None]:
    """Remove what a trace of ``module`` leaves where nobody else looks: hooks, and tensors among remembered results."""
    with _remembered_results_forgotten(), _hooks_removed(module):
        yield


@contextlib.contextmanager
def _remembered_results_forgotten() -> Iterator[None]:
    """Clear each ``functools.lru_cache`` that remembers a tensor of a trace, which holds no numbers.

    Models have tables of frequencies computed once. Nobody knows whose such a cache is: all in the process are looked
    at.
    """
    try:
        yield
    finally:
        for function in _remembering():
            if has_fake(gc.get_referents(function)):
                function.cache_clear()


def _remembering() -> Iterator[Any]:
    """Yield the functions that remember results: those of modules and their classes, and others that Python knows of.

    It knows of none that were there when somebody called ``gc.freeze``. Modules and objects in them may import or
    fail when they are asked for an attribute, as those of ``six`` do: none is asked.
    """
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in _NO_MODELS or not issubclass(type(module), types.ModuleType):
            continue
        for held in list(object.__getattribute__(module, "__dict__").values()):
            members = list(type.__getattribute__(held, "__dict__").values()) if issubclass(type(held), type) else [held]
            for member in members:
                function = member.__func__ if type(member) in (staticmethod, classmethod) else member
                if type(function) is functools._lru_cache_wrapper:
                    yield function
    yield from (each for each in gc.get_objects() if type(each) is functools._lru_cache_wrapper)


@contextlib.contextmanager
def failures_not_printed() -> Iterator[None]:
    """Have PyTorch not print a traceback for what fails in a trace: the host goes on without, and says why."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


@contextlib.contextmanager
def generators_restored() -> Iterator[None]:
    """Put the generators of Python, numpy and torch back to where they were.

    A forward that draws or seeds while it is traced does so once more when it runs, and would give other numbers.
    """
    python, of_numpy, of_torch = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    on_gpus = [torch.cuda.get_rng_state(device) for device in devices]
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(of_numpy)
        torch.random.set_rng_state(of_torch)
        for device, state in zip(devices, on_gpus, strict=True):
            torch.cuda.set_rng_state(state, device)


@contextlib.contextmanager
def no_gradients_wanted(module: torch.nn.Module) -> Iterator[None]:
    """Weights made under inference_mode say that they want no gradients, which they cannot have anyway.

    torch.export sets on its stand-in for a weight what the weight says, and fails where that is impossible.
    """
    weights = (*module.parameters(), *module.buffers())
    wanting = [weight for weight in weights if weight.requires_grad and weight.is_inference()]
    for weight in wanting:
        weight.requires_grad_(False)
    try:
        yield
    finally:
        with torch.inference_mode():
            for weight in wanting:
                weight.requires_grad_(True)


@contextlib.contextmanager
def _hooks_removed(module: torch.nn.Module) -> Iterator[None]:
    """Remove the hooks on all modules' buffers that hold ``module`` and were not there before.

    Where a forward raises, torch.export before 2.13 leaves one behind. It holds the model for ever, and refuses whoever
    registers a buffer in it later.
    """
    hooks = module_hooks._global_buffer_registration_hooks
    before = set(hooks)
    try:
        yield
    finally:
        for key in [key for key, hook in hooks.items() if key not in before and _holds(hook, module)]:
            del hooks[key]


def _holds(hook: Any, module: torch.nn.Module) -> bool:
    held = inspect.getclosurevars(hook).nonlocals.values() if inspect.isfunction(hook) else ()
    # By type: a stand-in for an option that is asked for its class raises, as it does for whatever else reads it.
    parents = (each for each in held if issubclass(type(each), torch.nn.Module))
    return any(child is module for parent in parents for child in parent.modules())


@contextlib.contextmanager
def lines_of_code_forgotten() -> Iterator[None]:
    """Have torch.fx not note with each operator which line of code it came from, where it can leave that.

    Nobody reads it, and looking it up is a twentieth of a trace. Only one thread at a time may be inside.
    """
    before = getattr(fx_config, _NO_LINES, None)
    if before is None:  # an older PyTorch
        yield
        return
    setattr(fx_config, _NO_LINES, True)
    try:
        yield
    finally:
        setattr(fx_config, _NO_LINES, before)


@contextlib.contextmanager
def other_threads_left_alone() -> Iterator[None]:
    """Have torch.export follow the modules of this thread alone.

    It follows every call and attribute of every module in the process. ComfyUI's MultiGPU CFG Split runs a model in a
    thread for each GPU, and the other one's image failed: "Unexpected key …, expected …".
    """
    tracer = getattr(proxy_tensor, "_ModuleStackTracer", None)
    if tracer is None:  # a PyTorch that does it in another way
        yield
        return
    tracing, call_module, getattribute = threading.get_ident(), tracer.call_module, tracer.getattr

    def call(self: Any, module: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != tracing:
            return forward(*args, **kwargs)
        return call_module(self, module, forward, args, kwargs)

    def attribute(self: Any, name: str, value: Any, known: Any) -> Any:
        return value if threading.get_ident() != tracing else getattribute(self, name, value, known)

    tracer.call_module, tracer.getattr = call, attribute
    try:
        yield
    finally:
        tracer.call_module, tracer.getattr = call_module, getattribute


def numbers_drawn() -> tuple[Any, list[Any]]:
    """Return how far the generators of Python and of numpy have come."""
    of_numpy = pytree.tree_leaves(np.random.get_state(legacy=False))  # another generator has other parts
    return random.getstate(), [part.tobytes() if isinstance(part, np.ndarray) else part for part in of_numpy]
