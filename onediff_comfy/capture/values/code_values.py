"""Values that are code: the functions that run when something is called, and what identifies where they come from."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any


def functions_in(value: Any) -> Iterator[types.FunctionType]:
    """The functions that run when something is called."""
    if isinstance(value, (staticmethod, classmethod, types.MethodType)):
        value = value.__func__
    if isinstance(value, types.FunctionType):
        yield value
    elif isinstance(value, property):
        yield from (f for f in (value.fget, value.fset, value.fdel) if isinstance(f, types.FunctionType))
    elif isinstance(value, (functools.partial, functools.cached_property)):
        yield from functions_in(value.func)
    elif isinstance(value, functools._lru_cache_wrapper):
        yield from functions_in(value.__wrapped__)


def is_code(value: Any) -> bool:
    """Return True if a value is nothing but code: no object, or list of arguments, that it is called with as well."""
    if isinstance(value, types.BuiltinFunctionType):
        return value.__self__ is None or isinstance(value.__self__, (type, types.ModuleType))
    return isinstance(value, (types.FunctionType, type, functools._lru_cache_wrapper))


def identity(value: Any) -> str:
    """A function or class by where it was defined; of other things their type."""
    for function in functions_in(value):
        return f"{function.__globals__.get('__name__')}.{function.__qualname__}"
    named = value if isinstance(value, type) or hasattr(value, "__qualname__") else type(value)
    return f"{getattr(named, '__module__', None)}.{getattr(named, '__qualname__', None)}"


def module_of(scope: dict[str, Any]) -> str:
    """The name of the Python module whose globals these are."""
    return str(scope.get("__name__") or "")


def package_of(scope: dict[str, Any]) -> str:
    """The name of its topmost package."""
    return module_of(scope).partition(".")[0]
