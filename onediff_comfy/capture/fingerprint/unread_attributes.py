"""Attributes of layers that nothing reads: tensors that a forward leaves behind on them, and notes of the host's.

ComfyUI's Cosmos Predict2 notes tensors of each call on itself, for logs that nobody writes. Such attributes are no part
of what a model computes. In doubt an attribute is read: by any code in the files of what is reached, of any object, or
by its name as a string. And an attribute that is more than tensors, a switch for example, counts whoever reads it,
unless it has the name of a note that the host keeps on where the weights are (``HostCode.notes``).
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import re
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.machinery import SourceFileLoader
from typing import Any, NamedTuple

import torch

from ..values.bytecode import Instruction, instructions, may_do, names_read, with_nested
from ..values.global_reads import absolute_name, module_named
from ..values.value_text import is_foundation

_LOOKS_UP = frozenset(("getattr", "hasattr", "attrgetter", "methodcaller"))  # by a name that may be put together
_FINDS_ALL = frozenset(("vars", "dir", "getmembers", "__getattribute__"))
_RUNS_TEXT = ("eval", "exec")  # as globals; nn.Module has an eval too
_ALL = _FINDS_ALL.union(_RUNS_TEXT, ("__dict__",))
_OF_DICT = frozenset(("get", "setdefault", "pop"))
_DEEPEST = 4  # tables of tables; what is nested deeper is not looked into
_FIELDS = re.compile(r"%[-+ #0]*[\d.*]*[a-zA-Z]|\{[^{}]*\}")  # of strings that names are formatted by


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


def is_tensors(value: Any, depth: int = 0) -> bool:
    """Whether a value is nothing but tensors, or will be: None, tensors, and containers of them."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return depth < _DEEPEST and all(is_tensors(part, depth + 1) for part in value)
    return value is None or isinstance(value, torch.Tensor)


class Unread(NamedTuple):
    """Names of attributes that nothing reads.

    Attributes:
        tensors: of those that are left out as long as they hold nothing but tensors.
        notes: of those that are, whatever they hold.
    """

    tensors: frozenset[str] = frozenset()
    notes: frozenset[str] = frozenset()

    def leaves_out(self, name: str, value: Any) -> bool:
        """Return True if an attribute of this name and value is no part of what a model computes."""
        return name in self.notes or (name in self.tensors and is_tensors(value))

    def is_in(self, attributes: Mapping[str, Any]) -> bool:
        """Return True if some of these may be left out."""
        return not (self.tensors.isdisjoint(attributes) and self.notes.isdisjoint(attributes))


ALL_READ = Unread()


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
        return self.names(name) or self._all or any(_may_be_made_of(piece, name) for piece in self._pieces)

    def names(self, name: str) -> bool:
        """Return True if what was added so far has this very name in it, or as a string."""
        try:
            while self._values and not self._all:
                self._look_at(self._values.pop())
            while self._functions and not self._all:
                self._look_around(self._functions.pop())
        except Exception:  # of whatever an extension's object does when it is looked at
            self._all = True
        return name in self._names

    def _look_at(self, value: Any) -> None:
        for leaf in _leaves(value):
            if isinstance(leaf, str):
                self._names.update(leaf.split("."))
        for code in _codes_in(value):
            self._names |= _reads(code)[0]

    def _look_around(self, function: types.FunctionType) -> None:
        own = tuple(with_nested(function.__code__))
        self._count(own)
        self._all = self._all or any(map(_finds_all, own))
        scope = function.__globals__
        package = str(scope.get("__package__") or "")
        imported = (found for code in own for name, items in _imports(code) for found in _scopes(name, items, package))
        for found in (scope, *imported):
            around = _around(found)
            self._all = self._all or around is None
            self._count(around or ())

    def _count(self, codes: Iterable[types.CodeType]) -> None:
        for code in codes:
            names, pieces = _reads(code)
            self._names |= names
            self._pieces |= pieces


def _scopes(name: str, items: Sequence[str], package: str) -> Iterator[dict[str, Any]]:
    """Return the variables of modules that code imports when it runs, or where their source is before they are."""
    module = module_named(name, package)
    variables = _unloaded(absolute_name(name, package)) if module is None else vars(module)
    yield variables
    for item in items:
        found = variables.get(item)
        if isinstance(found, types.ModuleType):
            yield vars(found)
        elif module is not None and item not in variables:
            yield _unloaded(f"{module.__name__}.{item}")


def _unloaded(name: str) -> dict[str, Any]:
    """Return where the source of a module is that was not imported yet, as its variables say it; runs nothing."""
    parent = name.rpartition(".")[0]
    spec = importlib.util.find_spec(name) if not parent or parent in sys.modules else None
    return {} if spec is None else {"__name__": name, "__spec__": spec, "__file__": spec.origin}


def _around(scope: dict[str, Any]) -> tuple[types.CodeType, ...] | None:
    """Return the functions in the source of the module that has these variables; None where it cannot be read."""
    loader = getattr(scope.get("__spec__"), "loader", None)
    return _codes_of_module(str(scope.get("__name__")), loader, str(scope.get("__file__")))


def _may_be_made_of(piece: str, name: str) -> bool:
    """Whether a name that code puts together out of ``piece`` and others may be this one: a word stands at an end."""
    return name.startswith(piece) or name.endswith(piece) or ("_" in piece and piece in name)


@functools.lru_cache(maxsize=512)
def _codes_of_module(name: str, loader: Any, file: str) -> tuple[types.CodeType, ...] | None:
    """The functions in a module's source, lambdas among them; None where it cannot be read."""
    try:
        whole = (loader if hasattr(loader, "get_code") else SourceFileLoader(name, file)).get_code(name)
    except Exception:  # of loaders of all kinds
        return None
    if not inspect.iscode(whole):
        return None
    # Of modules and classes themselves nothing runs any more, and the names of parameters are strings there.
    return tuple(c for c in with_nested(whole) if c.co_flags & inspect.CO_OPTIMIZED)


def functions_within(value: Any) -> Iterator[types.FunctionType]:
    """The functions that a value is made of."""
    return (leaf for leaf in _leaves(value) if isinstance(leaf, types.FunctionType))


def _codes_in(value: Any) -> Iterator[types.CodeType]:
    for function in functions_within(value):
        yield from with_nested(function.__code__)


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


@functools.lru_cache(maxsize=8192)
def _stores(code: types.CodeType) -> frozenset[str]:
    if not may_do(code, ("STORE_ATTR",)):
        return frozenset()
    return frozenset(i.of for i in instructions(code) if i.name == "STORE_ATTR")


@functools.lru_cache(maxsize=16384)
def _reads(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Names of attributes that code itself may read, and, where it looks some up, what names may begin or end with."""
    names = names_read(code)
    strings = {leaf for leaf in _leaves(code.co_consts) if isinstance(leaf, str)}
    pieces = {piece for text in strings for piece in (text, *_FIELDS.split(text))} if names & _LOOKS_UP else set[str]()
    return frozenset(names.union(*(text.split(".") for text in strings))), frozenset(pieces - {""})


@functools.lru_cache(maxsize=8192)
def _finds_all(code: types.CodeType) -> bool:
    """Whether code may read attributes without their names: all in turn."""
    if _ALL.isdisjoint(code.co_names):
        return False
    done = instructions(code)
    for number, instruction in enumerate(done):
        if not instruction.is_named:
            continue
        if instruction.of in _FINDS_ALL or (instruction.of in _RUNS_TEXT and instruction.name == "LOAD_GLOBAL"):
            return True
        if instruction.of == "__dict__" and not _is_one_name(done[number + 1 : number + 3]):
            return True
    return False


@functools.lru_cache(maxsize=8192)
def _imports(code: types.CodeType) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the modules that code imports when it runs, with a dot before the name for each level, and what of them.

    Python's and torch's are left out: they know no names of a model's attributes.
    """
    if not may_do(code, ("IMPORT_NAME",)):
        return ()
    done = instructions(code)
    found: list[tuple[str, tuple[str, ...]]] = []
    for number, instruction in enumerate(done):
        if instruction.name != "IMPORT_NAME":
            continue
        level, names = (before.of for before in done[number - 2 : number])
        name = instruction.of
        if level == 0 and (name.partition(".")[0] in sys.stdlib_module_names or is_foundation(name)):
            continue
        found.append(("." * level + name, tuple(names or ())))
    return tuple(found)


def _is_one_name(after: Sequence[Instruction]) -> bool:
    """Whether this is what follows in ``layer.__dict__.get("name")``, a name like any other."""
    methods = [i.of for i in after if i.name == "LOAD_ATTR"]
    names = [i.of for i in after if i.name == "LOAD_CONST"]
    return len(methods) == len(names) == 1 and methods[0] in _OF_DICT and isinstance(names[0], str)
