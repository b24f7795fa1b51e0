"""What code reaches by name: the functions that it calls, and those that they call, as they are now.

Extensions replace functions of the host and of torch while it runs, and the code that calls them stays the same. So
names are followed from function to function: globals, attributes of modules, closures, methods of classes. Of
libraries and of Python only the names are taken, their versions are known.

Of the host's own code, which is known too, only what is not as the host wrote it is put down. How far its names lead
depends on which of its modules a process has imported by then, and the same model has to be the same in all.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .describe import CLASS_BOOKKEEPING, code_digest, held_by
from .left_behind import Reads, functions_within

_LIBRARY_FOLDERS = ("site-packages", "dist-packages")
_READS, _READS_ON = ("LOAD_GLOBAL", "LOAD_NAME"), ("LOAD_ATTR", "LOAD_METHOD")
_BETWEEN = ("EXTENDED_ARG", "PUSH_NULL", "CACHE")
_NAMES_ONLY = CLASS_BOOKKEEPING - {"__match_args__"}  # which a pattern reads
_VALUES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)

Dotted = tuple[str, ...]


@dataclass(frozen=True)
class HostCode:
    """The host's own code, which is part of every key.

    Attributes:
        package: its Python package. Its variables are bookkeeping, which changes all the time; those of other modules
            count as far as they are plain values.
        machinery: modules of it that are about where weights lie and not about what is computed with them. What they
            call is not followed.
    """

    package: str = ""
    machinery: frozenset[str] = frozenset()


NO_HOST = HostCode()


class Reached:
    """Collects what code reaches, from whatever is added.

    Args:
        state: describes defaults and what closures hold.
        host: the host's own code.
        walked: packages that are followed though they may be installed as libraries: those of the layers.

    Attributes:
        reads: which attributes the code may read, as far as it was followed.
    """

    def __init__(self, state: Callable[[Any], str], host: HostCode, walked: frozenset[str]) -> None:
        self._state, self._host, self._walked = state, host, walked
        self._lines: set[str] = set()
        self._seen: dict[int, Any] = {}  # held, so that no other object gets the id meanwhile
        self._to_follow: list[types.FunctionType] = []
        self.reads = Reads()

    def follow(self) -> None:
        """Go through what was added, and what that reaches."""
        while self._to_follow:
            self._follow(self._to_follow.pop())

    def lines(self) -> list[str]:
        """One for each function, for each name that a function calls something by, and for each plain value."""
        self.follow()
        return sorted(self._lines)

    def add(self, value: Any) -> None:
        """``value`` may be called, or its methods: a function, a class, or an object."""
        if id(value) in self._seen:
            return
        if isinstance(value, type):
            for base in value.__mro__:
                if id(base) not in self._seen:
                    self._seen[id(base)] = base
                    self._add_class(base)
            return
        self._seen[id(value)] = value
        if isinstance(value, types.FunctionType):
            self.reads.add_value(value)
            if not self._is_library(value.__globals__):
                self._to_follow.append(value)
            return
        functions: list[Any] = list(_functions_in(value))
        for code in functions or [type(value)]:
            self.add(code)

    def add_layer_class(self, kind: type) -> None:
        """``kind`` is a layer's class. Of a library's it counts what its methods call, one step far."""
        self.add(kind)
        if kind not in (torch.nn.Module, object):
            for function in _functions_of_class(kind).values():
                if self._is_library(function.__globals__):
                    self._resolve_names(function)

    def _add_class(self, kind: type) -> None:
        """The methods of a class; of a library's class those that somebody else has put there."""
        of_host = _package(kind.__module__) == self._host.package
        self.reads.add_value([member for name, member in vars(kind).items() if name not in _NAMES_ONLY])
        for name, function in _functions_of_class(kind).items():
            if not self._is_library(function.__globals__):
                if not (of_host and self._as_written(function)):
                    self._lines.add(f"{_identity(kind)}.{name} is {_identity(function)}")
                self.add(function)
                if name in ("__getattr__", "__getattribute__"):
                    self.reads.add_everything()

    def _follow(self, function: types.FunctionType) -> None:
        if function.__globals__.get("__name__") in self._host.machinery and self._as_written(function):
            return
        self.reads.add(function)
        state = []
        for held in held_by(function):
            self.add(held)
            self.reads.add_value(held)
            state.append("code" if list(_functions_in(held)) else self._state(held))
        if not self._as_written(function):
            self._lines.add(f"{_identity(function)} {code_digest(function.__code__)} {state}")
        self._resolve_names(function)

    def _resolve_names(self, function: types.FunctionType) -> None:
        scope = function.__globals__
        module = _module(scope)
        for dotted in _names(function.__code__):
            read, value = _resolved(scope, dotted)
            if value is None:
                continue
            self.reads.add_value(value)
            self._count_table(value)
            name = f"{module}: {'.'.join(dotted[:read])}"
            if callable(value):
                if _package(module) != self._host.package or not self._as_imported(value, dotted[read - 1]):
                    self._lines.add(f"{name} is {_identity(value)}")
                self.add(value)
            elif not isinstance(value, types.ModuleType) and self._counts(scope, dotted[: read - 1]):
                self._lines.add(f"{name} = {value!r}" if _is_plain(value) else f"{name} is {_identity(value)}")
                self.add(type(value))

    def _count_table(self, table: Any) -> None:
        """Functions of other files may be called out of a table."""
        if isinstance(table, (dict, list, tuple)):
            for function in functions_within(table):
                if not self._is_library(function.__globals__):
                    self.reads.add(function)

    def _as_written(self, function: types.FunctionType) -> bool:
        """Whether this is the host's function, from the host's file."""
        scope = function.__globals__
        return _package(_module(scope)) == self._host.package and function.__code__.co_filename == scope.get("__file__")

    def _as_imported(self, value: Any, name: str) -> bool:
        """Whether what the host calls by ``name`` has this name where it was defined, in the host or in a library."""
        for function in _functions_in(value):
            if not (self._as_written(function) or self._is_library(function.__globals__)):
                return False
        return _identity(value).rpartition(".")[2] == name

    def _counts(self, scope: dict[str, Any], path: Dotted) -> bool:
        """Whether a variable, of the module at ``path`` or of this one, is neither a library's nor the host's."""
        if path:
            _, holder = _resolved(scope, path)
            scope = vars(holder) if isinstance(holder, types.ModuleType) else scope
        return _package(_module(scope)) != self._host.package and not self._is_library(scope)

    def _is_library(self, scope: dict[str, Any]) -> bool:
        package = _package(_module(scope))
        if package in ("torch", "torchvision", "torchaudio", "triton") or package in sys.stdlib_module_names:
            return True
        file = str(scope.get("__file__") or "").replace("\\", "/")
        return package not in self._walked and any(f"/{folder}/" in file for folder in _LIBRARY_FOLDERS)


def _functions_of_class(kind: type) -> dict[str, types.FunctionType]:
    return {
        f"{name}{number or ''}": function
        for name, member in vars(kind).items()
        for number, function in enumerate(_functions_in(member))
    }


def _functions_in(value: Any) -> Iterator[types.FunctionType]:
    """The functions that run when something is called."""
    if isinstance(value, (staticmethod, classmethod, types.MethodType)):
        value = value.__func__
    if isinstance(value, types.FunctionType):
        yield value
    elif isinstance(value, property):
        yield from (f for f in (value.fget, value.fset, value.fdel) if isinstance(f, types.FunctionType))
    elif isinstance(value, (functools.partial, functools.cached_property)):
        yield from _functions_in(value.func)
    elif isinstance(value, functools._lru_cache_wrapper):
        yield from _functions_in(value.__wrapped__)


def _resolved(scope: dict[str, Any], dotted: Dotted) -> tuple[int, Any]:
    """What a name is, and by how many of its parts: attributes are looked up in modules only, where nothing runs."""
    value, read = scope.get(dotted[0]), 1
    for name in dotted[1:]:
        if not isinstance(value, types.ModuleType) or name not in vars(value):
            break
        value, read = vars(value)[name], read + 1
    return read, value


def _module(scope: dict[str, Any]) -> str:
    """The name of the module whose globals these are."""
    return str(scope.get("__name__") or "")


def _package(module: str) -> str:
    return module.partition(".")[0]


def _is_plain(value: Any) -> bool:
    return isinstance(value, _VALUES) or (type(value) is tuple and all(map(_is_plain, value)))


def _identity(value: Any) -> str:
    """A function or class by where it was defined; of other things their type."""
    for function in _functions_in(value):
        return f"{function.__globals__.get('__name__')}.{function.__qualname__}"
    named = value if isinstance(value, type) or hasattr(value, "__qualname__") else type(value)
    return f"{getattr(named, '__module__', None)}.{getattr(named, '__qualname__', None)}"


@functools.lru_cache(maxsize=8192)
def _names(code: types.CodeType) -> frozenset[Dotted]:
    """The global names that code reads, with the attributes that it reads of them."""
    found: set[Dotted] = set()
    dotted: Dotted = ()
    for instruction in dis.get_instructions(code):
        if instruction.opname in _BETWEEN:
            continue
        if instruction.opname in _READS_ON and dotted:
            dotted += (instruction.argval,)
            continue
        if dotted:
            found.add(dotted)
        dotted = (instruction.argval,) if instruction.opname in _READS else ()
    for constant in code.co_consts:
        if inspect.iscode(constant):
            found |= _names(constant)
    return frozenset(found)
