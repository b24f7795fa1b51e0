"""What a path of names leads to, found without running anything: no property, no ``__getattr__``.

Attributes are looked up as Python does, in modules, in classes and in what instances hold; keys in lists and dicts of
Python's own. Where code would have to run, a path ends at the object that it would run on, as a whole.
"""

from __future__ import annotations

import collections
import enum
import types
from typing import Any, NamedTuple

import torch

from .global_reads import Path, cells, module_named

_DICTS = (dict, collections.OrderedDict, collections.defaultdict, types.MappingProxyType)
_MISSING = object()
_USUAL = ("builtins", "types")  # the modules of ``object`` and ``SimpleNamespace``, which look up as is usual
_METACLASSES = (type, enum.EnumMeta)


class Resolved(NamedTuple):
    """What a path leads to.

    Attributes:
        value: the end of it, as far as it can be followed.
        steps: how many steps of the path were followed.
        owner: the Python module that has the value as a variable, or in a variable, or in a class.
        way: what each step was looked up in, also the one that could not be followed.
    """

    value: Any
    steps: int
    owner: str
    way: tuple[Any, ...] = ()


def resolve(path: Path, function: types.FunctionType) -> Resolved | None:
    """What ``path`` means in a function; None where nothing of the module's has that name (Python's own functions)."""
    scope = function.__globals__
    owner = str(scope.get("__name__") or "")
    if path.root == "global":
        value = scope.get(path.name, _MISSING)
    elif path.root == "cell":
        value = dict(cells(function)).get(path.name, _MISSING)
    else:
        value = module_named(path.name, str(scope.get("__package__") or "")) or _MISSING
    if value is _MISSING:
        return None
    steps, way = 0, []
    for kind, of in path.steps:
        way.append(value)
        found = _attribute(value, of, owner) if kind == "." else (_item(value, of), owner)
        if found[0] is _MISSING:
            break
        value, owner = found
        steps += 1
    return Resolved(value, steps, owner, tuple(way))


def _item(value: Any, key: Any) -> Any:
    if type(value) in _DICTS:
        return value.get(key, _MISSING)
    if type(value) in (list, tuple) and type(key) is int and -len(value) <= key < len(value):
        return value[key]
    return _MISSING


def _attribute(value: Any, name: str, owner: str) -> tuple[Any, str]:
    """An attribute and the module that it belongs to."""
    if type(value).__module__ == "torch._ops":  # fills itself with what was asked for before
        return _MISSING, owner
    if isinstance(value, types.ModuleType):
        variables = vars(value)
        found = variables.get(name, _MISSING)
        if found is _MISSING:
            found = variables.get("__getattr__", _MISSING)  # which is asked then
        return found, str(variables.get("__name__") or "")
    if isinstance(value, type):
        return _class_attribute(value, name)
    if isinstance(value, types.FunctionType):
        return vars(value).get(name, _MISSING), owner
    if isinstance(value, torch.Tensor) or _member(type(value), "__getattribute__")[1] not in _USUAL:
        return _MISSING, owner
    return _instance_attribute(value, name, owner)


def _class_attribute(kind: type, name: str) -> tuple[Any, str]:
    """An attribute of a class, or of those that it is derived from."""
    if issubclass(kind, enum.Enum) and name in kind._member_map_:
        return kind._member_map_[name], kind.__module__
    if type(kind) not in _METACLASSES and any(name in vars(base) for base in type.mro(type(kind))[:-2]):
        return _MISSING, kind.__module__
    member, owner = _member(kind, name)
    if isinstance(member, staticmethod):
        return member.__func__, owner
    if isinstance(member, types.FunctionType) or not hasattr(type(member), "__get__"):
        return member, owner
    return _MISSING, owner


def _instance_attribute(value: Any, name: str, owner: str) -> tuple[Any, str]:
    """An attribute that an instance holds, in a dict or a slot, or that its class has for all."""
    member, of_class = _member(type(value), name)
    if isinstance(member, types.MemberDescriptorType):
        try:
            return member.__get__(value), owner
        except AttributeError:
            return _MISSING, owner
    if hasattr(type(member), "__set__"):  # a property goes before what the instance holds
        return _MISSING, owner
    held = getattr(value, "__dict__", {})
    if name in held:
        return held[name], owner
    if member is _MISSING or hasattr(type(member), "__get__"):  # a method gets the instance
        return _MISSING, owner
    return member, of_class


def _member(kind: type, name: str) -> tuple[Any, str]:
    for base in kind.__mro__:
        if name in vars(base):
            return vars(base)[name], base.__module__
    return _MISSING, kind.__module__
