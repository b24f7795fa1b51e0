"""The text that identifies code, line by line, and the variables that get a line once code is known to read them."""

from __future__ import annotations

import os
import sys
import types
from typing import Any, NamedTuple

from ...messages import Message, first_line, message
from ..values.code_values import identity
from ..values.global_reads import strings
from ..values.value_text import CLASS_BOOKKEEPING, PLAIN, Describer, Indescribable, is_plain
from .unread_attributes import Reads


class IdentityLines:
    """Collects lines: one for each function, for each name that something is called by, and for each value read.

    Args:
        describer: describes values.

    Attributes:
        refusal: why what was described cannot be part of an identity, if so.
    """

    def __init__(self, describer: Describer) -> None:
        self._describer = describer
        self._lines: set[str] = set()
        self.refusal: Message | None = None

    def add(self, line: str) -> None:
        """Take in a line. Its place does not count, nor how often it comes."""
        self._lines.add(line)

    def sorted(self) -> list[str]:
        """Return the lines, in an order that is the same in every process."""
        return sorted(self._lines)

    def described(self, where: str, value: Any) -> str:
        """Return the text for a value; of what has none its type, with a refusal."""
        try:
            return self._describer.describe(value)
        except Exception as error:  # of Indescribable, and of whatever an extension's object does when it is looked at
            what = error if isinstance(error, Indescribable) else f"{type(error).__name__}: {first_line(error)}"
            self.refusal = self.refusal or message(
                "the model's code reads {name}, which holds {error}; that cannot be part of a graph's identity",
                name=where.replace(": ", "."),
                error=what,
            )
            return f"some {identity(value)}"

    def constant_of_library(self, value: Any, owner: str) -> str | None:
        """Return the text for a constant of a library, which an extension may have replaced; None for other values.

        They are the same in every process. What else libraries keep in variables is bookkeeping of theirs, as are
        lists and tables of Python's own (``sys.path``).

        Args:
            owner: the library's module that has it; empty where it belongs to a function.
        """
        constant = type(value) in PLAIN or owner.partition(".")[0] not in sys.stdlib_module_names
        return self._describer.describe_or_name(value) if constant and is_plain(value) else None

    def add_environment(self, function: types.FunctionType) -> None:
        """Take in the variables of the environment whose names are in a function's code."""
        for name in strings(function.__code__):
            if name.isidentifier():
                self.add(f"environment {name} = {os.environ.get(name)!r}")


class OpenVariable(NamedTuple):
    """A variable that counts if code may read it.

    Attributes:
        value: what it holds.
        owner: the Python module that it belongs to.
        read: it is known to be read.
    """

    value: Any
    owner: str
    read: bool = False


class OpenVariables:
    """Variables that wait for somebody to read them, by where they are and their names.

    Args:
        reads: what code may read.
        describer: has met strings, which may be names.
    """

    def __init__(self, reads: Reads, describer: Describer) -> None:
        self._reads, self._describer = reads, describer
        self._open: dict[tuple[str, str], OpenVariable] = {}
        self._taken: set[tuple[str, str]] = set()

    def add(self, where: str, name: str, variable: OpenVariable) -> None:
        """Have a variable wait."""
        self._open[where, name] = variable

    def take_read(self) -> tuple[bool, list[tuple[str, OpenVariable]]]:
        """Take out what is read by now.

        Returns:
            Whether there was any; and, of it, what was not taken out before, by its path.
        """
        known = self._describer.strings
        read = [key for key, of in self._open.items() if of.read or key[1] in known or self._may_read(key[1])]
        found = [(".".join(key), self._open.pop(key), key) for key in read]
        new = [(where, variable) for where, variable, key in found if key not in self._taken]
        self._taken.update(read)
        return bool(read), new

    def _may_read(self, name: str) -> bool:
        """Return True if code may read a variable of this name. What each class has is read by those that name it."""
        return self._reads.names(name) if name in CLASS_BOOKKEEPING else self._reads.may_read(name)
