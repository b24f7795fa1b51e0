"""What a call needs to know of the functions that it hands over; ``functions`` makes them fit for a graph."""

from __future__ import annotations

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..messages import Message, message


class ChangedState(BaseException):
    """A function changed what it holds, or a variable of a module, while it was traced. None of its code catches it."""


class Unliftable(Exception):
    """A function cannot be part of a graph; ``index`` says which, ``reason`` why."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(reason)
        self.index, self.reason = index, reason


class Copies(ABC):
    """Functions as they are traced.

    Attributes:
        functions: instead of those that were handed over.
    """

    functions: Sequence[Any]

    @abstractmethod
    def hand_over(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options as the functions are handed them. The dicts and lists in them are not to change."""

    @abstractmethod
    def check(self) -> None:
        """See that they are as they were made.

        Raises:
            ChangedState: they are not.
        """


@dataclass(frozen=True, eq=False)
class Functions(ABC):
    """The functions of one call, described.

    Attributes:
        functions: as they were handed over.
        digest: sha256 over everything but the tensors.
        code: sha256 over which functions they are, whatever they hold.
        held: tensors that they hold.
        numbers: that they hold, and that are inputs of the graph too.
    """

    functions: Sequence[Any]
    digest: str
    code: str
    held: Sequence[torch.Tensor]
    numbers: Sequence[Any]

    @property
    @abstractmethod
    def number(self) -> int:
        """Return a number of the numbers that they hold: a proof is of these, and of what a signature says of them."""

    @property
    @abstractmethod
    def are_assumed(self) -> bool:
        """Return True if they are described as if they decided by values as in the call before."""

    @abstractmethod
    def are_as_assumed(self) -> bool:
        """Return True if they do. Waits for the device."""

    @abstractmethod
    def decided(self) -> Functions:
        """Return them with the values by which they decide, if they are as assumed."""

    @abstractmethod
    def tensors(self, device: torch.device, held: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Return the tensors that the functions hold, as they are now, and behind them the numbers.

        Args:
            device: where the call computes; numbers are tensors without axes there.
            held: in the place of their own tensors, as ``with_other_values`` gives them.
        """

    @abstractmethod
    def copies(self, tensors: Sequence[torch.Tensor], raised: list[BaseException]) -> Copies:
        """Return copies of the functions that hold ``tensors`` instead of their own.

        Args:
            raised: takes in what stand-ins raise, for code that catches everything.
        """

    @abstractmethod
    def with_other_values(self) -> tuple[Sequence[torch.Tensor], Sequence[Any]]:
        """Return tensors of other values than the functions hold, and copies of the functions that hold those.

        The copies are for the host's own code: numbers in them are numbers.
        """

    @abstractmethod
    def learned_from(self, error: BaseException) -> str | None:
        """Return the name of what functions read, if a trace may have failed because that was not known."""

    @abstractmethod
    def unchanged(self) -> contextlib.AbstractContextManager[None]:
        """Put back what changes inside.

        Raises:
            ChangedState: something that is no tensor did.
        """


def changes_state(functions: Functions) -> Message:
    """Say that functions, or what they hold, are others after a call."""
    source = source_of(functions.functions[0])
    return message(
        "{name}, which the options hold, changes what it keeps", name=source.partition(":")[2], source=source
    )


def source_of(value: Any) -> str:
    """Return where code is from, as ``module:name``: of a function its own, of anything else its class's."""
    while isinstance(value, functools.partial):
        value = value.func
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}:{named.__qualname__}"


def in_order(structure: Any, value: Any) -> Any:
    """Return a structure (see ``call``) whose dicts are in the order that they have in ``value``.

    Whoever is handed one may go through it.
    """
    kind = structure[0]
    if kind == "dict":
        known = dict(structure[1])
        return (kind, tuple((key, in_order(known[key], part)) for key, part in value.items()))
    if kind in ("list", "tuple"):
        return (kind, tuple(in_order(part, of) for part, of in zip(structure[1], value, strict=True)))
    return structure
