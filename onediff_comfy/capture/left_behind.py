"""Attributes that a forward leaves behind on its layers: it sets them, and nothing that it reaches ever reads them.

ComfyUI's Cosmos Predict2 notes tensors of each call on itself, for logs that nobody writes. Such attributes are no part
of what a model computes. In doubt an attribute is read: by any code in the files of what is reached, of any object, or
by its name as a string.
"""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Iterable, Iterator
from typing import Any

from .describe import is_foundation

_LOOKS_UP = frozenset(("getattr", "hasattr", "attrgetter", "methodcaller"))  # by a name that may be put together
_FINDS_ALL = frozenset(("vars", "dir", "getmembers", "__getattribute__"))
_RUNS_TEXT, _GLOBALS = ("eval", "exec"), ("LOAD_GLOBAL", "LOAD_NAME")  # nn.Module has an eval too
_OF_DICT = frozenset(("get", "setdefault", "pop"))
_BETWEEN = frozenset(("EXTENDED_ARG", "PUSH_NULL", "CACHE"))
_DEEPEST = 4  # tables of tables; what is nested deeper is not looked into


def stored_by(kinds: Iterable[type]) -> frozenset[str]:
    """Names of the attributes that methods of these classes set after construction."""
    found: set[str] = set()
    for kind in kinds:
        if not is_foundation(kind.__module__):
            for name, member in vars(kind).items():
                if name != "__init__":
                    for code in _codes_in(member):
                        found |= _stores(code)
    return frozenset(found)


class Reads:
    """Collects what code may read of the objects that it meets. Cheap until it is asked."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._pieces: set[str] = set()
        self._all = False
        self._values: list[Any] = []
        self._functions: list[types.FunctionType] = []

    def add(self, function: types.FunctionType) -> None:
        """``function`` runs, and so may others of its file, out of a table for example."""
        self._functions.append(function)

    def add_value(self, value: Any) -> None:
        """Code meets ``value``: the functions and strings in it count."""
        self._values.append(value)

    def add_everything(self) -> None:
        """Any attribute may be read."""
        self._all = True

    def may_read(self, name: str) -> bool:
        """Whether what was added so far may read an attribute of this name."""
        try:
            while self._values and not self._all:
                self._look_at(self._values.pop())
            while self._functions and not self._all:
                self._look_around(self._functions.pop())
        except Exception:  # of whatever an extension's object does when it is looked at
            self._all = True
        pieces = tuple(self._pieces)
        return self._all or name in self._names or name.startswith(pieces) or name.endswith(pieces)

    def _look_at(self, value: Any) -> None:
        for leaf in _leaves(value):
            if isinstance(leaf, str):
                self._names.update(leaf.split("."))
        for code in _codes_in(value):
            self._names |= _reads(code)[0]

    def _look_around(self, function: types.FunctionType) -> None:
        own = tuple(_with_nested(function.__code__))
        self._all = self._all or any(map(_finds_all, own))
        self._count(own)
        scope = function.__globals__
        self._count(_codes_of_module(getattr(scope.get("__spec__"), "loader", None), str(scope.get("__name__"))))

    def _count(self, codes: Iterable[types.CodeType]) -> None:
        for code in codes:
            names, pieces = _reads(code)
            self._names |= names
            self._pieces |= pieces


@functools.lru_cache(maxsize=512)
def _codes_of_module(loader: Any, name: str) -> tuple[types.CodeType, ...]:
    """The functions in a module's source, lambdas among them; none where it cannot be read."""
    try:
        whole = loader.get_code(name)
    except Exception:  # of loaders of all kinds
        return ()
    # Of modules and classes themselves nothing runs any more, and the names of parameters are strings there.
    return tuple(c for c in _with_nested(whole) if c.co_flags & inspect.CO_OPTIMIZED) if inspect.iscode(whole) else ()


def _codes_in(value: Any) -> Iterator[types.CodeType]:
    for leaf in _leaves(value):
        if isinstance(leaf, types.FunctionType):
            yield from _with_nested(leaf.__code__)


def _leaves(value: Any, depth: int = 0) -> Iterator[Any]:
    """What a value is made of, as far as it is containers, or wrappers of functions."""
    if isinstance(value, (staticmethod, classmethod, types.MethodType)):
        inner: Iterable[Any] = (value.__func__,)
    elif isinstance(value, property):
        inner = (value.fget, value.fset, value.fdel)
    elif isinstance(value, functools.partial):
        inner = (value.func, value.args, value.keywords)
    elif isinstance(value, functools.cached_property):
        inner = (value.func,)
    elif isinstance(value, functools._lru_cache_wrapper):
        inner = (value.__wrapped__,)
    elif isinstance(value, (list, tuple, set, frozenset)):
        inner = tuple(value)
    elif isinstance(value, dict):
        inner = (*value.keys(), *value.values())
    else:
        yield value
        return
    if depth < _DEEPEST:
        for part in inner:
            yield from _leaves(part, depth + 1)


def _with_nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if inspect.iscode(constant):
            yield from _with_nested(constant)


@functools.lru_cache(maxsize=8192)
def _stores(code: types.CodeType) -> frozenset[str]:
    return frozenset(i.argval for i in dis.get_instructions(code) if i.opname == "STORE_ATTR")


@functools.lru_cache(maxsize=16384)
def _reads(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Names of attributes that code itself may read, and, where it looks some up, what names may begin or end with."""
    names = {
        i.argval for i in dis.get_instructions(code) if i.opcode in dis.hasname and not i.opname.startswith("STORE_")
    }
    strings = {leaf for leaf in _leaves(code.co_consts) if isinstance(leaf, str)}
    pieces = strings - {""} if names & _LOOKS_UP else frozenset[str]()
    return frozenset(names.union(*(text.split(".") for text in strings))), frozenset(pieces)


@functools.lru_cache(maxsize=8192)
def _finds_all(code: types.CodeType) -> bool:
    """Whether code may read attributes without their names: all in turn, say."""
    instructions = [i for i in dis.get_instructions(code) if i.opname not in _BETWEEN]
    for number, instruction in enumerate(instructions):
        if instruction.opcode not in dis.hasname:
            continue
        if instruction.argval in _FINDS_ALL or (instruction.argval in _RUNS_TEXT and instruction.opname in _GLOBALS):
            return True
        if instruction.argval == "__dict__" and not _is_one_name(instructions[number + 1 : number + 3]):
            return True
    return False


def _is_one_name(after: list[dis.Instruction]) -> bool:
    """Whether this is what follows in ``layer.__dict__.get("name")``, a name like any other."""
    methods = [i.argval for i in after if i.opname in ("LOAD_ATTR", "LOAD_METHOD")]
    names = [i.argval for i in after if i.opname == "LOAD_CONST"]
    return len(methods) == len(names) == 1 and methods[0] in _OF_DICT and isinstance(names[0], str)
