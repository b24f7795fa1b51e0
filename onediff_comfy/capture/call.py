"""One call of a target, split into its tensors and everything else.

A compiled graph stands for every call that has the same *structure*: the same arguments by name,
the same nesting, the same plain values, and tensors of the same shape, dtype and device. The
tensors' values are what the graph is run on; anything that is neither plain data nor a tensor
cannot be put into a graph, and the call is not covered.
"""

from __future__ import annotations

import enum
import functools
import importlib
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..messages import message
from .option_probe import OptionProbe

# A node of the structure tree. Plain nested tuples: hashable, comparable, printable the same way
# in every process.
Structure = tuple[Any, ...]


# Whether an option's value is None can be seen without reading it, so it counts as part of the name.
_IS_NONE = "=None"

# An argument that a probe stands for. The word is part of keys on disk, so it stays.
_PROBED = "withheld"

ANY_SIZE = -1
"""Stands for every size in a signature that leaves sizes open."""


class NotCovered(Exception):
    """This call cannot be served by a compiled graph; the host's own code must run it.

    ``reason`` is short, stable and free of addresses, so that calls can be counted by it.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class TensorSpec:
    """What a compiled graph may assume of one tensor: sizes, dtype, device; always contiguous."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def __str__(self) -> str:
        sizes = "x".join("?" if size == ANY_SIZE else str(size) for size in self.shape) or "scalar"
        return f"{str(self.dtype).removeprefix('torch.')}[{sizes}]@{self.device}"


@dataclass(frozen=True)
class Signature:
    """What makes two calls the same for a compiled graph. Hashable; ``lines`` is its canonical text."""

    function: str
    structure: Structure
    tensors: tuple[TensorSpec, ...]
    option_names: tuple[str, ...]

    def any_sizes(self) -> Signature:
        """Return this signature with the sizes left open: what calls of all sizes have in common."""
        return replace(self, tensors=tuple(replace(t, shape=(ANY_SIZE,) * len(t.shape)) for t in self.tensors))

    def options(self) -> dict[str, object]:
        """Return the bag of options as far as a signature tells it: None where a value is None, an object elsewhere."""
        names = ((name.removesuffix(_IS_NONE), name.endswith(_IS_NONE)) for name in self.option_names)
        return {name: None if is_none else object() for name, is_none in names}

    def with_batch(self, batch: int, other: int) -> Signature:
        """Return this signature as a call of ``other`` samples has it, where ``batch`` is the first axis."""
        tensors = tuple(replace(t, shape=(other, *t.shape[1:])) if t.shape[:1] == (batch,) else t for t in self.tensors)
        return replace(self, tensors=tensors)

    def lines(self) -> list[str]:
        """Return one line for every fact, in an order that does not depend on the process."""
        return [
            f"function {self.function}",
            f"structure {self.structure!r}",
            *(f"tensor {index} {spec}" for index, spec in enumerate(self.tensors)),
            f"options {self.option_names!r}",
        ]


@dataclass(frozen=True)
class Call:
    """A call's signature with the tensors it was made with, in signature order."""

    signature: Signature
    tensors: tuple[torch.Tensor, ...] = field(compare=False)

    @property
    def probed(self) -> tuple[str, ...]:
        """Return the names of the arguments whose values are not part of the signature."""
        return tuple(name for name, child in self.signature.structure[1] if child[0] == _PROBED)

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
        """Return the call's arguments by name, with ``tensors`` in place of the original ones.

        A probe takes the place of an argument whose value is not part of the signature (see ``option_probe``).
        """
        arguments = _rebuild(self.signature.structure, tensors)
        assert isinstance(arguments, dict)
        return arguments


_NUMBERS = (int, float)
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


@dataclass
class _Splitter:
    """Collects the tensors of a call, and what is assumed of each. Runs at every call, so without inner functions."""

    tensors: list[torch.Tensor] = field(default_factory=list)
    specs: list[TensorSpec] = field(default_factory=list)

    def split(self, value: Any, path: str) -> Structure:
        kind = type(value)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            if value.layout != torch.strided:
                raise NotCovered(message("argument {path} is a {layout} tensor", path=path, layout=value.layout))
            tensor = value.detach().contiguous()
            self.tensors.append(tensor)
            self.specs.append(TensorSpec(tuple(tensor.shape), tensor.dtype, tensor.device))
            return ("tensor", len(self.tensors) - 1)
        if kind is dict:
            return self._dict(value, path) if value else ("dict", ())
        if kind in (list, tuple, torch.Size):
            parts = []
            for index, part in enumerate(value):
                parts.append(self.split(part, f"{path}[{index}]"))
            return ("list" if kind is list else "tuple", tuple(parts))
        if issubclass(kind, enum.Enum) and "<locals>" not in kind.__qualname__:
            return ("enum", kind.__module__, kind.__qualname__, value.name)
        if kind in _PLAIN:
            # hex() is exact and the same on every platform, repr() of a float only the former;
            # the type name keeps 1, 1.0 and True apart, which Python calls equal.
            text = value.hex() if kind is float else str(value)
            return ("value", kind.__name__, text)
        raise NotCovered(
            message(
                "argument {path} holds a {kind}, which no graph can take",
                path=path,
                kind=kind.__qualname__,
                source=source_of(value),
            )
        )

    def _dict(self, value: dict[Any, Any], path: str) -> Structure:
        items = sorted(value.items(), key=lambda item: repr(_dict_key(item[0], path)))
        return ("dict", tuple((_dict_key(key, path), self.split(part, f"{path}.{key}")) for key, part in items))


def source_of(value: Any) -> str:
    """Return where code is from, as ``module:name``: of a function its own, of anything else its class's."""
    while isinstance(value, functools.partial):
        value = value.func
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}:{named.__qualname__}"


def _dict_key(key: Any, path: str) -> Any:
    if type(key) in (str, int) or key is None:  # no bool: Python takes True for 1
        return key
    if type(key) is tuple:
        return tuple(_dict_key(part, path) for part in key)
    raise NotCovered(message("argument {path} has a key of type {kind}", path=path, kind=type(key).__qualname__))


def _rebuild(structure: Structure, tensors: Sequence[torch.Tensor]) -> Any:
    kind = structure[0]
    if kind == "tensor":
        return tensors[structure[1]]
    if kind == "dict":
        return {key: _rebuild(child, tensors) for key, child in structure[1]}
    if kind == "list":
        return [_rebuild(child, tensors) for child in structure[1]]
    if kind == "tuple":
        return tuple(_rebuild(child, tensors) for child in structure[1])
    if kind == _PROBED:
        return OptionProbe(structure[1])
    if kind == "enum":
        owner: Any = importlib.import_module(structure[1])
        for name in (*structure[2].split("."), structure[3]):
            owner = getattr(owner, name)
        return owner
    _, type_name, text = structure
    return _PARSERS[type_name](text)


_PARSERS: Mapping[str, Callable[[str], Any]] = {
    "NoneType": lambda _: None,
    "bool": lambda text: text == "True",
    "int": int,
    "float": float.fromhex,
    "str": str,
    "dtype": lambda text: getattr(torch, text.removeprefix("torch.")),
    "device": torch.device,
}


def bind(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``function(*args, **kwargs)`` by name, defaults filled in.

    Model families order their parameters differently, and callers mix positions and names: names
    are the only common ground.

    Raises:
        NotCovered: the function takes positional-only or variadic positional arguments.
    """
    signature = inspect.signature(function)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise NotCovered(message("the arguments do not fit the model's forward: {error}", error=error)) from error
    bound.apply_defaults()
    arguments: dict[str, Any] = {}
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments.update(bound.arguments[name])
        elif parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            raise NotCovered(message("the model's forward takes positional-only arguments ({name})", name=name))
        else:
            arguments[name] = bound.arguments[name]
    return arguments


def split(
    arguments: Mapping[str, Any],
    *,
    function: str = "forward",
    options_name: str | None = None,
    options_read: Collection[str] = (),
) -> Call:
    """Split arguments into structure and tensors.

    Args:
        function: what is called, by name: a module may have several forwards (encode, decode).
        arguments: by name; tensors may be nested in dicts, lists and tuples.
        options_name: the argument that is an open-ended bag of options (ComfyUI's
            ``transformer_options``). Of it, the *names* present always belong to the signature, and
            the *values* only where the target is known to read them. So it is then with arguments that are
            plain numbers: some only repeat what a tensor's shape says, and differ with every prompt.
        options_read: the option names, and names of number arguments, that the target reads (see
            ``option_probe``).

    Raises:
        NotCovered: an argument, or an option that is read, holds something no graph can take.
    """
    splitter, children, probed = _Splitter(), [], []
    plain = dict(arguments)
    option_names: tuple[str, ...] = ()
    probes_numbers = False
    if options_name is not None and plain.get(options_name) is not None:
        options, names = plain[options_name], []
        for name, value in options.items():
            names.append(f"{name}{_IS_NONE}" if value is None else f"{name}")
        option_names = tuple(sorted(names))
        plain[options_name] = {}  # in an order that does not depend on the process
        for name in sorted(options_read):
            if name in options:
                plain[options_name][name] = options[name]
        probes_numbers = True
    try:
        for name in sorted(plain):
            value = plain[name]
            if probes_numbers and type(value) in _NUMBERS and name not in options_read:
                probed.append((name, (_PROBED, name)))
            else:
                children.append((name, splitter.split(value, name)))
    except RecursionError:
        raise NotCovered(message("the arguments hold something that contains itself")) from None
    structure = ("dict", (*children, *probed))
    return Call(Signature(function, structure, tuple(splitter.specs), option_names), tuple(splitter.tensors))
