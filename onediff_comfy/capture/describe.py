"""Text that identifies Python values: equal for equal meaning, in every process, and different otherwise.

Used for what a forward may depend on besides tensors: attributes, functions, closures, classes.
There is no guessing. A value without describable state (an object of a C extension, say) is
refused, because leaving it out would let two different models pass for one.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import hashlib
import inspect
import re
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..messages import message

_PLAIN = frozenset(
    (bool, int, str, bytes, complex, range, slice, torch.dtype, torch.device, torch.layout, torch.memory_format)
)
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
        *("__hash__",),
    )
)


class Indescribable(Exception):
    """A value has no state that could be put into words; says which."""


class AddressInText(Exception):
    """A text that is to be the same in every process holds an address in memory; says where, without it."""


class Describer:
    """Describes values that belong to one module tree.

    Args:
        layers: the tree's layers, by ``id``, with their paths. They are mentioned by path; a module
            outside the tree is indescribable, because its weights would be baked into a capture.

    Attributes:
        code: the functions and classes that were met so far.
    """

    def __init__(self, layers: Mapping[int, str]) -> None:
        self._layers = layers
        self._open: dict[int, int] = {}
        self.code: list[Any] = []

    def describe(self, value: Any) -> str:
        """A text for ``value``.

        Raises:
            Indescribable: something in it has no describable state.
        """
        kind = type(value)
        if value is None or value is Ellipsis or kind in _PLAIN:
            return f"{kind.__name__} {value!r}"
        if kind is float:
            return f"float {value.hex()}"
        if isinstance(value, torch.Tensor):
            return f"tensor {value.dtype} {tuple(value.shape)} {value.device.type} {tensor_digest(value)}"
        if isinstance(value, torch.nn.Module):
            path = self._layers.get(id(value))
            if path is None:
                raise Indescribable(message("a {kind} layer outside of its module tree", kind=kind.__qualname__))
            return f"layer {path}"
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
        if isinstance(value, enum.Enum):
            return f"enum {_qualified(kind)}.{value.name}"
        if isinstance(value, type):
            self.code.append(value)
            return f"class {_qualified(value)}"
        if isinstance(value, types.ModuleType):
            return f"python module {value.__name__}"
        if isinstance(value, dict):
            items = [f"{self.describe(key)}: {self.describe(child)}" for key, child in value.items()]
            return f"{_qualified(kind)} {{{', '.join(items)}}}"
        if isinstance(value, (list, tuple)):
            return f"{_qualified(kind)} [{', '.join(map(self.describe, value))}]"
        if isinstance(value, (set, frozenset)):
            return f"{_qualified(kind)} {{{', '.join(sorted(map(self.describe, value)))}}}"
        if callable(value) and (text := self._function(value)) is not None:
            return text
        return self._object(value, kind)

    def _function(self, value: Any) -> str | None:
        if isinstance(value, types.FunctionType):
            self.code.append(value)
            state = self.describe(held_by(value))
            return f"function {value.__module__}.{value.__qualname__} {code_digest(value.__code__)} {state}"
        if isinstance(value, types.MethodType):
            return f"method {self.describe(value.__func__)} of {self.describe(value.__self__)}"
        if isinstance(value, functools.partial):
            return f"partial {self.describe([value.func, value.args, value.keywords])}"
        if isinstance(value, _BUILTIN_FUNCTIONS):
            return f"builtin {getattr(value, '__module__', None)}.{value.__qualname__}"
        if isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            return f"operator {value}"
        return None

    def _object(self, value: Any, kind: type) -> str:
        self.code.append(kind)
        if dataclasses.is_dataclass(value):
            state = {item.name: getattr(value, item.name, None) for item in dataclasses.fields(value)}
        else:
            names = [name for base in kind.__mro__ for name in _slots(base)]
            state = {name: getattr(value, name) for name in names if hasattr(value, name)}
        state |= getattr(value, "__dict__", {})
        if not state and kind.__basicsize__ > object.__basicsize__ and not hasattr(value, "__dict__"):
            raise Indescribable(message("a {kind}", kind=_qualified(kind)))
        base = next((plain for plain in _NUMBERS_AND_TEXT if isinstance(value, plain)), None)
        if base is not None:  # a kind of number that has attributes too
            state["itself"] = base(value)
        return f"object {_qualified(kind)} {self.describe(dict(sorted(state.items())))}"

    def class_lines(self, kind: type) -> Iterator[str]:
        """What instances of a class compute with besides functions: the plain attributes that it defines itself.

        Classes of torch and of Python are left out; their versions are known.
        """
        if is_foundation(kind.__module__):
            return
        for name, member in sorted(vars(kind).items()):
            if name not in CLASS_BOOKKEEPING and not isinstance(member, _FUNCTIONS_IN_CLASSES):
                yield f"{_qualified(kind)}.{name} {self.describe_or_name(member)}"

    def describe_or_name(self, value: Any) -> str:
        """As ``describe``; of what cannot be described its type, where that is one among hundreds of values."""
        try:
            return self.describe(value)
        except Indescribable:
            return f"some {_qualified(type(value))}"


_FUNCTIONS_IN_CLASSES = (types.FunctionType, staticmethod, classmethod, property)


def is_foundation(module: str) -> bool:
    """Whether a Python module belongs to torch or Python itself, whose versions are known."""
    return module.partition(".")[0] in ("torch", "builtins", "abc", "typing", "functools", "collections", "enum")


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


_CONTAINERS = (dict, list, set)


def _defaults(function: types.FunctionType) -> tuple[Any, Any]:
    """The defaults of a function's positional and keyword parameters, as it was defined.

    A default written ``options={}`` fills up with whatever calls without options leave in it (ComfyUI's UNet
    blocks note the sizes of their images there). That is no part of the code, and would be another at every call.
    """
    positional, named = function.__defaults__, function.__kwdefaults__
    filled = [v for v in (*(positional or ()), *(named or {}).values()) if type(v) in _CONTAINERS and v]
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
    return [*(positional or ()), *(named or {}).values(), *map(_cell_content, function.__closure__ or ())]


def _cell_content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return "empty cell"


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


def argument_text(value: Any, name: Callable[[torch.fx.Node], str]) -> str:
    """The arguments of a graph's node as canonical text.

    Args:
        value: what a node holds as ``args`` or ``kwargs``, or a part of it.
        name: the text for another node.
    """
    if isinstance(value, torch.fx.Node):
        return name(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(argument_text(item, name) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {argument_text(item, name)}' for key, item in sorted(value.items()))}}}"
    if isinstance(value, types.FunctionType):
        return target_text(value)
    return value.hex() if isinstance(value, float) else repr(value)


def target_text(target: Any) -> str:
    """What a graph's node calls. Python functions by module and name, for ``str`` gives them their address."""
    return f"{target.__module__}.{target.__qualname__}" if isinstance(target, types.FunctionType) else str(target)


_ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]+")


def text_digest(lines: Sequence[str]) -> str:
    """sha256 over lines that identify something in every process.

    Raises:
        AddressInText: a line holds an address, which is another in every process.
    """
    for line in lines:
        if _ADDRESS.search(line):
            raise AddressInText(_ADDRESS.sub("at …", line))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def tensor_digest(tensor: torch.Tensor) -> str:
    """sha256 over a tensor's values (on the CPU, contiguous), for constants that belong to the code."""
    if tensor.is_meta:
        return "meta"
    data = tensor.detach().to("cpu").contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()
