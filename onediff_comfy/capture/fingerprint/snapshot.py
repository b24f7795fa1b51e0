"""What mutable objects hold at one moment: whether they still hold it, and how to put it back."""

from __future__ import annotations

import abc
import array
import collections
import functools
import operator
import types
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from typing import Any, NamedTuple

import numpy as np
import torch

from ..values.tensors import has_fake
from ..values.value_text import CLASS_BOOKKEEPING, PLAIN

_MISSING = object()
_BUFFERS = (bytearray, memoryview, array.array)  # which are written as bytes where a large container is described
_LEFT = (  # as they are, where other things are put back
    *(*_BUFFERS, np.generic, functools.partial, types.MappingProxyType),
    *(property, staticmethod, classmethod),
)
_SEQUENCES = (list, set, collections.deque)
_MAPPINGS = (dict, types.MappingProxyType)
_NESTED = (*_MAPPINGS, *_SEQUENCES, tuple, frozenset)
_CONTAINERS = frozenset((dict, collections.OrderedDict, *_SEQUENCES))
_bases_of, _table_of = operator.attrgetter("__bases__"), operator.attrgetter("__dict__")
_of_class = operator.attrgetter("__class__")
_OF_FUNCTIONS = ("__code__", "__defaults__", "__kwdefaults__", "__dict__", "__doc__", "__name__", "__qualname__")
_of_function = operator.attrgetter(*_OF_FUNCTIONS)


class _Held(NamedTuple):
    """What was held at one moment.

    Attributes:
        sizes: of dicts and sequences.
        values: what they, functions, cells and variables held.
        contents: of each class, then of each other object.
        members: of classes; at the end of them a mark.
        registered: which classes are kinds of which, anywhere.
    """

    sizes: list[int]
    values: list[Any]
    contents: list[tuple[Any, ...]]
    members: list[Any]
    registered: object


class Snapshot:
    """Mutable objects, and what each of them holds.

    ``holds`` runs at every call: it compares by identity, and there is no step in Python for a dict, a list or a
    variable. ``changed`` takes equal plain values for the same, for a number that is calculated anew is another object.

    Args:
        with_kinds: also watch which classes are registered as kinds of which, anywhere. Whatever is imported may do so.
    """

    def __init__(self, with_kinds: bool = True) -> None:
        self._with_kinds = with_kinds
        self._dicts: list[dict[Any, Any]] = []
        self._sequences: list[Any] = []
        self._classes: list[type] = []
        self._functions: list[types.FunctionType] = []
        self._cells: list[types.CellType] = []
        self._others: list[Any] = []
        self._variables: list[tuple[dict[Any, Any], Any]] = []
        self._known: dict[object, Any] = {}  # held, so that no other object gets the id meanwhile
        self._held = _Held([], [], [], [], None)

    def add(self, value: Any) -> None:
        """Watch an object, but not what it holds in its turn. A function has its variables, and named defaults."""
        kind = type(value)
        if kind in PLAIN or id(value) in self._known or isinstance(value, (types.ModuleType, torch.Tensor)):
            return
        self._known[id(value)] = value
        if isinstance(value, dict):
            self._dicts.append(value)
        elif isinstance(value, _SEQUENCES):
            self._sequences.append(value)
        if isinstance(value, type):
            self._classes.append(value)
        elif kind is types.FunctionType:
            self._functions.append(value)
            for own in (value.__dict__, value.__kwdefaults__, *(value.__closure__ or ())):
                self.add(own)
        elif kind is types.CellType:
            self._cells.append(value)
        elif kind not in _CONTAINERS and kind not in (tuple, frozenset):
            self._others.append(value)
            self.add(getattr(value, "__dict__", None))

    def add_nested(self, value: Any) -> None:
        """As ``add``; of a container watch what is in it, too, at any depth."""
        self.add(value)
        waiting = [value] if isinstance(value, _NESTED) else []
        while waiting:
            container = waiting.pop()
            for part in container.values() if isinstance(container, _MAPPINGS) else container:
                if type(part) not in PLAIN and not self.knows(part):
                    self.add(part)
                    if isinstance(part, _NESTED):
                        waiting.append(part)

    @property
    def is_empty(self) -> bool:
        """Return True if nothing is watched."""
        return not self._known

    def add_variable(self, scope: dict[Any, Any], name: Any) -> None:
        """Watch one entry of a dict, as a variable is of a Python module's ``__dict__``."""
        if (id(scope), name) not in self._known:
            self._known[id(scope), name] = scope
            self._variables.append((scope, name))

    def knows(self, value: Any) -> bool:
        """Return True if an object is watched."""
        return id(value) in self._known

    def take(self) -> None:
        """Note what is held now."""
        contents = list(map(_contents, chain(self._classes, self._others)))
        members = [*self._members_now(), _MISSING]
        self._held = _Held(self._sizes(), list(self._now()), contents, members, self._registered())

    def holds(self) -> bool:
        """Return True if everything holds the very objects that it held."""
        held = self._held
        return (
            held.registered == self._registered()
            and self._sizes() == held.sizes
            and all(map(operator.is_, self._now(), held.values))
            and all(map(operator.is_, chain(self._members_now(), (_MISSING,)), held.members))
            and all(map(_are_same, map(_contents, self._others), held.contents[len(self._classes) :]))
        )

    def changed(self) -> bool:
        """Return True if something holds another object than it held, or a plain value that is another."""
        held, now = self._held, map(_contents, chain(self._classes, self._others))
        return not (
            self._sizes() == held.sizes
            and all(map(is_equal, self._now(), held.values))
            and all(len(a) == len(b) and all(map(is_equal, a, b)) for a, b in zip(now, held.contents, strict=True))
        )

    def restorer(self) -> Callable[[], None]:
        """Return what puts back in place what is held now, where something else is held by then."""
        dicts = [(held, list(held.items())) for held in self._dicts]
        sequences = [(held, list(held)) for held in self._sequences]
        parted = (*self._classes, *self._functions, *self._cells, *self._others)
        others = [(held, _contents(held)) for held in parted]
        variables = [(scope, name, scope.get(name, _MISSING)) for scope, name in self._variables]

        def restore() -> None:
            for mapping, items in dicts:
                if not _are_same(_flat(mapping.items()), _flat(items)):
                    mapping.clear()
                    mapping.update(items)
            for sequence, parts in sequences:
                if not _are_same(list(sequence), parts):
                    sequence.clear()
                    (sequence.update if isinstance(sequence, set) else sequence.extend)(parts)
            for other, contents in others:
                if not _are_same(_contents(other), contents):
                    _put(other, contents)
            for scope, name, value in variables:
                if value is not _MISSING:
                    scope[name] = value
                else:
                    scope.pop(name, None)

        return restore

    def numbers_restorer(self) -> Callable[[], None]:
        """Return what puts back plain values alone, of which counters are: what is imported meanwhile stays.

        But for tensors of a trace, which hold no numbers: whatever has one has what it had.
        """
        cells = [(cell, value) for cell in self._cells if type(value := _in_cell(cell)) in PLAIN]
        variables = [(scope, name, scope.get(name, _MISSING)) for scope, name in self._variables]
        dicts = [(held, dict(held)) for held in self._dicts]
        parted = [(each, _by_name(each)) for each in (*self._classes, *self._others)]

        def restore() -> None:
            for cell, value in cells:
                cell.cell_contents = value
            entries = ((held, name, was.get(name, _MISSING)) for held, was in dicts for name in (*was, *held))
            for scope, name, value in (*variables, *entries):
                if _is_to_go(scope.get(name, _MISSING), value):
                    scope.pop(name) if value is _MISSING else scope.update({name: value})
            for each, was in parted:
                now = _by_name(each)
                for name in (*was, *now):
                    value = was.get(name, _MISSING)
                    if _is_to_go(now.get(name, _MISSING), value):
                        _put_by_name(each, name, value)

        return restore

    def _registered(self) -> object:
        return abc.get_cache_token() if self._with_kinds else None

    def _sizes(self) -> list[int]:
        return [*map(len, self._dicts), *map(len, self._sequences)]

    def _members_now(self) -> Iterator[Any]:
        """What the classes are derived from, and what they hold: more than ``_contents``, and no step in Python."""
        tables = list(map(_table_of, self._classes))
        return chain(
            map(_of_class, self._classes),
            chain.from_iterable(map(_bases_of, self._classes)),
            chain.from_iterable(tables),
            chain.from_iterable(map(types.MappingProxyType.values, tables)),
        )

    def _now(self) -> Iterator[Any]:
        scopes, names = (scope for scope, _ in self._variables), (name for _, name in self._variables)
        return chain(
            chain.from_iterable(self._dicts),
            chain.from_iterable(map(dict.values, self._dicts)),
            chain.from_iterable(self._sequences),
            chain.from_iterable(map(_of_function, self._functions)),
            map(_in_cell, self._cells),
            map(dict.get, scopes, names, repeat(_MISSING)),
        )


def _contents(value: Any) -> tuple[Any, ...]:
    """What an object holds, other than a dict or a list."""
    kind = type(value)
    if kind is types.FunctionType:
        return _of_function(value)
    if kind is types.CellType:
        return () if (content := _in_cell(value)) is _MISSING else (content,)
    if isinstance(value, type):
        members = vars(value).items()
        return value.__bases__, *[part for pair in members if pair[0] not in CLASS_BOOKKEEPING for part in pair]
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tobytes(), f"{value.dtype} {value.shape}".encode()
    if kind in _BUFFERS:
        return (bytes(value),)
    if kind is functools.partial:
        return value.func, *value.args, *value.keywords, *value.keywords.values()
    if kind is types.MappingProxyType:
        return *value, *value.values()
    return (kind, getattr(value, "__dict__", _MISSING), *(getattr(value, name, _MISSING) for name in slots_of(kind)))


def _by_name(value: Any) -> dict[str, Any]:
    """Return the members of a class, or what any other object has in its slots."""
    if isinstance(value, type):
        return {name: member for name, member in vars(value).items() if name not in CLASS_BOOKKEEPING}
    held = {name: getattr(value, name, _MISSING) for name in slots_of(type(value))}
    return {name: part for name, part in held.items() if part is not _MISSING}


def _put_by_name(holder: Any, name: str, value: Any) -> None:
    """Put back a member of a class, or what an object had in a slot."""
    of = type if isinstance(holder, type) else object
    if value is _MISSING:
        of.__delattr__(holder, name)
    else:
        of.__setattr__(holder, name, value)


def _is_to_go(now: Any, before: Any) -> bool:
    """Return True if something that a trace has put in a place is not to stay there."""
    return now is not before and (type(before) in PLAIN or has_fake([now], depth=2))


def _in_cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing has been assigned
        return _MISSING


def _put(value: Any, contents: tuple[Any, ...]) -> None:
    """Have an object hold ``contents``, as ``_contents`` gave them."""
    kind = type(value)
    if kind is types.FunctionType:
        for name, part in zip(_OF_FUNCTIONS, contents, strict=True):
            setattr(value, name, part)
    elif kind is types.CellType:
        if contents:
            value.cell_contents = contents[0]
        else:
            del value.cell_contents
    elif isinstance(value, type):
        bases, *own = contents
        if value.__bases__ != bases:
            value.__bases__ = bases
        members = dict(zip(own[::2], own[1::2], strict=True))
        now = _by_name(value)
        for name in (*members, *now):
            if now.get(name, _MISSING) is not members.get(name, _MISSING):
                _put_by_name(value, name, members.get(name, _MISSING))
    elif isinstance(value, np.ndarray):
        value[...] = np.frombuffer(contents[0], value.dtype).reshape(value.shape)
    elif not isinstance(value, _LEFT):
        own, state, *in_slots = contents
        for name, part in (("__class__", own), ("__dict__", state), *zip(slots_of(own), in_slots, strict=True)):
            if getattr(value, name, _MISSING) is not part:
                _put_by_name(value, name, part)


def slots_of(kind: type) -> tuple[str, ...]:
    """Return the names of the slots that instances of a class have, those of its bases first."""
    return _slots(kind.__mro__)


@functools.lru_cache(maxsize=1024)
def _slots(bases: tuple[type, ...]) -> tuple[str, ...]:
    members = ((name, member) for base in reversed(bases) for name, member in vars(base).items())
    return tuple(name for name, member in members if type(member) is types.MemberDescriptorType)


def _flat(pairs: Any) -> list[Any]:
    return [part for pair in pairs for part in pair]


def _are_same(values: Any, others: Any) -> bool:
    return len(values) == len(others) and all(map(_is_same, values, others))


def _is_same(value: Any, other: Any) -> bool:
    return value is other or (type(value) is bytes and value == other)


def is_equal(value: Any, other: Any) -> bool:
    """Return True if two values are one object, or the same plain value."""
    if value is other:
        return True
    return type(value) is type(other) and type(value) in PLAIN and repr(value) == repr(other)
