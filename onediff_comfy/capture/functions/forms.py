"""How objects are taken apart, and made again of other parts: what a function holds, and what that holds.

Both are here for each kind of object, side by side, so that a copy has a new part wherever an original was looked at.
An object of a kind that is not here is a leaf, which has no parts that change, or nothing that a graph can take.
"""

from __future__ import annotations

import collections
import enum
import functools
import re
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..fingerprint.snapshot import slots_of
from ..values.value_text import KNOWN_BY_NAME, PLAIN, STATELESS, code_digest, hides_state, is_foundation

_DICTS = (dict, collections.OrderedDict)
_NUMBERS_AND_TEXT = (int, float, complex, str, bytes)
_OF_C = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
_LEAVES = (
    enum.Enum,
    type,
    types.ModuleType,
    torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
    np.ndarray,
    np.generic,
)
_LEAF_KINDS = frozenset((*PLAIN, *KNOWN_BY_NAME, *STATELESS, object, re.Pattern, torch.Size, type(...)))


class Parts(NamedTuple):
    """An object in parts.

    Attributes:
        label: what it is, but for its parts.
        children: its parts.
        names: what each is called in the object; empty where parts have no names of their own.
    """

    label: str
    children: Sequence[Any]
    names: Sequence[str] = ()


def is_leaf(value: Any) -> bool:
    """Return True for what is described as a whole, and is itself in a copy."""
    kind = type(value)
    if isinstance(value, types.FunctionType):
        return not _holds_anything(value)
    if isinstance(value, _OF_C):
        return isinstance(getattr(value, "__self__", None), (type, types.ModuleType, type(None)))
    return kind in _LEAF_KINDS or isinstance(value, (*_LEAVES, *_NUMBERS_AND_TEXT)) or kind.__module__ == "typing"


def take_apart(value: Any, describe_key: Callable[[Any], str]) -> Parts | None:
    """Return the parts of an object that is no leaf; None if it cannot be taken apart.

    Args:
        describe_key: gives the text for a dict's key, or a member of a set: a copy has the same.
    """
    kind = type(value)
    if kind in _DICTS:
        names = [key if type(key) is str else "" for key in value]
        return Parts(f"{kind.__name__} {[describe_key(key) for key in value]}", list(value.values()), names)
    if kind in (set, frozenset):
        return Parts(f"{kind.__name__} {sorted(map(describe_key, value))} {order_of(value)}", ())
    if kind is list or _is_tuple(value):
        return Parts(_name(kind), list(value))
    if kind is types.CellType:
        return Parts("cell", _contents(value))
    if kind is types.FunctionType:
        label = f"function {value.__module__} {text_of(value)} {code_digest(value.__code__)}"
        held = value.__defaults__, value.__kwdefaults__, value.__dict__
        names = ["defaults", "", "", *value.__code__.co_freevars]
        return Parts(label, [*held, *(value.__closure__ or ())], names)
    if kind is types.MethodType:
        return Parts("method", [value.__func__, value.__self__])
    if kind is functools.partial and not vars(value):
        names = [*([""] * (1 + len(value.args))), *value.keywords]
        return Parts(f"partial {list(value.keywords)}", [value.func, *value.args, *value.keywords.values()], names)
    if _is_plain_object(kind):
        slots = [name for name in slots_of(kind) if hasattr(value, name)]
        state = [value.__dict__] if kind.__dictoffset__ else []
        label = f"object {_name(kind)} {slots}"
        return Parts(label, [*state, *(getattr(value, name) for name in slots)], [*([""] * len(state)), *slots])
    return None


def empty_like(value: Any, parts: Callable[[], list[Any]]) -> Any:
    """Return a new object of the kind of ``value``, to be filled; complete where its kind cannot change.

    Args:
        parts: gives the new object's parts, in the order of ``take_apart``.
    """
    kind = type(value)
    if kind is frozenset:
        return value
    if _is_tuple(value):
        return tuple.__new__(kind, parts())
    if kind is types.FunctionType:
        cells = tuple(parts()[3:])
        return types.FunctionType(value.__code__, value.__globals__, value.__name__, None, cells or None)
    if kind is types.MethodType:
        return types.MethodType(*parts())
    if kind is functools.partial:
        function, *arguments = parts()
        count = len(value.args)
        keywords = dict(zip(value.keywords, arguments[count:], strict=True))
        return functools.partial(function, *arguments[:count], **keywords)
    return object.__new__(kind) if _is_plain_object(kind) else kind()


def fill(new: Any, value: Any, parts: Sequence[Any]) -> None:
    """Give ``new``, an empty object like ``value``, its parts, in the order of ``take_apart``."""
    kind = type(value)
    if kind in _DICTS:
        new.update(zip(value, parts, strict=True))
    elif kind is set:
        new.update(value)
    elif kind is list:
        new.extend(parts)
    elif kind is types.CellType:
        for part in parts:
            new.cell_contents = part
    elif kind is types.FunctionType:
        new.__defaults__, new.__kwdefaults__, new.__dict__ = parts[:3]
        for name in ("__module__", "__qualname__", "__name__", "__doc__"):
            setattr(new, name, getattr(value, name))
    elif _is_plain_object(kind):
        slots = [name for name in slots_of(kind) if hasattr(value, name)]
        names = [*(["__dict__"] if kind.__dictoffset__ else []), *slots]
        for name, part in zip(names, parts, strict=True):
            object.__setattr__(new, name, part)


def order_of(members: set[Any] | frozenset[Any]) -> list[Any]:
    """Return the numbers in a set in its order, which is the same in each process; that of text is not."""
    return [member for member in members if type(member) in (int, float)]


def text_of(function: types.FunctionType) -> str:
    """Return what a function is called, and what is written about it: code may read that."""
    return f"{function.__qualname__} {function.__name__!r} {function.__doc__!r}"


def _holds_anything(function: types.FunctionType) -> bool:
    """Return True for a function that keeps what may change: not one of PyTorch's or Python's with a mark of theirs."""
    if function.__closure__:
        return True
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return not is_foundation(function.__module__ or "") and not (
        all(type(value) in PLAIN for value in defaults) and not function.__dict__
    )


def _is_tuple(value: Any) -> bool:
    """Return True for a tuple, and for a named one."""
    kind = type(value)
    return kind is tuple or (isinstance(value, tuple) and hasattr(kind, "_fields") and not kind.__dictoffset__)


def _is_plain_object(kind: type) -> bool:
    """Return True if instances are what their attributes and slots hold, and nothing else."""
    looks_up = next(vars(base)["__getattribute__"] for base in kind.__mro__ if "__getattribute__" in vars(base))
    ends = hasattr(kind, "__del__")  # a copy would do that too
    return not (hides_state(kind) or ends) and looks_up is object.__getattribute__ and kind is not object


def _contents(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # nothing has been assigned
        return ()


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
