"""What code reaches by name: the functions that it calls, and those that they call, as they are now.

Extensions replace functions of the host and of torch while it runs, and the code that calls them stays the same. So
names are followed from function to function: globals, attributes of modules, closures, methods of classes. Of
libraries and of Python only the names are taken, their versions are known.

Of the host's own code, which is known too, only what is not as the host wrote it is put down. How far its names lead
depends on which of its modules a process has imported by then, and the same model has to be the same in all.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import types
from typing import Any

import torch

from ..values.code_values import functions_in, identity, is_code, module_of
from ..values.global_reads import Path, cells, module_named, paths, strings
from ..values.name_resolution import Resolved, resolve
from ..values.value_text import CLASS_BOOKKEEPING, Describer, attributes_of, code_digest, held_by
from .code_ownership import CodeOwnership, HostCode
from .identity_lines import IdentityLines, OpenVariable, OpenVariables
from .sources import Sources
from .unread_attributes import Reads

_NAMES_ONLY = CLASS_BOOKKEEPING - {"__match_args__"}  # which a pattern reads
_NEVER_READ = frozenset(("__module__", "__qualname__", "__dict__", "__weakref__", "_abc_impl"))  # or part of a name
_OF_CLASSES = (
    *(types.FunctionType, staticmethod, classmethod, property),
    *(types.MemberDescriptorType, types.GetSetDescriptorType),  # slots; instances hold what is in them
    type(vars(Path)["root"]),  # and the fields of named tuples
)
_OF_FILES = frozenset(("__file__", "__spec__", "__loader__", "__path__", "__cached__", "__builtins__"))
_OF_ENVIRONMENT = (os.environ, os.getenv)
_BY_TEXT = frozenset(("globals", "eval", "exec"))  # anything of the module that calls them
_LOOKS_UP = frozenset(("getattr", "vars", "dir"))


class CodeReachability:
    """Collects what code reaches, from whatever is added.

    Args:
        describer: describes what the code reads, and has met code on its way that is to be followed too.
        host: the host's own code.
        walked: packages that are followed though they may be installed as libraries: those of the layers.

    Attributes:
        reads: which attributes the code may read, as far as it was followed.
        identity: the lines that identify what was reached.
        sources: the functions and classes that were met so far, and where names were looked up.
    """

    def __init__(self, describer: Describer, host: HostCode, walked: frozenset[str]) -> None:
        self._describer, self._owner = describer, CodeOwnership(host, walked)
        self.reads, self.identity = Reads(), IdentityLines(describer)
        self._open = OpenVariables(self.reads, describer)
        self.sources = Sources(self._owner)
        self._described = 0  # of the code that the describer has met, how much was added
        self._to_follow: list[types.FunctionType] = []
        self._layer_classes: set[type] = set()
        self._built: set[type] = set()  # classes of layers that no code is known to build more of

    def follow(self) -> None:
        """Go through what was added, and what that reaches."""
        while self._to_follow or self._described < len(self._describer.code) or self._count_open():
            while self._described < len(self._describer.code):
                self._add_held(self._describer.code[self._described])
                self._described += 1
            while self._to_follow:
                self._follow(self._to_follow.pop())

    def add(self, value: Any) -> None:
        """``value`` may be called, or its methods: a function, a class, or an object."""
        if isinstance(value, type):
            for base in value.__mro__:
                if self.sources.meet(base):
                    self._add_class(base)
            return
        if not self.sources.meet(value):
            return
        if isinstance(value, types.FunctionType):
            self.reads.add_value(value)
            if not self._owner.is_library(value.__globals__):
                self._to_follow.append(value)
            else:
                self._add_of_library(value)
            return
        functions: list[Any] = list(functions_in(value))
        for code in functions or [type(value)]:
            self.add(code)

    def add_layer_class(self, kind: type) -> None:
        """``kind`` is the class of a layer, which is built. Of a library's counts what its methods call, a step far."""
        if kind in self._layer_classes:
            return
        self._layer_classes.add(kind)
        if id(kind) not in self.sources.met:
            self._built.add(kind)
        self.add(kind)
        if kind not in (torch.nn.Module, object):
            for function in _functions_of_class(kind).values():
                if self._owner.is_library(function.__globals__):
                    self._resolve_names(function)

    def _add_held(self, code: Any) -> None:
        """What a layer, or something else that was described, is made of."""
        if isinstance(code, types.ModuleType):
            self._add_module(code)
        elif isinstance(code, type) and issubclass(code, torch.nn.Module):
            for base in code.__mro__:
                self.add_layer_class(base)
        else:
            self.add(code)

    def _add_of_library(self, function: types.FunctionType) -> None:
        """A library's function counts by its name, but for what an extension has changed in it.

        It may keep a function that is not a library's, as ``torch.no_grad()`` does as a decorator.
        """
        defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        texts = [self.identity.constant_of_library(value, "") or identity(value) for value in defaults]
        if texts:
            self.identity.add(f"{identity(function)}() {texts}")
        if not self._owner.is_as_library_wrote(function):
            self.identity.add(f"{identity(function)} {code_digest(function.__code__)}")
            self._resolve_names(function)
        held = [value for _, value in cells(function)]
        own = [f for value in held for f in functions_in(value) if not self._owner.is_library(f.__globals__)]
        for code in own:
            self.identity.add(f"{identity(function)} of {identity(code)}")
            self.add(code)

    def _add_module(self, module: types.ModuleType, everything: bool = False) -> None:
        """A module is held, or handed on: what any code may read of it counts, or all."""
        scope = vars(module)
        if self._owner.is_library(scope) or scope.get("__name__") in self._owner.host.machinery:
            return
        self.sources.module(module)
        only_code = self._owner.is_host(scope)  # which may be replaced; all else of it is part of every key
        for name, value in scope.items():
            if not (isinstance(value, types.ModuleType) or name.startswith("__") or only_code > callable(value)):
                self._open.add(module.__name__, name, OpenVariable(value, module_of(scope), everything))

    def _count_open(self) -> bool:
        """Count what is open and read. Return True if there was any."""
        any_read, new = self._open.take_read()
        for where, variable in new:
            of_host = variable.owner.partition(".")[0] == self._owner.host.package
            if of_host and self._owner.is_as_imported(variable.value, where.rpartition(".")[2]):
                self.add(variable.value)
            else:
                self._count(where, variable.value, variable.owner)
        return any_read

    def _add_class(self, kind: type) -> None:
        """The methods of a class, and its attributes; of a library's class the methods that somebody has put there."""
        members = {name: member for name, member in vars(kind).items() if name not in _NAMES_ONLY}
        self.reads.add_value(list(members.values()))
        of_host = kind.__module__.partition(".")[0] == self._owner.host.package
        for name, function in _functions_of_class(kind).items():
            own = not self._owner.is_as_library_wrote(function)
            if own and not (name == "__init__" and kind in self._built):
                if not (of_host and self._owner.is_as_written(function)):
                    self.identity.add(f"{identity(kind)}.{name} is {identity(function)}")
                if self._owner.is_of_extension(function):
                    self.sources.extended.add(kind)
                self.add(function)
                if name in ("__getattr__", "__getattribute__"):
                    self.reads.add_everything()
        if self._owner.counts(kind.__module__):
            if type(kind) is not type:
                self.add(type(kind))
            for name, member in members.items():
                if name not in CLASS_BOOKKEEPING and not isinstance(member, _OF_CLASSES):
                    self._count_of_class(kind, name, member)
        elif kind in self._layer_classes and self._owner.is_of_library(kind.__module__):
            for name, member in members.items():
                if (text := self.identity.constant_of_library(member, kind.__module__)) is not None:
                    self.identity.add(f"{identity(kind)}.{name} {text}")
        for name in CLASS_BOOKKEEPING.difference(_NEVER_READ).intersection(vars(kind)):
            if not _noted_by_python(kind, name):
                self._open.add(identity(kind), name, OpenVariable(vars(kind)[name], kind.__module__))

    def _count_of_class(self, kind: type, name: str, member: Any) -> None:
        """An attribute of a class. What cannot be described counts only if it is read."""
        try:
            self.identity.add(f"{identity(kind)}.{name} {self._describer.describe(member)}")
        except Exception:  # which one, is said where it is read
            self._open.add(identity(kind), name, OpenVariable(member, kind.__module__))

    def _follow(self, function: types.FunctionType) -> None:
        if self._owner.is_machinery(function):
            return
        self.reads.add(function)
        self.sources.follow(function)
        state = []
        in_cells = [value for _, value in cells(function)]
        for held in () if id(function) in self._describer.known else (*held_by(function), *attributes_of(function)):
            self.add(held)
            self.reads.add_value(held)
            if isinstance(held, types.ModuleType) and any(held is value for value in in_cells):
                state.append(f"python module {held.__name__}")  # what is read of it is known by its paths
            else:
                state.append(self.identity.described(f"{identity(function)}()", held))
        if not self._owner.is_as_written(function):
            self.identity.add(f"{identity(function)} {code_digest(function.__code__)} {state}")
        elif state:
            self.identity.add(f"{identity(function)} {state}")
        self._resolve_names(function)

    def _resolve_names(self, function: types.FunctionType) -> None:
        resolved = [(path, resolve(path, function)) for path in paths(function.__code__)]
        found = [(path, read) for path, read in resolved if read is None or not self._owner.is_bookkeeping(read)]
        for path, read in found:
            self.sources.read(path, read, function)
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
                self.identity.add_environment(function)
                self.sources.environment()
            elif path.root == "cell" and id(function) not in self._describer.known:
                if path.steps:  # what it holds is described as a whole, but for modules
                    self._count(where, read.value, read.owner)
            elif path.root != "cell" or (path.steps and isinstance(read.way[0], types.ModuleType)):
                self._count_called(function, where, path, read)
            if read.value is importlib.import_module or read.value is sys.modules:
                self._count_imports(function)
        if "__import__" in builtins:
            self._count_imports(function)
        if by_text and not (self._owner.is_library(function.__globals__) or self._owner.is_as_written(function)):
            self.sources.imported(module_of(function.__globals__))
            own = _module_of(function)
            if own is not None:  # code finds variables of its own module, nobody knows which
                self._add_module(own, everything=True)

    def _count_called(self, function: types.FunctionType, where: str, path: Path, read: Resolved) -> None:
        """What is called by a name counts by that it is; what is read besides counts by its content."""
        if callable(read.value):
            name = path.steps[read.steps - 1][1] if read.steps else path.name
            if not self._owner.is_host(function.__globals__) or not self._owner.is_as_imported(read.value, str(name)):
                self.identity.add(f"{where} is {identity(read.value)}")
            self.add(read.value)
            if isinstance(read.value, type) and read.value in self._built:
                for base in self._built.intersection(read.value.__mro__):  # code may build another layer of the class
                    self._built.remove(base)
                    self.add(vars(base).get("__init__"))
        if not is_code(read.value):
            self._count(where, read.value, read.owner)

    def _count(self, where: str, value: Any, owner: str) -> None:
        """``value`` is read of a variable that ``owner``, a Python module or a class in it, has."""
        if isinstance(value, (types.FunctionType, type)):
            self.identity.add(f"{where} is {identity(value)}")
            self.add(value)
        elif self._owner.counts(owner):
            self.identity.add(f"{where} = {self.identity.described(where, value)}")
        elif self._owner.is_of_library(owner) and (text := self.identity.constant_of_library(value, owner)) is not None:
            self.identity.add(f"{where} = {text}")

    def _count_imports(self, function: types.FunctionType) -> None:
        """Code finds modules by strings."""
        for name in strings(function.__code__):
            self.sources.imported(name)
            if (module := module_named(name, "")) is not None:
                self._add_module(module)


def _module_of(function: types.FunctionType) -> types.ModuleType | None:
    """Return the Python module whose globals a function has; None where it has others."""
    module = sys.modules.get(module_of(function.__globals__))
    return module if module is not None and vars(module) is function.__globals__ else None


def _noted_by_python(kind: type, name: str) -> bool:
    """Return True for what Python itself notes on a class, in one process and not, or in another way, in the next."""
    value = vars(kind)[name]
    if name == "__slotnames__":  # what an object of it has to be copied
        return type(value) is list and all(type(slot) is str and hasattr(kind, slot) for slot in value)
    if name == "__static_attributes__":  # in any order
        return type(value) is tuple and all(type(attribute) is str for attribute in value)
    if name == "__doc__" and "__dataclass_fields__" in vars(kind):  # its fields, where a set is printed in any order
        return bool(value == kind.__name__ + str(inspect.signature(kind)).replace(" -> None", ""))
    return False


def _functions_of_class(kind: type) -> dict[str, types.FunctionType]:
    return {
        f"{name}{number or ''}": function
        for name, member in vars(kind).items()
        for number, function in enumerate(functions_in(member))
    }
