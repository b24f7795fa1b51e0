"""Records among a block's arguments: objects of the host's dataclasses, as Flux 2 and Chroma give their modulations.

A graph takes dicts, lists and tensors. A record is opened to a dict of its fields under the name of its class, and
made again from it where the block's code runs.
"""

from __future__ import annotations

import dataclasses
import reprlib
import sys
import types
from typing import Any

import comfy

from ...capture.fingerprint.code_ownership import CodeOwnership, HostCode

_CLASS = "class of a record"
_GENERATED = frozenset(
    f"__{name}__" for name in ("init", "repr", "eq", "lt", "le", "gt", "ge", "hash", "setattr", "delattr", "replace")
)
_MAKERS = (dataclasses, reprlib)  # the second since Python 3.13, of __repr__
_HOST = CodeOwnership(HostCode(comfy.__name__), frozenset())


def opened(value: Any) -> Any:
    """Return a value in which a dict stands for each record. Any other object stays as it is."""
    if type(value) is dict:
        return {key: opened(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(opened, value))
    if is_record(value):
        kind = type(value)
        return {_CLASS: f"{kind.__module__}:{kind.__qualname__}", **opened(vars(value))}
    return value


def closed(value: Any) -> Any:
    """Return what ``opened`` was given, as new containers and records with the same tensors in them."""
    if type(value) is dict and _CLASS in value:
        module, _, name = value[_CLASS].partition(":")
        record = object.__new__(getattr(sys.modules[module], name))
        vars(record).update((key, closed(part)) for key, part in value.items() if key != _CLASS)
        return record
    if type(value) is dict:
        return {key: closed(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(closed, value))
    return value


def is_record(value: Any) -> bool:
    """Return True if an object of a dataclass is its fields and nothing else.

    The class must be the host's, as the host wrote it and to be found by its name: the host's own code is part of every
    key, and the fields are all that is known of the object besides.
    """
    kind = type(value)
    if not dataclasses.is_dataclass(kind) or not hasattr(value, "__dict__"):
        return False
    if getattr(sys.modules.get(kind.__module__), kind.__qualname__, None) is not kind:
        return False
    names = {field.name for field in dataclasses.fields(kind)}
    return vars(value).keys() == names and all(_is_known(base, names) for base in kind.__mro__ if base is not object)


def _is_known(kind: type, fields: set[str]) -> bool:
    """Return True if what a class has is the host's own code, or what Python put there."""
    for name, member in vars(kind).items():
        function = getattr(member, "__func__", member)
        if isinstance(function, types.FunctionType):
            if not (_HOST.is_as_written(function) or _is_generated(name, function)):
                return False
        elif name not in fields and not (name.startswith("__") and name.endswith("__")):
            return False
    return _HOST.is_host(vars(sys.modules[kind.__module__]))


def _is_generated(name: str, function: types.FunctionType) -> bool:
    """Return True if Python made a method for a dataclass."""
    made = function.__code__.co_filename == "<string>" or any(function.__globals__ is vars(part) for part in _MAKERS)
    return made and name in _GENERATED
