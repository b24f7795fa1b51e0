"""What code sets by name, as far as bytecode tells it: variables, and attributes of what it names; and ``type()``."""

from __future__ import annotations

import functools
import types
from collections.abc import Sequence
from typing import NamedTuple

from ..values.bytecode import Instruction, instructions, with_nested
from ..values.global_reads import Path

_VARIABLES = ("STORE_GLOBAL", "DELETE_GLOBAL")
_ATTRIBUTES = ("STORE_ATTR", "DELETE_ATTR")
_COMPARES = ("COMPARE_OP", "IS_OP")


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


@functools.lru_cache(maxsize=8192)
def writes(code: types.CodeType) -> Writes:
    """Return what code sets."""
    every = list(map(_own_writes, with_nested(code)))
    return Writes(*(frozenset().union(*found) for found in zip(*every, strict=True)))


def _own_writes(code: types.CodeType) -> Writes:
    done = instructions(code)
    attributes = [number for number, i in enumerate(done) if i.name in _ATTRIBUTES]
    return Writes(
        frozenset(i.of for i in done if i.name in _VARIABLES),
        frozenset(done[number].of for number in attributes),
        frozenset(path for number in attributes if (path := _named(done[:number])) is not None),
        frozenset(i.of for i in done if i.name == "LOAD_GLOBAL"),
        frozenset(
            name
            for number, i in enumerate(done)
            if i.name == "IMPORT_NAME"
            for name in ("." * (done[number - 2].of or 0) + i.of, i.of.partition(".")[0])
            if name
        ),
    )


@functools.lru_cache(maxsize=8192)
def types_compared(code: types.CodeType) -> tuple[Path | None, ...]:
    """Return with what code compares what ``type()`` gives it, once for each call of that; None of any other use."""
    found: list[Path | None] = []
    for done in map(instructions, with_nested(code)):
        for number, instruction in enumerate(done):
            if instruction.name == "LOAD_GLOBAL" and instruction.of == "type":
                after = done[number + 1 :]
                end = next((n for n, i in enumerate(after) if i.name in _COMPARES), 0)
                path = _named(after[:end])
                known = path is not None and after[end - len(path.steps) - 2].name == "CALL"
                found.append(path if known else None)
    return tuple(found)


def _named(before: Sequence[Instruction]) -> Path | None:
    """Return what the last of some instructions have loaded, if it is named: ``a.b`` of ``a.b.c = 1``."""
    steps: list[tuple[str, str]] = []
    for instruction in reversed(before):
        if instruction.name == "LOAD_ATTR":
            steps.insert(0, (".", instruction.of))
        elif instruction.name == "LOAD_GLOBAL":
            return Path("global", instruction.of, tuple(steps))
        elif instruction.name == "LOAD_DEREF":
            return Path("cell", instruction.of, tuple(steps))
        else:
            return None
    return None
