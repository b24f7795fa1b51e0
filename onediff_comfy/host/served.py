"""A stand-in for one of the host's modules, for objects that have no wrappers of their own.

A MODEL has wrappers around its forward; a VAE, a ControlNet or a text encoder simply calls methods of a
module that it holds. A copy of such an object that holds a stand-in instead is accelerated, and the module
itself, which other copies share and the host's memory management moves about, stays as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from .process import metrics

Serve = Callable[[torch.nn.Module, Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]
"""A dispatcher: called with the module, its bound method, and the call's arguments."""


class ServedModule:
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
        return self._served(attribute) if name in self._onediff_methods else attribute

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._onediff_module, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._onediff_module, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._onediff_module
        if "forward" not in self._onediff_methods:
            return module(*args, **kwargs)
        if module._forward_hooks or module._forward_pre_hooks:  # a method has none: only calling the module runs them
            metrics().fell_back("the module has a forward hook from another extension")
            return module(*args, **kwargs)
        return self._served(module.forward)(*args, **kwargs)

    def __dir__(self) -> list[str]:
        return dir(self._onediff_module)

    def __repr__(self) -> str:
        return f"served {self._onediff_module!r}"

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        return _itself, (self._onediff_module,)

    def _served(self, method: Callable[..., Any]) -> Callable[..., Any]:
        module, serve = self._onediff_module, self._onediff_serve

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():  # somebody else's torch.compile is tracing through us
                return method(*args, **kwargs)
            return serve(module, method, args, kwargs)

        return call


def module_behind(module: Any) -> Any:
    """The module that a stand-in stands for; a module that is none as it is."""
    return module._onediff_module if type(module) is ServedModule else module


def server_behind(module: Any) -> Any:
    """What serves a stand-in's methods; None for a module that is none."""
    return module._onediff_serve if type(module) is ServedModule else None


def _itself(module: torch.nn.Module) -> torch.nn.Module:
    return module
