"""Which values code reads by name, as far as bytecode tells it: paths that begin at a global, a closure or an import.

``CONFIG.scale``, ``TABLE["scale"]`` and ``module.LISTED[0]`` are paths. So is what a local name stands for that is only
ever imported. A path ends where something else is done with the value: it is called, handed on, kept under a name.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from .bytecode import Instruction, instructions

_STORES = frozenset(("STORE_FAST", "STORE_DEREF", "STORE_NAME", "STORE_GLOBAL"))
_WRITES = frozenset(("STORE_ATTR", "DELETE_ATTR"))
_KEYS = (str, int, float, bytes, tuple, type(None))


class Path(NamedTuple):
    """Where a value comes from.

    Attributes:
        root: what ``name`` names: a global, a variable of an enclosing function, or a module that is imported.
        name: of a module that is imported relatively, with a dot before it for each level.
        steps: attributes (".", name) and constant keys ("[]", key), in order.
    """

    root: Literal["global", "cell", "module"]
    name: str
    steps: tuple[tuple[str, Any], ...] = ()

    def then(self, kind: str, of: Any) -> Path:
        """The path that goes on from this one by a step."""
        return self._replace(steps=(*self.steps, (kind, of)))

    def text(self, steps: int) -> str:
        """It for people, and for fingerprints, as far as so many steps."""
        parts = (f".{of}" if kind == "." else f"[{of!r}]" for kind, of in self.steps[:steps])
        return self.name + "".join(parts)


@functools.lru_cache(maxsize=8192)
def paths(code: types.CodeType) -> tuple[Path, ...]:
    """The paths that code reads, functions in it included, in an order that is the same in every process."""
    return tuple(sorted(_paths(code, {}), key=repr))


@functools.lru_cache(maxsize=8192)
def strings(code: types.CodeType) -> frozenset[str]:
    """The strings among the constants of code, functions in it included."""
    found = {constant for constant in code.co_consts if isinstance(constant, str)}
    return frozenset(found.union(*(strings(constant) for constant in code.co_consts if inspect.iscode(constant))))


@functools.lru_cache(maxsize=8192)
def names(code: types.CodeType) -> frozenset[str]:
    """The names of variables and attributes in code, functions in it included."""
    inner = (names(constant) for constant in code.co_consts if inspect.iscode(constant))
    return frozenset(code.co_names).union(*inner)


def _paths(code: types.CodeType, outside: Mapping[str, Path]) -> set[Path]:
    done = instructions(code)
    imported = {**outside, **_imported(done)}
    found: set[Path] = set()
    path: Path | None = None
    number = 0
    while number < len(done):
        instruction = done[number]
        number += 1
        if path is not None and instruction.name == "LOAD_ATTR":
            path = path.then(".", instruction.of)
            continue
        if path is not None and number < len(done) and _is_key(instruction, done[number]):
            path, number = path.then("[]", instruction.of), number + 1
            continue
        if path is not None and instruction.name not in _WRITES and not _counts_up(done[number - 1 :][:3]):
            found.add(path)
        path = _root(instruction, imported)
    for constant in code.co_consts:
        if inspect.iscode(constant):
            found |= _paths(constant, imported)
    return found


def _is_key(constant: Instruction, after: Instruction) -> bool:
    """Whether what is loaded is the key of a subscript."""
    return after.name == "SUBSCRIPT" and constant.name == "LOAD_CONST" and isinstance(constant.of, _KEYS)


def _counts_up(after: Sequence[Instruction]) -> bool:
    """Return True for ``RUNS["name"] += 1`` and ``RUNS.name += 1``: what is read goes back to where it was."""
    names = [instruction.name for instruction in after]
    return names[:2] == ["COPY", "LOAD_ATTR"] or names == ["LOAD_CONST", "COPY", "COPY"]


def _root(instruction: Instruction, imported: Mapping[str, Path]) -> Path | None:
    """What an instruction loads, if that is where a path begins."""
    if instruction.name == "LOAD_GLOBAL":
        return Path("global", instruction.of)
    if instruction.name == "LOAD_DEREF":
        return imported.get(instruction.of) or Path("cell", instruction.of)
    return imported.get(instruction.of) if instruction.name == "LOAD_FAST" else None


def _imported(done: Sequence[Instruction]) -> dict[str, Path]:
    """What local names stand for that are assigned by imports."""
    found: dict[str, Path] = {}
    module: Path | None = None
    value: Path | None = None
    for number, instruction in enumerate(done):
        if instruction.name == "IMPORT_NAME":
            level, names = (before.of for before in done[number - 2 : number])
            whole = instruction.of if names else instruction.of.partition(".")[0]
            module = value = Path("module", "." * level + whole)
        elif instruction.name == "IMPORT_FROM" and module is not None:
            value = module.then(".", instruction.of)
        elif instruction.name in _STORES and value is not None:
            found[instruction.of] = value
            value = None
        elif instruction.name not in ("SWAP", "POP_TOP"):
            value = None
    return found


def module_named(name: str, package: str) -> types.ModuleType | None:
    """A module that is loaded, by a name that may begin with a dot for each level above ``package``."""
    module = sys.modules.get(absolute_name(name, package))
    return module if isinstance(module, types.ModuleType) else None


def absolute_name(name: str, package: str) -> str:
    """Return a module's name without dots before it that stand for levels above ``package``."""
    bare = name.lstrip(".")
    level = len(name) - len(bare)
    if not level:
        return name
    parents = package.split(".")[: len(package.split(".")) - level + 1]
    return ".".join((*parents, bare)) if bare else ".".join(parents)


def cells(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What the closure of a function holds, by name, as far as it is assigned."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
