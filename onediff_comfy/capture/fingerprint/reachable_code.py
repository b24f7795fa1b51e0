"""What code reaches by name: the functions that it calls, and those that they call, as they are now.

Extensions replace functions of the host and of torch while it runs, and the code that calls them stays the same. So
names are followed from function to function: globals, attributes of modules, closures, methods of classes. Of
libraries and of Python only the names are taken, their versions are known.

Of the host's own code, which is known too, only what is not as the host wrote it is put down. How far its names lead
depends on which of its modules a process has imported by then, and the same model has to be the same in all.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...messages import Message, first_line, message
from .code_values import functions_in, identity, is_code, module_of, package_of
from .global_reads import Path, cells, module_named, paths, strings
from .name_resolution import Resolved, resolve
from .unread_attributes import Reads
from .value_text import CLASS_BOOKKEEPING, Describer, Indescribable, attributes_of, code_digest, held_by

_LIBRARY_FOLDERS = ("site-packages", "dist-packages")
_NAMES_ONLY = CLASS_BOOKKEEPING - {"__match_args__"}  # which a pattern reads
_OF_CLASSES = (
    *(types.FunctionType, staticmethod, classmethod, property),
    *(types.MemberDescriptorType, types.GetSetDescriptorType),  # slots; instances hold what is in them
    type(vars(Path)["root"]),  # and the fields of named tuples
)
_OF_FILES = frozenset(("__file__", "__spec__", "__loader__", "__path__", "__cached__", "__builtins__"))
_OF_ENVIRONMENT = (os.environ, os.getenv)
_BY_TEXT = frozenset(("globals", "eval", "exec"))  # anything of the module that calls them
_LOOKS_UP = frozenset(("getattr", "vars", "dir"))


@dataclass(frozen=True)
class HostCode:
    """The host's own code, which is part of every key.

    Attributes:
        package: its Python package.
        machinery: modules of it that are about where weights lie and not about what is computed with them. What they
            call is not followed, and their variables are bookkeeping, which changes all the time.
    """

    package: str = ""
    machinery: frozenset[str] = frozenset()


NO_HOST = HostCode()


class _Open(NamedTuple):
    """A variable that counts if code may read it.

    Attributes:
        value: what it holds.
        owner: the Python module that it belongs to.
        read: whether it is known to be read.
    """

    value: Any
    owner: str
    read: bool = False


class CodeReachability:
    """Collects what code reaches, from whatever is added.

    Args:
        describer: describes what the code reads, and has met code on its way that is to be followed too.
        host: the host's own code.
        walked: packages that are followed though they may be installed as libraries: those of the layers.

    Attributes:
        reads: which attributes the code may read, as far as it was followed.
        refusal: why what was reached cannot be part of an identity, if so.
    """

    def __init__(self, describer: Describer, host: HostCode, walked: frozenset[str]) -> None:
        self._describer, self._host, self._walked = describer, host, walked
        self._lines: set[str] = set()
        self._libraries: dict[tuple[Any, Any], bool] = {}  # modules by name and file, whether they are a library's
        self._seen: dict[int, Any] = {}  # held, so that no other object gets the id meanwhile
        self._described = 0  # of the code that the describer has met, how much was added
        self._to_follow: list[types.FunctionType] = []
        self._open: dict[tuple[str, str], _Open] = {}  # by where they are, and name
        self._layer_classes: set[type] = set()
        self._built: set[type] = set()  # classes of layers that no code is known to build more of
        self._counted: set[tuple[str, str]] = set()  # of those
        self.reads = Reads()
        self.refusal: Message | None = None

    def follow(self) -> None:
        """Go through what was added, and what that reaches."""
        while self._to_follow or self._described < len(self._describer.code) or self._count_open():
            while self._described < len(self._describer.code):
                self._add_held(self._describer.code[self._described])
                self._described += 1
            while self._to_follow:
                self._follow(self._to_follow.pop())

    def lines(self) -> list[str]:
        """One for each function, for each name that a function calls something by, and for each value that is read."""
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
            else:
                self._add_decorated(value)
            return
        functions: list[Any] = list(functions_in(value))
        for code in functions or [type(value)]:
            self.add(code)

    def add_layer_class(self, kind: type) -> None:
        """``kind`` is the class of a layer, which is built. Of a library's counts what its methods call, a step far."""
        if kind in self._layer_classes:
            return
        self._layer_classes.add(kind)
        if id(kind) not in self._seen:
            self._built.add(kind)
        self.add(kind)
        if kind not in (torch.nn.Module, object):
            for function in _functions_of_class(kind).values():
                if self._is_library(function.__globals__):
                    self._resolve_names(function)

    def _add_constructors(self, kind: type) -> None:
        """Code may build another layer of a class."""
        for base in self._built.intersection(kind.__mro__):
            self._built.remove(base)
            self.add(vars(base).get("__init__"))

    def _add_held(self, code: Any) -> None:
        """What a layer, or something else that was described, is made of."""
        if isinstance(code, types.ModuleType):
            self._add_module(code)
        elif isinstance(code, type) and issubclass(code, torch.nn.Module):
            for base in code.__mro__:
                self.add_layer_class(base)
        else:
            self.add(code)

    def _add_decorated(self, function: types.FunctionType) -> None:
        """A library's function that keeps one which is not a library's: ``torch.no_grad()`` as a decorator."""
        held = [value for _, value in cells(function)]
        own = [f for value in held for f in functions_in(value) if not self._is_library(f.__globals__)]
        for code in own:
            self._lines.add(f"{identity(function)} of {identity(code)}")
            self.add(code)

    def _add_module(self, module: types.ModuleType, everything: bool = False) -> None:
        """A module is held, or handed on: what any code may read of it counts, or all."""
        scope = vars(module)
        if self._is_library(scope) or package_of(scope) == self._host.package:
            return
        for name, value in scope.items():
            if not (isinstance(value, types.ModuleType) or name.startswith("__")):
                self._open[module.__name__, name] = _Open(value, module_of(scope), everything)

    def _count_open(self) -> bool:
        """Count what is open and read; whether there was any."""
        known = self._describer.strings
        read = [key for key, of in self._open.items() if of.read or key[1] in known or self.reads.may_read(key[1])]
        for key in read:
            found = self._open.pop(key)
            if key not in self._counted:
                self._counted.add(key)
                self._count(".".join(key), found.value, found.owner)
        return bool(read)

    def _add_class(self, kind: type) -> None:
        """The methods of a class, and its attributes; of a library's class the methods that somebody has put there."""
        members = {name: member for name, member in vars(kind).items() if name not in _NAMES_ONLY}
        self.reads.add_value(list(members.values()))
        of_host = kind.__module__.partition(".")[0] == self._host.package
        for name, function in _functions_of_class(kind).items():
            if not self._is_library(function.__globals__) and not (name == "__init__" and kind in self._built):
                if not (of_host and self._as_written(function)):
                    self._lines.add(f"{identity(kind)}.{name} is {identity(function)}")
                self.add(function)
                if name in ("__getattr__", "__getattribute__"):
                    self.reads.add_everything()
        if self._counts(kind.__module__):
            if type(kind) is not type:
                self.add(type(kind))
            for name, member in members.items():
                if name not in CLASS_BOOKKEEPING and not isinstance(member, _OF_CLASSES):
                    self._count_of_class(kind, name, member)

    def _count_of_class(self, kind: type, name: str, member: Any) -> None:
        """An attribute of a class. What cannot be described counts only if it is read."""
        try:
            self._lines.add(f"{identity(kind)}.{name} {self._describer.describe(member)}")
        except Exception:  # which one, is said where it is read
            self._open[identity(kind), name] = _Open(member, kind.__module__)

    def _follow(self, function: types.FunctionType) -> None:
        if function.__globals__.get("__name__") in self._host.machinery and self._as_written(function):
            return
        self.reads.add(function)
        state = []
        in_cells = [value for _, value in cells(function)]
        for held in (*held_by(function), *attributes_of(function)):
            self.add(held)
            self.reads.add_value(held)
            if isinstance(held, types.ModuleType) and any(held is value for value in in_cells):
                state.append(f"python module {held.__name__}")  # what is read of it is known by its paths
            else:
                state.append(self._described_as(f"{identity(function)}()", held))
        if not self._as_written(function):
            self._lines.add(f"{identity(function)} {code_digest(function.__code__)} {state}")
        elif state:
            self._lines.add(f"{identity(function)} {state}")
        self._resolve_names(function)

    def _resolve_names(self, function: types.FunctionType) -> None:
        found = [(path, resolve(path, function)) for path in paths(function.__code__)]
        builtins = {path.name for path, read in found if read is None and path.root == "global"}
        looks_up = not builtins.isdisjoint(_LOOKS_UP)
        by_text = not builtins.isdisjoint(_BY_TEXT)
        for path, read in found:
            if read is None or path.name in _OF_FILES:
                continue
            where = f"{module_of(function.__globals__)}: {path.text(read.steps)}"
            self.reads.add_value(read.value)
            if isinstance(read.value, types.ModuleType):
                self._add_module(read.value, everything=looks_up and read.steps == len(path.steps))
            elif any(read.value is known for known in _OF_ENVIRONMENT):
                self._count_environment(function)
            elif path.root == "cell":  # what it holds is described as a whole, but for modules
                if path.steps:
                    self._count(where, read.value, read.owner)
            else:
                self._count_called(function, where, path, read)
            if read.value is importlib.import_module or read.value is sys.modules:
                self._count_imports(function)
        if "__import__" in builtins:
            self._count_imports(function)
        if by_text and not (self._is_library(function.__globals__) or self._as_written(function)):
            self._count_own_module(function)

    def _count_called(self, function: types.FunctionType, where: str, path: Path, read: Resolved) -> None:
        """What is called by a name counts by that it is; what is read besides counts by its content."""
        if callable(read.value):
            name = path.steps[read.steps - 1][1] if read.steps else path.name
            if package_of(function.__globals__) != self._host.package or not self._as_imported(read.value, str(name)):
                self._lines.add(f"{where} is {identity(read.value)}")
            self.add(read.value)
            if isinstance(read.value, type) and read.value in self._built:
                self._add_constructors(read.value)
        if not is_code(read.value):
            self._count(where, read.value, read.owner)

    def _count(self, where: str, value: Any, owner: str) -> None:
        """``value`` is read of a variable that ``owner``, a Python module or a class in it, has."""
        if isinstance(value, (types.FunctionType, type)):
            self._lines.add(f"{where} is {identity(value)}")
            self.add(value)
        elif self._counts(owner):
            self._lines.add(f"{where} = {self._described_as(where, value)}")

    def _described_as(self, where: str, value: Any) -> str:
        """The text for a value; of what has none its type, and a refusal."""
        try:
            return self._describer.describe(value)
        except Exception as error:  # of Indescribable, and of whatever an extension's object does when it is looked at
            what = error if isinstance(error, Indescribable) else f"{type(error).__name__}: {first_line(error)}"
            self.refusal = self.refusal or message(
                "the model's code reads {name}, which holds {error}; that cannot be part of a graph's identity",
                name=where.replace(": ", "."),
                error=what,
            )
            return f"some {identity(value)}"

    def _count_environment(self, function: types.FunctionType) -> None:
        """Variables of the environment whose names are in the code."""
        for name in strings(function.__code__):
            if name.isidentifier():
                self._lines.add(f"environment {name} = {os.environ.get(name)!r}")

    def _count_imports(self, function: types.FunctionType) -> None:
        """Code finds modules by strings."""
        for module in filter(None, (module_named(name, "") for name in strings(function.__code__))):
            self._add_module(module)

    def _count_own_module(self, function: types.FunctionType) -> None:
        """Code finds variables of its own module, nobody knows which."""
        own = sys.modules.get(module_of(function.__globals__))
        if own is not None and vars(own) is function.__globals__:
            self._add_module(own, everything=True)

    def _as_written(self, function: types.FunctionType) -> bool:
        """Whether this is the host's function, from the host's file."""
        scope = function.__globals__
        return package_of(scope) == self._host.package and function.__code__.co_filename == scope.get("__file__")

    def _as_imported(self, value: Any, name: str) -> bool:
        """Whether what the host calls by ``name`` has this name where it was defined, in the host or in a library."""
        for function in functions_in(value):
            if not (self._as_written(function) or self._is_library(function.__globals__)):
                return False
        return identity(value).rpartition(".")[2] == name

    def _counts(self, module: str) -> bool:
        """Whether variables of a module count: not a library's, nor those of the host's machinery."""
        scope = getattr(sys.modules.get(module), "__dict__", {"__name__": module})
        return module not in self._host.machinery and not self._is_library(scope)

    def _is_library(self, scope: dict[str, Any]) -> bool:
        module = scope.get("__name__"), scope.get("__file__")
        known = self._libraries.get(module)
        if known is None:
            known = self._libraries[module] = self._is_of_library(package_of(scope), str(module[1] or ""))
        return known

    def _is_of_library(self, package: str, file: str) -> bool:
        if package in ("torch", "torchvision", "torchaudio", "triton") or package in sys.stdlib_module_names:
            return True
        file = file.replace("\\", "/")
        return package not in self._walked and any(f"/{folder}/" in file for folder in _LIBRARY_FOLDERS)


def _functions_of_class(kind: type) -> dict[str, types.FunctionType]:
    return {
        f"{name}{number or ''}": function
        for name, member in vars(kind).items()
        for number, function in enumerate(functions_in(member))
    }
