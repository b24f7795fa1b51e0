"""The walk through what functions hold: a text for all of it, the tensors in it, and the code that it runs."""

from __future__ import annotations

import collections
import enum
import functools
import logging
import types
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ...messages import message
from ..fingerprint.code_ownership import is_impostor
from ..fingerprint.snapshot import Snapshot
from ..fingerprint.watching_describer import WatchingDescriber
from ..values.tensors import own_attributes
from ..values.value_text import Indescribable
from .forms import is_leaf, order_of, take_apart, text_of
from .numbers import HeldNumber, Uses

_OWN_ADDRESS = "._torchdynamo_wrapper_id"
"""Where ``torch.compiler.disable`` notes the address of the function that it gives: another for each such function."""


class Part(NamedTuple):
    """A part of an object.

    Attributes:
        value: the part.
        place: where it is, in words that are the same for all objects of a class.
        parent: the object's ``id``, and which of its parts it is; None of what a call hands over.
    """

    value: Any
    place: str
    parent: tuple[int, int] | None


_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_OF_LOGGERS = vars(logging.Logger("")).keys() - {"manager"}  # which the root has of its class
_OF_ENUMS = frozenset(("_value_", "_name_", "__objclass__", "_sort_order_"))
_MOST_OBJECTS = 20_000
_MOST_BYTES_OF_ARRAY = 1 << 16  # which are compared at every call


class StateDescriber(WatchingDescriber):
    """Describes what code reads, watches it, and takes no tensor: its values would be constants of the graph.

    Args:
        layers: as of ``Describer``.
        snapshot: told of every object that was described.

    Attributes:
        described: the ``id`` of each, which are watched and so alive.
    """

    def __init__(self, layers: Mapping[int, str], snapshot: Snapshot) -> None:
        super().__init__(layers, snapshot)
        self.described: set[int] = set()

    def describe(self, value: Any) -> str:
        """A text for ``value``.

        Raises:
            Indescribable: something in it has no describable state, is a tensor, or remembers results.
        """
        if isinstance(value, torch.Tensor):
            raise Indescribable(message("a tensor that is kept in a variable of a module or of a class"))
        if isinstance(value, functools._lru_cache_wrapper):
            raise Indescribable(message("a function that remembers what it gave"))
        _refuse_other_kinds(value)
        if isinstance(value, np.ndarray) and value.nbytes > _MOST_BYTES_OF_ARRAY:
            raise Indescribable(message("a large array"))
        if isinstance(value, logging.Logger):
            return self._logger(value)
        text = super().describe(value)
        if self.snapshot.knows(value):  # and so keeps it: no other object gets its id
            self.described.add(id(value))
        return f"{text}{self._besides(value)}"

    def _besides(self, value: Any) -> str:
        """The text for what code may ask of an object, and an attribute of a layer never is."""
        if isinstance(value, types.FunctionType):
            return f" {text_of(value)}"
        if isinstance(value, enum.Enum):
            own = {name: part for name, part in vars(value).items() if name not in _OF_ENUMS}
            return f" {self.describe(own)}" if own else ""
        if isinstance(value, (set, frozenset)):
            return f" {order_of(value)}"
        return f" {value.maxlen}" if isinstance(value, collections.deque) else ""

    def _logger(self, logger: logging.Logger) -> str:
        """The text for a logger: what code may ask it for."""
        asked = []
        while logger is not None:
            if vars(logger).keys() - {"manager"} != _OF_LOGGERS:
                raise Indescribable(message("a {kind}", kind="logging.Logger"))
            for watched in (logger, logger.manager, logger.handlers, logger.filters):
                self.snapshot.add(watched)
            has = len(logger.handlers), len(logger.filters), logger.propagate, logger.manager.disable
            asked.append((logger.name, logger.level, logger.disabled, *has))
            logger = logger.parent  # type: ignore[assignment]
        return f"logger {asked}"


class HeldState:
    """What functions hold, walked together: they may share objects.

    Args:
        layers: of the module that they are called by, by ``id``, with their paths. A layer of it is mentioned, and
            not walked through.
        describer: describes leaves, and has met the code of all objects afterwards.
        uses: what is known of how numbers are used.

    Attributes:
        lines: the text.
        tensors: each once, in the order in which they were met.
        numbers: those that are only calculated with.
        objects: all that has parts, by ``id``, with the parts.
    """

    def __init__(self, layers: Mapping[int, str], describer: StateDescriber, uses: Uses) -> None:
        self._layers, self._describer, self._uses = layers, describer, uses
        self.lines: list[str] = []
        self.tensors: list[torch.Tensor] = []
        self.numbers: list[HeldNumber] = []
        self.objects: dict[int, tuple[Any, Sequence[Any]]] = {}
        self._indices: dict[int, int] = {}
        self._layers_met: dict[int, torch.nn.Module] = {}
        self._counted: dict[int, int] = {}

    def of_kind(self, kind: type[Any]) -> list[Any]:
        """Return the objects of a class that were met."""
        return [value for value, _ in self.objects.values() if isinstance(value, kind)]

    def layers_met(self) -> list[torch.nn.Module]:
        """Return the layers of the calling module that were met, and those in them."""
        found = {id(layer): layer for met in self._layers_met.values() for layer in met.modules()}
        return list(found.values())

    def walk(self, value: Any) -> None:
        """Take in a value and all that it holds.

        Raises:
            Indescribable: something in it cannot be part of a graph's identity.
        """
        waiting = [Part(value, "", None)]
        while waiting:
            waiting += reversed(self._visit(waiting.pop()))

    def _visit(self, part: Part) -> list[Part]:
        """Add the line of one object, and return its parts."""
        value = part.value
        _refuse_other_kinds(value)
        if isinstance(value, torch.Tensor):
            self.lines.append(self._tensor(value))
            return []
        if type(value) is float and part.parent is not None and not self._uses.is_fixed(part.place):
            self.lines.append(f"number {self._uses.outcomes(part.place, value)}")
            self.numbers.append(HeldNumber(value, part.place, part.parent))
            return []
        if part.place.endswith(_OWN_ADDRESS) and value in self._counted:
            self.lines.append(f"address of {self._counted[value]}")
            return []
        if id(value) in self._layers:
            self._layers_met[id(value)] = value
        if id(value) in self._layers or is_leaf(value):
            self.lines.append(self._describer.describe(value))
            return []
        if id(value) in self._counted:
            self.lines.append(f"again {self._counted[id(value)]}")
            return []
        return self._taken_apart(part)

    def _taken_apart(self, part: Part) -> list[Part]:
        value = part.value
        kind = type(value)
        parts = take_apart(value, self._describer.describe)
        if parts is None:
            raise Indescribable(message("a {kind}", kind=f"{kind.__module__}.{kind.__qualname__}"))
        self._counted[id(value)] = len(self._counted)
        self.objects[id(value)] = value, parts.children
        if len(self.objects) > _MOST_OBJECTS:
            raise Indescribable(message("more objects than can be looked at"))
        self._describer.snapshot.add(value)
        place = part.place
        if isinstance(value, types.FunctionType):
            self._describer.code.append(value)
            place = _word(value.__qualname__)
        elif not isinstance(value, (types.CellType, types.MethodType, dict, list, tuple)):
            self._describer.code.append(kind)
            place = _word(kind.__qualname__)
        self.lines.append(f"{parts.label} with {len(parts.children)}")
        names = parts.names or [""] * len(parts.children)
        return [
            Part(child, f"{place}.{_word(name)}" if name else place, (id(value), index))
            for index, (child, name) in enumerate(zip(parts.children, names, strict=True))
        ]

    def _tensor(self, value: torch.Tensor) -> str:
        """The line of a tensor: which one it is. Its sizes, dtype and device are those of an input.

        Raises:
            Indescribable: it is more than numbers.
        """
        if type(value) not in _PLAIN_TENSORS or value.layout != torch.strided or own_attributes(value):
            raise Indescribable(message("a tensor of the kind {kind}", kind=type(value).__qualname__))
        index = self._indices.setdefault(id(value), len(self.tensors))
        if index == len(self.tensors):
            self.tensors.append(value)
        return f"tensor {index} {type(value).__name__} {value.requires_grad}"


def _refuse_other_kinds(value: Any) -> None:
    """Refuse an object that is not all that it is taken for.

    Raises:
        Indescribable: it says that it is of another class, or keeps more than its class does.
    """
    kind = type(value)
    if value.__class__ is not kind or any("__class__" in vars(base) for base in kind.__mro__[:-1]):
        raise Indescribable(message("an object that says it is of another class"))
    if isinstance(value, (np.ndarray, np.void)) and kind is not np.ndarray:
        raise Indescribable(message("a {kind}", kind=f"{kind.__module__}.{kind.__qualname__}"))
    if isinstance(value, functools.partial) and (kind is not functools.partial or vars(value)):
        raise Indescribable(message("a {kind}", kind="functools.partial"))
    if isinstance(value, types.ModuleType) and is_impostor(vars(value)):
        raise Indescribable(message("a module that is called like another"))


def _word(name: str) -> str:
    """A name without spaces and the like: places are parts of texts that are taken apart."""
    return urllib.parse.quote(name, safe="<>.")
