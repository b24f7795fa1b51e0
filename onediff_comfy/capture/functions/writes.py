"""What code sets by name, as far as bytecode tells it: variables, and attributes of what it names; and ``type()``."""

from __future__ import annotations

import dis
import functools
import inspect
import types
from typing import NamedTuple

from ..values.global_reads import Path

_VARIABLES = ("STORE_GLOBAL", "DELETE_GLOBAL")
_ATTRIBUTES = ("STORE_ATTR", "DELETE_ATTR")
_STEPS = ("LOAD_ATTR", "LOAD_METHOD")
_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME")
_CELLS = ("LOAD_DEREF", "LOAD_CLASSDEREF")
_COMPARES = ("COMPARE_OP", "IS_OP")
_BETWEEN = ("EXTENDED_ARG", "PUSH_NULL", "CACHE", "PRECALL")


class Writes(NamedTuple):
    """What code sets, functions in it included.

    Attributes:
        variables: of its module.
        attributes: of anything.
        objects: whose attributes those are, where that is named.
        names: globals that it names; modules among them may have a short name in a local variable.
        imported: modules that it imports, as it names them.
    """

    variables: frozenset[str]
    attributes: frozenset[str]
    objects: frozenset[Path]
    names: frozenset[str]
    imported: frozenset[str]

    def joined(self, other: Writes) -> Writes:
        """Return both together."""
        return Writes(
            self.variables | other.variables,
            self.attributes | other.attributes,
            self.objects | other.objects,
            self.names | other.names,
            self.imported | other.imported,
        )


@functools.lru_cache(maxsize=8192)
def writes(code: types.CodeType) -> Writes:
    """Return what code sets."""
    instructions = [i for i in dis.get_instructions(code) if i.opname not in _BETWEEN]
    attributes = [number for number, i in enumerate(instructions) if i.opname in _ATTRIBUTES]
    found = Writes(
        frozenset(i.argval for i in instructions if i.opname in _VARIABLES),
        frozenset(instructions[number].argval for number in attributes),
        frozenset(path for number in attributes if (path := _named(instructions[:number])) is not None),
        frozenset(i.argval for i in instructions if i.opname in _GLOBALS),
        frozenset(
            name
            for number, i in enumerate(instructions)
            if i.opname == "IMPORT_NAME"
            for name in ("." * (instructions[number - 2].argval or 0) + i.argval, i.argval.partition(".")[0])
            if name
        ),
    )
    for constant in code.co_consts:
        if inspect.iscode(constant):
            found = found.joined(writes(constant))
    return found


@functools.lru_cache(maxsize=8192)
def types_compared(code: types.CodeType) -> tuple[Path | None, ...]:
    """Return with what code compares what ``type()`` gives it, once for each call of that; None of any other use."""
    instructions = [i for i in dis.get_instructions(code) if i.opname not in _BETWEEN]
    found: list[Path | None] = []
    for number, instruction in enumerate(instructions):
        if instruction.opname in _GLOBALS and instruction.argval == "type":
            after = instructions[number + 1 :]
            end = next((n for n, i in enumerate(after) if i.opname in _COMPARES), 0)
            path = _named(after[:end])
            known = path is not None and after[end - len(path.steps) - 2].opname == "CALL"
            found.append(path if known else None)
    for constant in code.co_consts:
        if inspect.iscode(constant):
            found += types_compared(constant)
    return tuple(found)


def _named(before: list[dis.Instruction]) -> Path | None:
    """Return what the last of some instructions have loaded, if it is named: ``a.b`` of ``a.b.c = 1``."""
    steps: list[tuple[str, str]] = []
    for instruction in reversed(before):
        if instruction.opname in _STEPS:
            steps.insert(0, (".", instruction.argval))
        elif instruction.opname in _GLOBALS:
            return Path("global", instruction.argval, tuple(steps))
        elif instruction.opname in _CELLS:
            return Path("cell", instruction.argval, tuple(steps))
        else:
            return None
    return None
