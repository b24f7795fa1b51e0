"""Attach a dispatcher to a clone of a ComfyUI CLIP.

A CLIP holds one or more text encoders. Each turns tokens into embeddings, runs a stack of layers over them
and picks what it needs of the result; the stack is where the time goes, and it is what is served. Prompt
weights, embeddings put between tokens and the layer that is chosen are all above or below it, so the host's own
code goes on doing them.

The CLIP that came in is not touched. The clone has twins of the few modules between it and the stacks, which show a
proxy in the place of each stack; their attributes, layers, weights and the patcher that manages them are the host's.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...capture.parameters import OnCopies
from ...capture.values.bytecode import locals_read
from ...capture.values.global_reads import names, strings
from ...messages import message
from ...serving.dispatcher import Dispatcher
from ...serving.options import Options
from ..weights.dynamic_vram import needs_resident_form, resident_clone
from .adapter import Adapter
from .attach import dispatcher_for, pass_through, release_on_detach, unfit
from .module_proxy import ModuleProxy, module_behind, server_behind
from .part import NOT_IN_LAYERS, Part
from .placement import ModelServer

log = logging.getLogger(__name__)

_TENSORS = 32  # like a prompt's, at most at a time: a layer between has three to four times as many columns
_CACHES = "past_key_values"  # the host's name for what a text encoder that writes text knows of the tokens before


def accelerate_clip(clip: Any, engine: str, node_id: str | None = None, compile: str = "wait") -> Any:
    """Return a clone of ``clip`` whose text encoders are served by compiled graphs.

    Args:
        clip: a ComfyUI CLIP.
        engine: one of ``settings.ENGINE_NAMES``.
        node_id: the node that shows what is going on.
        compile: one of ``settings.COMPILE_CHOICES``.

    Returns:
        The accelerated clone; or, where nothing can be captured, ``clip`` itself, after a warning that
        says why.
    """
    encoders = getattr(clip, "cond_stage_model", None)
    if not isinstance(encoders, torch.nn.Module) or not _stacks(encoders):
        reason = unfit("clip", clip, message("a CLIP with layers of a text encoder"))
        return pass_through(clip, reason, node_id)
    dispatcher = dispatcher_for("CLIP", engine, node_id, Options(compile=compile))
    clone = _clone_to_serve(clip)
    model = clone.patcher.model
    stand_ins = {
        path: ModuleProxy(stack, _TextEncoderServer(dispatcher, _Stack(model, stack)), ["forward"])
        for path, stack in _stacks(clone.cond_stage_model)
    }
    clone.cond_stage_model = _with_replaced(clone.cond_stage_model, stand_ins)
    release_on_detach(clone.patcher)
    return clone


def find_clip_dispatcher(clip: Any) -> Dispatcher | None:
    """Return what serves the text encoders of an accelerated CLIP; None if it is not accelerated."""
    encoders = getattr(clip, "cond_stage_model", None)
    if isinstance(encoders, torch.nn.Module):
        for path, _ in _stacks(encoders):
            server = server_behind(encoders.get_submodule(path))
            if isinstance(server, _TextEncoderServer):
                return server.dispatcher
    return None


def stacks_of(clip: Any) -> list[torch.nn.Module]:
    """Return the modules of a CLIP that are served once it is accelerated; none of what cannot be."""
    encoders = getattr(clip, "cond_stage_model", None)
    return [stack for _, stack in _stacks(encoders)] if isinstance(encoders, torch.nn.Module) else []


def _clone_to_serve(clip: Any) -> Any:
    """Return a clone; where weights cannot be served from Dynamic VRAM, one whose weights stay, if it can be had."""
    patcher = resident_clone(clip.patcher, "CLIP") if needs_resident_form(clip.patcher) else None
    clone = clip.clone()
    if patcher is not None:  # the host's clone() takes none that it is to use
        clone.patcher, clone.cond_stage_model = patcher, patcher.model
    return clone


def _stacks(encoders: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Return the stacks of layers in the text encoders of a CLIP, with their paths.

    The host calls every encoder ``transformer``. Its stack is the module that holds its list of layers: of
    several lists (an encoder may see images too) the one that is nearest to the embeddings of tokens, then the
    one with the most weights.
    """
    found = []
    for path, encoder in encoders.named_modules():
        if path.rpartition(".")[2] != "transformer":
            continue
        tokens = _path_of_tokens(encoder)
        lists = [
            (_common(inside, tokens), sum(weight.numel() for weight in layers.parameters()), inside)
            for inside, layers in encoder.named_modules()
            if isinstance(layers, torch.nn.ModuleList)
        ]
        if lists:
            *_, inside = max(lists)
            stack = ".".join(filter(None, (path, inside.rpartition(".")[0])))
            found.append((stack, module_behind(encoders.get_submodule(stack))))
    return found


def _path_of_tokens(encoder: Any) -> str:
    embeddings = encoder.get_input_embeddings() if hasattr(encoder, "get_input_embeddings") else None
    return next((path for path, module in encoder.named_modules() if module is embeddings), "")


def _common(path: str, other: str) -> int:
    """Return how many steps from the root two paths share."""
    steps = zip(path.split("."), other.split("."), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], steps))


def _with_replaced(module: torch.nn.Module, replacements: Mapping[str, ModuleProxy], path: str = "") -> torch.nn.Module:
    """Return a twin of a module tree that shows other modules at some paths."""
    shown: dict[str, Any] = {}
    for name, child in module._modules.items():
        full = f"{path}.{name}" if path else name
        if full in replacements:
            shown[name] = replacements[full]
        elif child is not None and any(other.startswith(f"{full}.") for other in replacements):
            shown[name] = _with_replaced(child, replacements, full)
    return _twin(module, shown)


def _twin(module: torch.nn.Module, shown: Mapping[str, Any]) -> torch.nn.Module:
    """Return another object with the attributes of a module, now and later, that shows stand-ins for modules in it.

    The host sets a node's object patches on the module when it loads it, and its options before each prompt: they are
    the twin's, too. A class is what can show another module than the one that the shared attributes have.
    """
    kind = type(module)
    stand_ins = {name: _standing_in(name, module._modules[name], stand_in) for name, stand_in in shown.items()}
    twin: torch.nn.Module = object.__new__(type(kind.__name__, (kind,), {"__module__": kind.__module__, **stand_ins}))
    object.__setattr__(twin, "__dict__", vars(module))
    return twin


def _standing_in(name: str, own: torch.nn.Module | None, stand_in: Any) -> property:
    """Return an attribute that shows ``stand_in`` while the module has ``own`` by this name."""

    def shown(module: torch.nn.Module) -> Any:
        now = module._modules.get(name)
        return stand_in if now is own else now

    return property(shown)


class _Stack(Part):
    """A stack of layers in the text encoders of a CLIP.

    Args:
        model: all of the encoders, whose weights the host manages together.
        stack: one of the modules in it.
    """

    not_in_blocks = NOT_IN_LAYERS

    def __init__(self, model: torch.nn.Module, stack: torch.nn.Module) -> None:
        self._encoders, self._stack = model, stack  # of which the CLIP may have no more than a twin
        self._largest = max((weight.numel() for weight in stack.parameters()), default=0)

    @property
    def model(self) -> torch.nn.Module:
        return self._encoders

    @property
    def module(self) -> torch.nn.Module:
        return self._stack

    @property
    def compute_dtype(self) -> torch.dtype:
        return torch.float32  # the host has all of them compute in it, whatever their weights are

    def memory_required(self, size: torch.Size) -> float:
        """Return the bytes of a few dozen tensors like the prompt's, and of two weights in 32 bits."""
        return torch.float32.itemsize * (_TENSORS * size.numel() + 2 * self._largest)

    def captured(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a form that gets copies: layers add to their input in place, the first to what the caller handed in.

        A graph does not, and eager may run on the same input after it.
        """
        return OnCopies(forward)


class _TextEncoderServer:
    """Hands the calls of a stack to a dispatcher, in a form that says no more than what matters."""

    def __init__(self, dispatcher: Dispatcher, stack: _Stack) -> None:
        self.dispatcher = dispatcher
        self._server = ModelServer(stack, dispatcher, in_blocks=False)

    def __call__(
        self, module: torch.nn.Module, method: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if kwargs.get(_CACHES) is not None:  # each token would be another call
            self.dispatcher.passed_by(module, message("text is generated by ComfyUI's own code"))
            return method(*args, **kwargs)
        self.dispatcher.begin_run()  # a prompt is one or two calls, with whole images between it and the next
        args, kwargs = _read_arguments(method, args, kwargs)
        return self._server(module, method, args, kwargs)


def _read_arguments(
    method: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the arguments of a call without those that the method's code never reads.

    The host tells every encoder how many tokens each prompt has and where embeddings were put. Most do not ask,
    and then a graph must not be for one number of tokens.
    """
    parameters = inspect.signature(method).parameters
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY) for p in parameters.values()):
        return args, kwargs
    optional = {name for name, p in parameters.items() if p.default is not inspect.Parameter.empty}
    unread = optional & _unread_names(method)
    named = inspect.signature(method).bind(*args, **kwargs).arguments
    return (), {name: value for name, value in named.items() if name not in unread}


def _unread_names(method: Callable[..., Any]) -> frozenset[str]:
    """Return the names of parameters that the code of a plain Python method never reads."""
    function = getattr(method, "__func__", method)
    code = getattr(function, "__code__", None)
    if not isinstance(code, types.CodeType) or hasattr(function, "__wrapped__"):
        return frozenset()
    return _unread(code)


@functools.lru_cache(maxsize=64)
def _unread(code: types.CodeType) -> frozenset[str]:
    if {"locals", "vars", "eval", "exec"} & set(code.co_names):
        return frozenset()
    count = code.co_argcount + code.co_kwonlyargcount
    return frozenset(code.co_varnames[:count]) - locals_read(code) - names(code) - strings(code)


ADAPTER = Adapter(
    node=message("OneDiff CLIP Speedup"),
    accelerate=accelerate_clip,
    find_dispatcher=find_clip_dispatcher,
    modules=stacks_of,
)
