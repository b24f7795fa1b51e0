"""Where the code comes from that a walk met, and where its names were looked up: whether all of it is the same."""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Callable
from typing import Any

from ..values.code_values import functions_in
from ..values.global_reads import Path, absolute_name
from ..values.name_resolution import Resolved
from .snapshot import Snapshot

_WRAPPERS = (property, staticmethod, classmethod, functools.cached_property)
_FILL_THEMSELVES = ("torch._ops", "torch._classes")  # with what they are asked for


class Sources:
    """Watches code by identity, and variables by name: those that were asked for, not all that a module has.

    Attributes:
        met: functions, classes and other things that are called, by ``id``.
    """

    def __init__(self) -> None:
        self.met: dict[int, Any] = {}  # held, so that no other object gets the id meanwhile
        self._snapshot = Snapshot()

    def meet(self, value: Any) -> bool:
        """Watch what may be called, with what it is made of. Return False if it is watched already."""
        if id(value) in self.met:
            return False
        self.met[id(value)] = value
        self._snapshot.add(value)
        for member in vars(value).values() if isinstance(value, type) else (value,):
            if isinstance(member, _WRAPPERS):
                self._snapshot.add(member)
            for function in functions_in(member):
                self._snapshot.add(function)
        return True

    def read(self, path: Path, found: Resolved | None, function: types.FunctionType) -> None:
        """Watch whatever decides on what ``path`` means in a function, where ``found`` was found."""
        if path.root == "global":
            self._snapshot.add_variable(function.__globals__, path.name)
        elif path.root == "module":
            package = str(function.__globals__.get("__package__") or "")
            self._snapshot.add_variable(sys.modules, absolute_name(path.name, package))
        if found is not None:
            for holder, (kind, name) in zip(found.way, path.steps, strict=False):
                if kind == "[]":
                    self._item(holder, name)
                else:
                    self._attribute(holder, name)

    def module(self, module: types.ModuleType) -> None:
        """Watch all variables of a module."""
        self._snapshot.add(vars(module))

    def imported(self, name: str) -> None:
        """Watch which module has this name."""
        self._snapshot.add_variable(sys.modules, name)

    def environment(self) -> None:
        """Watch the variables of the environment."""
        self._snapshot.add(vars(os.environ)["_data"])

    def take(self) -> None:
        """Note what is there now."""
        self._snapshot.take()

    def hold(self) -> bool:
        """Return True if all that was met and read is what it was."""
        return self._snapshot.holds()

    def restorer(self) -> Callable[[], None]:
        """Return what puts back numbers that code counts with: variables and closures."""
        return self._snapshot.numbers_restorer()

    def _item(self, holder: Any, key: Any) -> None:
        """Watch what an item of a container is."""
        if type(holder) is dict:
            self._snapshot.add_variable(holder, key)
        else:
            self._snapshot.add(holder)

    def _attribute(self, holder: Any, name: str) -> None:
        """Watch what an attribute of ``holder`` is."""
        if type(holder).__module__ in _FILL_THEMSELVES:
            return
        if isinstance(holder, types.ModuleType):
            for variable in (name, "__getattr__"):
                self._snapshot.add_variable(vars(holder), variable)
            return
        kind = holder if isinstance(holder, type) else type(holder)
        for base in kind.__mro__:
            self._snapshot.add(base)
        if not isinstance(holder, type):
            self._snapshot.add(holder)
