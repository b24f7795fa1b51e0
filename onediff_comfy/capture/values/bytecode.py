"""What code does, instruction by instruction, in the same words whatever release of Python has compiled it.

Releases have other names for the same, and 3.13 does two things in one instruction: ``STORE_FAST_LOAD_FAST`` keeps one
variable and loads another. All that looks at bytecode looks here, so that nothing that code reads goes unseen because a
newer Python says it otherwise. Nothing but Python is imported: tests run this file by each release that they find.
"""

from __future__ import annotations

import dis
import functools
import inspect
import re
import types
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

_LEFT_OUT = frozenset(
    ("CACHE", "EXTENDED_ARG", "NOP", "NOT_TAKEN", "PRECALL", "PUSH_NULL", "RESUME", "TO_BOOL", "KW_NAMES")
)
"""What is for the interpreter alone."""
_SAID_OTHERWISE = {
    "BINARY_SUBSCR": "SUBSCRIPT",
    "CALL_FUNCTION": "CALL",
    "CALL_METHOD": "CALL",
    "DUP_TOP": "COPY",
    "LOAD_CLASSDEREF": "LOAD_DEREF",
    "LOAD_CLOSURE": "LOAD_FAST",
    "LOAD_FROM_DICT_OR_DEREF": "LOAD_DEREF",
    "LOAD_FROM_DICT_OR_GLOBALS": "LOAD_GLOBAL",
    "LOAD_METHOD": "LOAD_ATTR",
    "LOAD_NAME": "LOAD_GLOBAL",
    "LOAD_SMALL_INT": "LOAD_CONST",
    "RETURN_CONST": "LOAD_CONST",
    "ROT_TWO": "SWAP",
}
_SETS_NAMED = frozenset(("STORE_ATTR", "STORE_GLOBAL", "STORE_NAME"))
_OF_LOCALS = re.compile(r"(LOAD|STORE)_FAST(?:_BORROW|_CHECK|_AND_CLEAR|_MAYBE_NULL)?(?:_(?=LOAD|STORE)|$)")


class Instruction(NamedTuple):
    """One thing that code does.

    Attributes:
        name: as in ``dis``, of locals ``LOAD_FAST`` and ``STORE_FAST``, of subscripts ``SUBSCRIPT``.
        of: what it is done with: a name, a constant.
        is_named: ``of`` is one of ``co_names``: a global, an attribute or a module.
    """

    name: str
    of: Any = None
    is_named: bool = False


@functools.lru_cache(maxsize=8192)
def instructions(code: types.CodeType) -> tuple[Instruction, ...]:
    """Return what code itself does, functions in it left out."""
    return tuple(each for read in dis.get_instructions(code) for each in _said(read))


@functools.lru_cache(maxsize=16384)
def names_read(code: types.CodeType) -> frozenset[str]:
    """Return the globals, attributes and modules that code itself names, but for those that it only sets.

    Most code sets none. To take that apart takes a hundred times as long as to see so.
    """
    if may_do(code, _SETS_NAMED):
        return frozenset(i.of for i in instructions(code) if i.is_named and not i.name.startswith("STORE_"))
    return frozenset(code.co_names)


def may_do(code: types.CodeType, names: Collection[str]) -> bool:
    """Return False if code itself has no instruction of these names, the same in all releases, as ``STORE_ATTR`` is."""
    return not _names_of_instructions(code).isdisjoint(names)


@functools.lru_cache(maxsize=16384)
def _names_of_instructions(code: types.CodeType) -> frozenset[str]:
    return frozenset(map(dis.opname.__getitem__, set(code.co_code[::2])))  # each second byte says what with


def locals_read(code: types.CodeType) -> frozenset[str]:
    """Return the local variables that code, or a function in it, may read; parameters are among them."""
    done = instructions(code)
    return frozenset(code.co_cellvars).union(i.of for i in done if i.name in ("LOAD_FAST", "DELETE_FAST"))


def with_nested(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield code, and that of functions, classes and comprehensions in it."""
    yield code
    for constant in code.co_consts:
        if inspect.iscode(constant):
            yield from with_nested(constant)


def _said(read: dis.Instruction) -> Iterator[Instruction]:
    name = read.opname
    if name in _LEFT_OUT:
        return
    if name == "DUP_TOP_TWO":
        yield from (Instruction("COPY"), Instruction("COPY"))
    elif name == "BINARY_OP" and read.argrepr == "[]":
        yield Instruction("SUBSCRIPT")
    elif kinds := _OF_LOCALS.findall(name) if "_FAST" in name else []:
        of = read.argval if isinstance(read.argval, tuple) else (read.argval,)
        for kind, variable in zip(kinds, of, strict=True):
            yield Instruction(f"{kind}_FAST", variable)
    else:
        yield Instruction(_SAID_OTHERWISE.get(name, name), read.argval, read.opcode in dis.hasname)
        if name == "RETURN_CONST":
            yield Instruction("RETURN_VALUE")
