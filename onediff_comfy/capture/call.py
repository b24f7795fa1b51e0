"""One call of a target, split into its tensors and everything else.

A compiled graph stands for every call that has the same *structure*: the same arguments by name,
the same nesting, the same plain values, and tensors of the same shape, dtype and device. The
tensors' values are what the graph is run on; anything that is neither plain data nor a tensor
cannot be put into a graph, and the call is not covered.
"""

from __future__ import annotations

import enum
import importlib
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..messages import message
from .handed_over import Functions, Unliftable, in_order, source_of
from .option_probe import OptionProbe
from .parameters import Parameters, parameters_of, read_of

# A node of the structure tree. Plain nested tuples: hashable, comparable, printable the same way in every process.
Structure = tuple[Any, ...]

# Whether an option's value is None can be seen without reading it, so it counts as part of the name.
_IS_NONE = "=None"
_FUNCTION = "function"
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


class ChangesState(NotCovered):
    """Functions that a call hands over, or the target, change what they hold: no graph can stand for that."""


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
    """What makes two calls the same for a compiled graph. Hashable; ``lines`` is its canonical text.

    The tensors that functions hold come behind the call's own; ``functions`` is the digest of all else that they are.
    """

    function: str
    structure: Structure
    tensors: tuple[TensorSpec, ...]
    option_names: tuple[str, ...]
    functions: str = ""

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
            *([f"functions {self.functions}"] if self.functions else []),
        ]


@dataclass(frozen=True)
class Call:
    """A call's signature with the tensors it was made with, in signature order; and functions that it hands over."""

    signature: Signature
    tensors: tuple[torch.Tensor, ...] = field(compare=False)
    functions: Functions | None = field(default=None, compare=False)

    @property
    def probed(self) -> tuple[str, ...]:
        """Return the names of the arguments whose values are not part of the signature."""
        return tuple(name for name, child in self.signature.structure[1] if child[0] == _PROBED)

    @property
    def code(self) -> str:
        """Return which functions it hands over, whatever they hold; an empty text of none."""
        return "" if self.functions is None else self.functions.code

    @property
    def own_tensors(self) -> int:
        """Return how many of the tensors are the call's own, and not held by functions."""
        of = self.functions
        return len(self.tensors) - (0 if of is None else len(of.held) + len(of.numbers))

    def rebuild(self, tensors: Sequence[torch.Tensor], functions: Sequence[Any] = ()) -> dict[str, Any]:
        """Return the call's arguments by name, with ``tensors`` in place of the original ones.

        A probe takes the place of an argument whose value is not part of the signature (see ``option_probe``).

        Args:
            functions: what is in the places of the functions that the call hands over.
        """
        arguments = _rebuild(self.signature.structure, tensors, functions)
        assert isinstance(arguments, dict)
        return arguments


_NUMBERS = (int, float)
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


@dataclass
class _Splitter:
    """Collects the tensors of a call, and what is assumed of each. Runs at every call, so without inner functions."""

    takes_functions: bool = False
    tensors: list[torch.Tensor] = field(default_factory=list)
    specs: list[TensorSpec] = field(default_factory=list)
    functions: list[tuple[str, Any]] = field(default_factory=list)
    reordered: bool = False

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
        if self.takes_functions:
            self.functions.append((path, value))
            return (_FUNCTION, len(self.functions) - 1)
        raise NotCovered(
            message(
                "argument {path} holds a {kind}, which no graph can take",
                path=path,
                kind=kind.__qualname__,
                source=source_of(value),
            )
        )

    def _dict(self, value: dict[Any, Any], path: str) -> Structure:
        keys = sorted(value, key=lambda key: repr(_dict_key(key, path)))
        self.reordered = self.reordered or keys != list(value)
        return ("dict", tuple((_dict_key(key, path), self.split(value[key], f"{path}.{key}")) for key in keys))


def _dict_key(key: Any, path: str) -> Any:
    if type(key) in (str, int) or key is None:  # no bool: Python takes True for 1
        return key
    if type(key) is tuple:
        return tuple(_dict_key(part, path) for part in key)
    raise NotCovered(message("argument {path} has a key of type {kind}", path=path, kind=type(key).__qualname__))


def _rebuild(structure: Structure, tensors: Sequence[torch.Tensor], functions: Sequence[Any]) -> Any:
    kind = structure[0]
    if kind == "tensor":
        return tensors[structure[1]]
    if kind == "dict":
        return {key: _rebuild(child, tensors, functions) for key, child in structure[1]}
    if kind == "list":
        return [_rebuild(child, tensors, functions) for child in structure[1]]
    if kind == "tuple":
        return tuple(_rebuild(child, tensors, functions) for child in structure[1])
    if kind == _FUNCTION:
        return functions[structure[1]]
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

    Model families order their parameters differently, and callers mix positions and names.

    Raises:
        NotCovered: the function takes positional-only or variadic positional arguments.
    """
    plain: Any = function.__func__ if type(function) is types.MethodType else None
    read = read_of(plain.__code__, True) if type(plain) is types.FunctionType else []
    known = read and read[0] is plain.__defaults__ and not (plain.__dict__ or plain.__kwdefaults__)
    parameters: Parameters = read[1] if known else parameters_of(function)  # the same, by one call more
    if parameters.nameless is not None:
        raise NotCovered(
            message("the model's forward takes positional-only arguments ({name})", name=parameters.nameless)
        )
    form = len(args), tuple(kwargs)
    try:
        names, indices, defaults = parameters.places.get(form) or parameters.find_places(*form)
    except TypeError as error:
        raise NotCovered(message("the arguments do not fit the model's forward: {error}", error=error)) from error
    values = (*args, *kwargs.values(), *defaults)
    return dict(zip(names, map(values.__getitem__, indices), strict=True))


def split(
    arguments: Mapping[str, Any],
    *,
    function: str = "forward",
    options_name: str | None = None,
    options_read: Collection[str] = (),
    lift: Callable[[Sequence[Any], Mapping[str, Any]], Functions] | None = None,
) -> Call:
    """Split arguments into structure and tensors.

    Args:
        function: what is called, by name: a module may have several forwards (encode, decode).
        arguments: by name; tensors may be nested in dicts, lists and tuples.
        options_name: the argument that is an open-ended bag of options (ComfyUI's
            ``transformer_options``). Of it, the *names* present always belong to the signature, and the *values* only
            where the target is known to read them. So it is then with arguments that are plain numbers: some only
            repeat what a tensor's shape says, and differ with every prompt.
        options_read: the names of options and of number arguments that the target reads (see ``option_probe``).
        lift: makes of the functions that the options hold, and these, what a graph can take. Raises ``Unliftable``.

    Raises:
        NotCovered: an argument, or an option that is read, holds something no graph can take.
    """
    splitter, children, probed = _Splitter(), [], []
    plain = dict(arguments)
    names, probes_numbers = list[str](), False
    if options_name is not None and plain.get(options_name) is not None:
        options, probes_numbers = plain[options_name], True
        for name, value in options.items():
            names.append(f"{name}{_IS_NONE}" if value is None else f"{name}")
        plain[options_name] = {}  # in an order that does not depend on the process
        for name in sorted(options_read):
            if name in options:
                plain[options_name][name] = options[name]
    try:
        for name in sorted(plain):
            value = plain[name]
            if probes_numbers and type(value) in _NUMBERS and name not in options_read:
                probed.append((name, (_PROBED, name)))
            else:
                splitter.takes_functions = lift is not None and name == options_name
                children.append((name, splitter.split(value, name)))
    except RecursionError:
        raise NotCovered(message("the arguments hold something that contains itself")) from None
    structure: Structure = ("dict", (*children, *probed))
    structure = in_order(structure, {n: plain[n] for n, _ in structure[1]}) if splitter.reordered else structure
    signature = Signature(function, structure, tuple(splitter.specs), tuple(sorted(names)))
    if lift is not None and splitter.functions:
        return _with_functions(signature, splitter, plain, lambda functions: lift(functions, options))
    return Call(signature, tuple(splitter.tensors))


def _with_functions(
    signature: Signature, splitter: _Splitter, arguments: Mapping[str, Any], lift: Callable[[Sequence[Any]], Functions]
) -> Call:
    """Return a call with its functions, lifted, and the tensors that they hold.

    Args:
        signature: of the call, without them.
        arguments: what ``splitter`` has split.

    Raises:
        NotCovered: no graph can take one of the functions.
    """
    try:
        lifted = lift([value for _, value in splitter.functions])
    except Unliftable as refusal:
        path, value = splitter.functions[refusal.index]
        raise NotCovered(
            message(
                "argument {path} holds {name}, which no graph can take: {why}",
                path=path,
                name=source_of(value).partition(":")[2],
                why=refusal.reason,
                source=source_of(value),
            )
        ) from refusal
    largest = max(splitter.tensors, key=torch.Tensor.numel, default=None)
    held = lifted.tensors(largest.device if largest is not None else torch.device("cpu"))
    specs = (TensorSpec(tuple(tensor.shape), tensor.dtype, tensor.device) for tensor in held)
    structure = in_order(signature.structure, {name: arguments[name] for name in sorted(arguments)})
    signature = replace(signature, structure=structure, tensors=(*signature.tensors, *specs), functions=lifted.digest)
    return Call(signature, (*splitter.tensors, *held), lifted)
