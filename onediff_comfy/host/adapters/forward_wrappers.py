"""Wrappers around the diffusion model's forward, and around what calls it, through the host's own patcher API."""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from comfy.patcher_extension import WrapperExecutor, WrappersMP

from ...messages import message
from ..process.services import OPTIONS
from ..report.owners import owners_of
from .attach import KEY
from .module_image import ModuleImage
from .module_proxy import ModuleProxy
from .placement import ModelServers
from .sampling_runs import RunWrapper, SharedWrapper


class ForwardWrapper(SharedWrapper):
    """Serve the diffusion model's forward, below every other extension's wrapper.

    Others may have put wrappers before ours and behind it. Ours replaces only the bottom of the stack, the model's own
    code, so that all of theirs still run, in their order.

    Args:
        around_run: of the dispatcher that answers calls.
        servers: ask it, wherever the weights are.
    """

    def __init__(self, around_run: RunWrapper, servers: ModelServers) -> None:
        self.dispatcher, self._around_run, self.servers = around_run.dispatcher, around_run, servers
        self.reached_by: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def __call__(self, executor: WrapperExecutor, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # somebody else's torch.compile is tracing through us
            return executor(*args, **kwargs)
        self.reached_by.add(executor.class_obj)

        def served(*inner_args: Any, **inner_kwargs: Any) -> Any:
            return self.serve(executor.class_obj, executor.original, inner_args, inner_kwargs)

        behind = executor.wrappers[executor.idx + 1 :]
        return WrapperExecutor.new_class_executor(served, executor.class_obj, behind).execute(*args, **kwargs)

    def serve(
        self, module: torch.nn.Module, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Return what ``forward`` gives. A call outside of all runs is one of its own: see ``RunWrapper``."""
        if not self._around_run.open:
            self.dispatcher.begin_run()
        return self.servers(module, forward, args, kwargs)


class ApplyWrapper(SharedWrapper):
    """Serve diffusion models whose forward asks for no wrappers, around the host's ``apply_model``.

    The first call of a module shows if its forward does; the host runs it, once and on its own arguments, for code that
    nodes put into the model may count, but with one more wrapper, before those of others: they may not call what is
    behind them, and may have taken ours away. If it is not reached, all later calls go to a passing image of the
    host's model object that holds a proxy of the diffusion model. The object itself, which other clones share, keeps
    its own, and what a call sets on the image. Like ``ForwardWrapper`` this replaces the bottom of the stack of
    wrappers.
    """

    def __init__(self, around_forward: ForwardWrapper) -> None:
        self._around_forward = around_forward
        self._stand_ins = weakref.WeakKeyDictionary[Any, dict[int, ModuleProxy]]()  # of a model, by id of the module

    def __call__(self, executor: WrapperExecutor, *args: Any, **kwargs: Any) -> Any:
        model, method = executor.class_obj, executor.original
        module, reached_by = model.diffusion_model, self._around_forward.reached_by
        if torch.compiler.is_compiling():
            return executor(*args, **kwargs)
        self._around_forward.servers.add(model)
        stand_ins = self._stand_ins.setdefault(model, {})  # each holds its module

        def apply(*inner_args: Any, **inner_kwargs: Any) -> Any:
            # Another extension's method, or its model for this call, as torch.compile's.
            if not _is_method_of(model, method) or model.diffusion_model is not module:
                return self._passed_by(executor, inner_args, inner_kwargs)
            if module in reached_by:
                return method(*inner_args, **inner_kwargs)
            if id(module) not in stand_ins:
                output = _with_first(reached_by, method, inner_args, inner_kwargs)
                if module not in reached_by:
                    stand_ins[id(module)] = ModuleProxy(module, self._around_forward.serve, ("forward",))
                    first = message("the first call of a model of this kind is ComfyUI's")
                    self._around_forward.dispatcher.passed_by(module, first, expected=True)
                return output
            # Found before the layer of that name, which is in a dict that the image shares.
            image = ModuleImage(model, instead={"diffusion_model": stand_ins[id(module)]})
            with image.current() as holding:
                return method.__func__(holding, *inner_args, **inner_kwargs)

        behind = executor.wrappers[executor.idx + 1 :]
        return WrapperExecutor.new_class_executor(apply, model, behind).execute(*args, **kwargs)

    def _passed_by(self, executor: WrapperExecutor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a model that a node behind ours has put in the place of its own, and count that as a call not served.

        It may ask for our wrapper all the same; then the dispatcher has counted the call.
        """
        dispatcher = self._around_forward.dispatcher
        asked = dispatcher.run.report.calls
        output = executor.original(*args, **kwargs)
        if dispatcher.run.report.calls == asked:
            others = owners_of(executor.wrappers[executor.idx + 1 :])
            dispatcher.passed_by(
                executor.class_obj.diffusion_model,
                message(
                    "{node}, behind OneDiff Model Speedup, runs the model in a way of its own; use one of the two",
                    node=others,
                ),
            )
        return output


def _is_method_of(thing: Any, function: Any) -> bool:
    return isinstance(function, types.MethodType) and function.__self__ is thing


def _with_first(
    reached_by: weakref.WeakSet[torch.nn.Module],
    method: types.MethodType,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Call the host's ``apply_model``, and note the diffusion model if it asks for wrappers around its forward."""

    def first(executor: WrapperExecutor, *inner_args: Any, **inner_kwargs: Any) -> Any:
        reached_by.add(executor.class_obj)
        return executor(*inner_args, **inner_kwargs)

    call = inspect.signature(method).bind(*args, **kwargs)
    options = call.arguments.get(OPTIONS, {})
    tables = options.get("wrappers", {})
    table = {f"{KEY}_first": [first], **tables.get(WrappersMP.DIFFUSION_MODEL, {})}
    call.arguments[OPTIONS] = {**options, "wrappers": {**tables, WrappersMP.DIFFUSION_MODEL: table}}
    return method(*call.args, **call.kwargs)
