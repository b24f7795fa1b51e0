"""Something of the host that we use, and what is the matter if it is not as we need it."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ..messages import Message, message

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Use:
    """Something of the host that we use.

    Attributes:
        module: where it is.
        path: its name there.
        given: the arguments that we call it with by position, by the names that they have today; None if it
            is not called.
        named: the arguments that we call it with by name.
        mentions: names that its code has: attributes that it sets, say, where we read them.
        works: tries it out; for what a signature does not tell. Only called if all of the same kind is there.
    """

    module: str
    path: str
    given: tuple[str, ...] | None = None
    named: tuple[str, ...] = ()
    mentions: tuple[str, ...] = ()
    works: Callable[[Any], bool] | None = None

    def __str__(self) -> str:
        return f"{self.module}.{self.path}"

    def found(self) -> Any:
        """Return the thing itself.

        Raises:
            Exception: there is no such thing.
        """
        return functools.reduce(getattr, self.path.split("."), importlib.import_module(self.module))

    def problem(self) -> Message | None:
        """Return what is not as we need it, or None."""
        try:
            found = self.found()
        except Exception as error:  # whatever a module raises that cannot be imported
            log.debug("%s was not found: %r", self, error)
            return message("it no longer exists")
        if self.given is not None and not _can_be_called(found, self.given, self.named):
            return message(
                "it no longer takes ({names})", names=", ".join([*self.given, *(f"{name}=" for name in self.named)])
            )
        if self.mentions:
            known = None if self._is_an_extensions(found) else _mentioned(found)
            gone = [name for name in self.mentions if known is not None and name not in known]
            if gone:
                return message("it no longer has {names}", names=", ".join(gone))
        return None

    def _is_an_extensions(self, function: Any) -> bool:
        """Return True if another extension has replaced the function, so that its code says nothing of the host."""
        owner, _, name = self.path.rpartition(".")
        module = importlib.import_module(self.module)
        holder = functools.reduce(getattr, filter(None, owner.split(".")), module)
        if name not in vars(holder):  # it is a base class's
            return False
        code = getattr(inspect.unwrap(function), "__code__", None)
        return getattr(code, "co_filename", None) != module.__file__


def _can_be_called(function: Any, given: tuple[str, ...], named: tuple[str, ...]) -> bool:
    try:
        inspect.signature(function).bind(*given, **dict.fromkeys(named))
    except TypeError:
        return False
    except ValueError:  # no signature to be had
        return callable(function)
    return callable(function)


def _mentioned(function: Any) -> set[str]:
    """Return the names in a function's code; none for one that is not written in Python."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return set(_names_in(code)) if isinstance(code, types.CodeType) else set()


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, types.CodeType):
            yield from _names_in(constant)
