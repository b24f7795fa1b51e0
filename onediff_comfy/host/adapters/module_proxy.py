"""A proxy of one of the host's modules, for objects that have no wrappers of their own.

A MODEL has wrappers around its forward; a VAE, a ControlNet or a text encoder simply calls methods of a
module that it holds. A copy of such an object that holds a proxy instead is accelerated. The module itself, which
other copies share and the host's memory management moves about, stays as it is.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.nn.modules.module as module_hooks

from ...messages import message
from ..process.process import metrics

Serve = Callable[[torch.nn.Module, Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]
"""A dispatcher: called with the module, its bound method, and the call's arguments."""


class ModuleProxy:
    """Calls of some methods of a module are served; everything else about it is the module itself.

    Attributes are read from the module, set on it and deleted from it, and ``isinstance`` answers as for
    the module. It is no ``nn.Module`` and has no state of its own: its weights are the module's, counted once.
    A copy or a pickle of it is one of the module.

    Args:
        module: stood in for.
        serve: a ``Dispatcher``, or something that is called like one.
        methods: names of the methods that go through it. Calling the module itself is its "forward".
    """

    def __init__(self, module: torch.nn.Module, serve: Serve, methods: Collection[str]) -> None:
        own = object.__getattribute__(self, "__dict__")
        own.update(_onediff_module=module, _onediff_serve=serve, _onediff_methods=frozenset(methods))

    @property  # type: ignore[misc]  # what isinstance() asks after the type
    def __class__(self) -> type:
        return type(self._onediff_module)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_onediff"):
            raise AttributeError(name)
        attribute = getattr(self._onediff_module, name)
        return self._served(name) if name in self._onediff_methods else attribute

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._onediff_module, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._onediff_module, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._onediff_module
        if "forward" not in self._onediff_methods:
            return module(*args, **kwargs)
        if not _is_its_forward(module):  # a method has no hooks: only calling the module runs them
            metrics().fell_back(message("the module has a forward hook from another extension"))
            return module(*args, **kwargs)
        return self._onediff_call("forward", args, kwargs)

    def __eq__(self, other: object) -> bool:
        return module_behind(other) is self._onediff_module

    def __hash__(self) -> int:
        return hash(self._onediff_module)

    def __dir__(self) -> list[str]:
        return dir(self._onediff_module)

    def __repr__(self) -> str:
        return f"served {self._onediff_module!r}"

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        return _itself, (self._onediff_module,)

    def _served(self, name: str) -> Callable[..., Any]:
        method = getattr(self._onediff_module, name)

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._onediff_call(name, args, kwargs)

        return call

    def _onediff_call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        method = getattr(self._onediff_module, name)
        if torch.compiler.is_compiling():  # somebody else's torch.compile is tracing through us
            return method(*args, **kwargs)
        return self._onediff_serve(self._onediff_module, method, args, kwargs)


_CALL = operator.attrgetter("__call__", "_call_impl")
_OWN_CALLS = ("_call_impl", "_compiled_call_impl")  # which a module may have in place of its class's


def _is_its_forward(module: torch.nn.Module) -> bool:
    """Return True if to call a module is to call its forward, and nothing besides."""
    kind, own = type(module), vars(module)
    of_all_modules = module_hooks._global_forward_hooks or module_hooks._global_forward_pre_hooks
    if of_all_modules or own["_forward_hooks"] or own["_forward_pre_hooks"]:
        return False
    return _CALL(kind) == _CALL(torch.nn.Module) and all(own.get(name) is None for name in _OWN_CALLS)


def module_behind(module: Any) -> Any:
    """Return the module behind a proxy; any other module as it is."""
    return module._onediff_module if type(module) is ModuleProxy else module


def server_behind(module: Any) -> Any:
    """Return what serves a proxy's methods; None for any other module."""
    return module._onediff_serve if type(module) is ModuleProxy else None


def served_instead(stand_in: ModuleProxy, serve: Serve) -> ModuleProxy:
    """Return a proxy of the same module and methods whose calls ``serve`` serves."""
    return ModuleProxy(stand_in._onediff_module, serve, stand_in._onediff_methods)


def serves(module: Any, method: str) -> bool:
    """Return True if ``module`` is a proxy that serves ``method``."""
    return type(module) is ModuleProxy and method in module._onediff_methods


def _itself(module: torch.nn.Module) -> torch.nn.Module:
    return module
