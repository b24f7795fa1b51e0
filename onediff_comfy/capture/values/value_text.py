"""Text that identifies Python values: equal for equal meaning, in every process, and different otherwise.

Used for what a forward may depend on besides tensors: attributes, functions, closures, classes.
There is no guessing. A value without describable state (an object of a C extension, say) is
refused, because leaving it out would let two different models pass for one.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import enum
import functools
import hashlib
import inspect
import logging
import marshal
import re
import struct
import sys
import textwrap
import threading
import types
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ...messages import message
from .tensors import own_attributes, tensor_digest

_PLAIN = frozenset((bool, int, str, bytes, complex, range))
_PLAIN |= {torch.dtype, torch.device, torch.layout, torch.memory_format}
KNOWN_BY_NAME = frozenset((torch.finfo, torch.iinfo, types.UnionType, types.GenericAlias))
PLAIN = _PLAIN | {float, type(None)}
"""Kinds of values that have no parts and no attributes."""

_NUMBERS_AND_TEXT = (int, float, complex, str, bytes)
_BUILTIN_FUNCTIONS = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.ClassMethodDescriptorType,
)
# Parts of a class that are about the class and not what its instances compute.
CLASS_BOOKKEEPING = frozenset(
    (
        *("__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__annotations__"),
        *("__annotate__", "__annotations_cache__", "__abstractmethods__", "_abc_impl", "__slots__"),
        *("__parameters__", "__orig_bases__", "__match_args__", "__dataclass_params__"),
        *("__dataclass_fields__", "__static_attributes__", "__firstlineno__", "__constants__"),
        *("__hash__", "__slotnames__"),
    )
)

# Instances take no part in what is computed.
STATELESS = frozenset((logging.Logger, type(threading.Lock()), type(threading.RLock())))
_BOOKKEEPING_OF_LAYERS = frozenset(vars(torch.nn.Module())) - {"training"}


class Indescribable(Exception):
    """A value has no state that could be put into words; says which."""


class Describer:
    """Describes values that belong to one module tree.

    Args:
        layers: the tree's layers, by ``id``, with their paths. They are mentioned by path; a module
            outside the tree is indescribable, because its weights would be baked into a capture.

    Attributes:
        code: the functions, classes and Python modules that were met so far.
        strings: the strings that were met so far; code may take one for a name.
    """

    known: frozenset[int] = frozenset()  # ids of functions of which somebody else has described what they hold

    def __init__(self, layers: Mapping[int, str]) -> None:
        self._layers = layers
        self._open: dict[int, int] = {}
        self.code: list[Any] = []
        self.strings: set[str] = set()

    def describe(self, value: Any) -> str:
        """A text for ``value``.

        Raises:
            Indescribable: something in it has no describable state.
        """
        kind = type(value)
        if kind is str:
            self.strings.add(value)
        if value is None or value is Ellipsis or kind in _PLAIN:
            return f"{kind.__name__} {value!r}"
        if kind is float:
            return f"float {value.hex()}"
        if isinstance(value, torch.Tensor):
            own = f" {self.describe(noted)}" if (noted := own_attributes(value)) else ""
            return f"tensor {value.dtype} {tuple(value.shape)} {value.device.type} {tensor_digest(value)}{own}"
        if isinstance(value, torch.nn.Module) and id(value) in self._layers:
            return f"layer {self._layers[id(value)]}"
        if id(value) in self._open:  # a cycle: say how far up it leads
            return f"cycle {len(self._open) - self._open[id(value)]}"
        self._open[id(value)] = len(self._open)
        try:
            return self._nested(value, kind)
        except RecursionError:
            raise Indescribable(message("a {kind} that is nested too deeply", kind=kind.__qualname__)) from None
        finally:
            del self._open[id(value)]

    def _nested(self, value: Any, kind: type) -> str:
        if isinstance(value, torch.nn.Module):
            return self._layer_outside(value, kind)
        if isinstance(value, enum.Enum):
            self.code.append(kind)
            return f"enum {_qualified(kind)}.{value.name} {self.describe(value.value)}"
        if _is_native_enum(value, kind):
            return f"enum {_qualified(kind)}.{value.name}"
        if isinstance(value, type):
            self.code.append(value)
            return f"class {_qualified(value)}"
        if isinstance(value, types.ModuleType):
            self.code.append(value)
            return f"python module {value.__name__}"
        if isinstance(value, (dict, list, tuple, set, frozenset, collections.deque, types.MappingProxyType)):
            return self._container(value, kind)
        if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
            derived = "" if kind in (np.ndarray, value.dtype.type) else f" {_qualified(kind)}"
            return f"array {value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}{derived}"
        if kind in STATELESS:
            return f"a {_qualified(kind)}"
        if callable(value) and (text := self._function(value)) is not None:
            return text
        if kind in KNOWN_BY_NAME or kind.__module__ == "typing":
            return str(value)
        if kind is slice:
            return f"slice {self.describe([value.start, value.stop, value.step])}"
        if kind is re.Pattern:
            return f"pattern {value.pattern!r} {value.flags}"
        return self._object(value, kind)

    def _container(self, value: Any, kind: type) -> str:
        mapping = isinstance(value, (dict, types.MappingProxyType))
        large = len(value) > _LARGE and kind in _CONTAINERS and _marshalled(value)
        if large:
            return f"{_qualified(kind)} of {len(value)} {hashlib.sha256(large).hexdigest()}"
        parts = (
            [f"{self.describe(key)}: {self.describe(child)}" for key, child in value.items()]
            if mapping
            else list(map(self.describe, value))
        )
        opened, closed = "[]" if isinstance(value, (list, tuple, collections.deque)) else "{}"
        text = ", ".join(sorted(parts) if isinstance(value, (set, frozenset)) else parts)
        besides = dict(sorted(vars(value).items())) if kind.__dictoffset__ else {}
        if kind is collections.defaultdict:
            besides = {"default_factory": value.default_factory}
        elif kind not in _CONTAINERS:
            self.code.append(kind)
        return f"{_qualified(kind)} {opened}{text}{closed}{f' {self.describe(besides)}' if besides else ''}"

    def _layer_outside(self, layer: torch.nn.Module, kind: type) -> str:
        """A layer that is not in the tree: an activation in a plain list, say. Its weights would be baked in."""
        if layer._parameters or layer._buffers or layer._forward_hooks or layer._forward_pre_hooks:
            raise Indescribable(message("a {kind} layer outside of its module tree", kind=kind.__qualname__))
        self.code.append(kind)
        state = {name: value for name, value in sorted(vars(layer).items()) if name not in _BOOKKEEPING_OF_LAYERS}
        return f"layer {_qualified(kind)} {layer.training} {self.describe([state, layer._modules])}"

    def _function(self, value: Any) -> str | None:
        if isinstance(value, types.FunctionType):
            self.code.append(value)
            state = self.describe([*held_by(value), *attributes_of(value)])
            return f"function {value.__module__}.{value.__qualname__} {code_digest(value.__code__)} {state}"
        if isinstance(value, functools._lru_cache_wrapper):
            return f"cached {self.describe(value.__wrapped__)}"
        if isinstance(value, types.MethodType):
            return f"method {self.describe(value.__func__)} of {self.describe(value.__self__)}"
        if isinstance(value, functools.partial):
            return f"partial {self.describe([value.func, value.args, value.keywords])}"
        if isinstance(value, _BUILTIN_FUNCTIONS):
            of = getattr(value, "__self__", None)  # a list, of its method ``append``
            bound = "" if of is None or isinstance(of, (type, types.ModuleType)) else f" of {self.describe(of)}"
            return f"builtin {getattr(value, '__module__', None)}.{value.__qualname__}{bound}"
        if isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            return f"operator {value}"
        return None

    def _object(self, value: Any, kind: type) -> str:
        self.code.append(kind)
        names = [name for base in kind.__mro__ for name in _slots(base)]
        state = {name: getattr(value, name) for name in names if hasattr(value, name)}
        if dataclasses.is_dataclass(value):
            state |= {item.name: getattr(value, item.name, None) for item in dataclasses.fields(value)}
        state |= getattr(value, "__dict__", {})
        base = next((plain for plain in _NUMBERS_AND_TEXT if isinstance(value, plain)), None)
        if base is None and hides_state(kind):
            raise Indescribable(message("a {kind}", kind=_qualified(kind)))
        if base is not None:  # a kind of number that has attributes too
            state["itself"] = base(value)
        return f"object {_qualified(kind)} {self.describe(dict(sorted(state.items())))}"

    def describe_or_name(self, value: Any) -> str:
        """As ``describe``; of what cannot be described its type, where that is one among hundreds of values."""
        try:
            return self.describe(value)
        except Indescribable:
            return f"some {_qualified(type(value))}"


def is_foundation(module: str) -> bool:
    """Whether a Python module belongs to torch or Python itself, whose versions are known."""
    return module.partition(".")[0] in ("torch", "builtins", "abc", "typing", "functools", "collections", "enum")


def _slots(kind: type) -> tuple[str, ...]:
    slots, private = kind.__dict__.get("__slots__", ()), f"_{kind.__name__.lstrip('_')}"
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(f"{private}{name}" if name[:2] == "__" != name[-2:] else name for name in names)


def hides_state(kind: type) -> bool:
    """Return True if instances of a class keep something that neither attributes nor slots show: it is written in C."""
    slots = sum(1 for base in kind.__mro__ for name in _slots(base) if name not in ("__dict__", "__weakref__"))
    pointers = slots + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
    return kind.__basicsize__ > object.__basicsize__ + pointers * struct.calcsize("P") or kind.__itemsize__ > 0


_FILLED, _CONTAINERS = (dict, list, set), (dict, list, tuple, set, frozenset)
_LARGE = 64
_SETS_IN_ORDER = sys.version_info >= (3, 11)  # older Pythons marshal them in another order in each process


def _marshalled(value: Any) -> bytes:
    """A container of plain values as bytes, quickly; none where it is not just that.

    The second format of ``marshal`` writes equal values equally: it knows no references.
    """
    try:
        return marshal.dumps(value, 2) if _SETS_IN_ORDER else b""
    except ValueError:  # something that is not plain is in it
        return b""


def is_plain(value: Any) -> bool:
    """Return True for a plain value, and for a container of Python's of nothing but numbers and text."""
    if type(value) in PLAIN:
        return True
    try:
        return type(value) in _CONTAINERS and bool(marshal.dumps(value, 2))
    except ValueError:  # something that is not plain is in it
        return False


def _defaults(function: types.FunctionType) -> tuple[Any, Any]:
    """The defaults of a function's positional and keyword parameters, as it was defined.

    A default written ``options={}`` fills up with whatever calls without options leave in it (ComfyUI's UNet
    blocks note the sizes of their images there). That is no part of the code, and would be another at every call.
    """
    positional, named = function.__defaults__, function.__kwdefaults__
    filled = [v for v in (*(positional or ()), *(named or {}).values()) if type(v) in _FILLED and v]
    empty = _written_empty(function) if filled else frozenset()
    if not empty:
        return positional, named
    names = function.__code__.co_varnames[: function.__code__.co_argcount][-len(positional or ()) :]
    return (
        tuple(type(v)() if n in empty else v for n, v in zip(names, positional, strict=True))
        if positional
        else positional,
        {n: type(v)() if n in empty else v for n, v in named.items()} if named else named,
    )


def _written_empty(function: types.FunctionType) -> frozenset[str]:
    """Names of the parameters whose default is an empty container in the function's source, as far as that is there."""
    try:
        definition = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return frozenset()
    if not isinstance(definition, ast.FunctionDef):
        return frozenset()
    parameters = definition.args
    positional = [*parameters.posonlyargs, *parameters.args]
    pairs = [
        *zip(positional[len(positional) - len(parameters.defaults) :], parameters.defaults, strict=True),
        *zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True),
    ]
    return frozenset(parameter.arg for parameter, default in pairs if default and ast.unparse(default) in _EMPTY)


_EMPTY = frozenset(("{}", "[]", "dict()", "list()", "set()"))


def held_by(function: types.FunctionType) -> list[Any]:
    """What a function keeps: defaults of its parameters, and what its closure holds."""
    positional, named = _defaults(function)
    by_place = [named[name] for name in function.__code__.co_varnames if name in (named or ())]
    return [*(positional or ()), *by_place, *map(_cell_content, function.__closure__ or ())]


def attributes_of(function: types.FunctionType) -> list[Any]:
    """The attributes that somebody has set on a function; torch's and Python's mark theirs in their own ways."""
    foreign = {} if is_foundation(function.__module__ or "") else vars(function)
    return [dict(sorted(foreign.items()))] * bool(foreign)


def _cell_content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return "empty cell"


def _is_native_enum(value: Any, kind: type) -> bool:
    """Return True for a member of an enum that a C++ extension defines, as PyTorch's SDPBackend: a name and no more."""
    members = getattr(kind, "__members__", None)
    return isinstance(members, dict) and not kind.__dictoffset__ and members.get(getattr(value, "name", None)) == value


def _qualified(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


@functools.lru_cache(maxsize=4096)
def code_digest(code: types.CodeType) -> str:
    constants = [_constant(value) for value in code.co_consts]
    text = repr((code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _constant(value: Any) -> str:
    if inspect.iscode(value):
        return code_digest(value)
    if isinstance(value, frozenset):  # prints in hash order, which differs between processes
        return f"frozenset({sorted(map(_constant, value))})"
    if isinstance(value, tuple):
        return f"({', '.join(map(_constant, value))})"
    return f"{type(value).__name__} {value!r}"
