"""Where the code comes from that a walk met, and where its names were looked up: whether all of it is the same."""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Callable
from typing import Any

from ..values.bytecode import names_read, with_nested
from ..values.code_values import functions_in, is_code
from ..values.global_reads import Path, absolute_name
from ..values.name_resolution import Resolved
from .code_ownership import CodeOwnership
from .snapshot import Snapshot

_WRAPPERS = (property, staticmethod, classmethod, functools.cached_property)
_OF_EACH_OBJECT = frozenset(("id", "hash", "__hash__", "__repr__"))
"""What gives a number, or a text with it, that is another for each object, and the same whichever is asked of."""
_FILL_THEMSELVES = ("torch._ops", "torch._classes")  # with what they are asked for


class Sources:
    """Watches code by identity, and variables by name: those that were asked for, not all that a module has.

    Args:
        owner: tells whose code is.

    Attributes:
        met: functions, classes and other things that are called, by ``id``.
        extended: classes with methods of extensions.
        of_extensions: what code of extensions reads, and what is in it. Somebody may change that for each step.
        tell_objects_apart: code of extensions may ask which object it runs on, by a number that is another for each.
    """

    def __init__(self, owner: CodeOwnership) -> None:
        self._owner = owner
        self.met: dict[int, Any] = {}  # held, so that no other object gets the id meanwhile
        self.extended = set[type]()
        self.tell_objects_apart = False
        self._snapshot, self.of_extensions = Snapshot(), Snapshot(with_kinds=False)  # the latter in each call

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

    def follow(self, function: types.FunctionType) -> None:
        """Note that a function runs."""
        asks = any(not _OF_EACH_OBJECT.isdisjoint(names_read(code)) for code in with_nested(function.__code__))
        self.tell_objects_apart |= asks and self._owner.is_of_extension(function)

    def read(self, path: Path, found: Resolved | None, function: types.FunctionType) -> None:
        """Watch whatever decides on what ``path`` means in a function, where ``found`` was found."""
        _watch_way(self._snapshot, path, found, function, lambda _kind: True)
        if self._owner.is_of_extension(function):
            _watch_way(self.of_extensions, path, found, function, lambda kind: self._owner.counts(kind.__module__))
            self.of_extensions.add(function)
            self.tell_objects_apart |= found is not None and (found.value is id or found.value is hash)
            if found is not None and self._has_content(found.value):
                self.of_extensions.add_nested(found.value)

    def _has_content(self, value: Any) -> bool:
        """Return True for data, and for an extension's object that is called. Code is followed itself."""
        return not is_code(value) and (not callable(value) or self._owner.counts(type(value).__module__))

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
        self.of_extensions.take()

    def hold(self) -> bool:
        """Return True if all that was met and read is what it was."""
        return self._snapshot.holds()

    def restorer(self) -> Callable[[], None]:
        """Return what puts back numbers that code counts with: variables and closures."""
        return self._snapshot.numbers_restorer()


def _watch_way(
    snapshot: Snapshot,
    path: Path,
    found: Resolved | None,
    function: types.FunctionType,
    counts: Callable[[type], bool],
) -> None:
    """Watch where the names of a path are looked up.

    Args:
        counts: tells of which classes of objects on the way all members are watched.
    """
    if path.root == "global":
        snapshot.add_variable(function.__globals__, path.name)
    elif path.root == "module":
        package = str(function.__globals__.get("__package__") or "")
        snapshot.add_variable(sys.modules, absolute_name(path.name, package))
    if found is not None:
        for holder, (kind, name) in zip(found.way, path.steps, strict=False):
            if kind == "[]":
                _watch_item(snapshot, holder, name)
            else:
                _watch_attribute(snapshot, holder, name, counts)


def _watch_item(snapshot: Snapshot, holder: Any, key: Any) -> None:
    """Watch what an item of a container is."""
    if type(holder) is dict:
        snapshot.add_variable(holder, key)
    else:
        snapshot.add(holder)


def _watch_attribute(snapshot: Snapshot, holder: Any, name: str, counts: Callable[[type], bool]) -> None:
    """Watch what an attribute of ``holder`` is."""
    if type(holder).__module__ in _FILL_THEMSELVES:
        return
    if isinstance(holder, types.ModuleType):
        for variable in (name, "__getattr__"):
            snapshot.add_variable(vars(holder), variable)
        return
    for base in (holder if isinstance(holder, type) else type(holder)).__mro__:
        if counts(base):
            snapshot.add(base)
    if not isinstance(holder, type):
        snapshot.add(holder)
