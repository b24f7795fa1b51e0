"""What onediff-comfy relies on of ComfyUI, looked up in the source of any releases, without importing them.

    python -m tools.hosts COMFY_DIR...

Prints a table in Markdown: a column for each folder, a row for whatever is not the same in all of them, and how much
is there. What is relied on is ``RELIED_ON``, where there is Dynamic VRAM ``BRINGS_WEIGHTS`` and ``PINS_WEIGHTS``, and
where the host has a compiler of its own ``PAUSES_COMPILER``. A running host is looked at by
``onediff_comfy/host/compatibility.py``, which also tries things out. Reading says less: a name that is made at run time
is not found.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from onediff_comfy.host.compatibility import BRINGS_WEIGHTS, PAUSES_COMPILER, PINS_WEIGHTS, RELIED_ON
from onediff_comfy.host.use import Use

THERE, ABSENT = "yes", "no"
EVERYTHING = {
    **RELIED_ON,
    "Dynamic VRAM, block by block": BRINGS_WEIGHTS,
    # What is comfy-aimdo's is a package of its own, and no part of a release's source.
    "Dynamic VRAM, whole": tuple(use for use in PINS_WEIGHTS if not use.module.startswith("comfy_aimdo")),
    "its own compiler": PAUSES_COMPILER,
}
WHERE_IT_IS = frozenset({"its own compiler"})
"""Of these, what a release needs not that has nothing of it."""
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Definition(NamedTuple):
    """Something that a module defines: its node, and the module."""

    node: ast.AST
    module: str


class Source:
    """The source of one release.

    Args:
        folder: in which ``main.py`` is.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def version(self) -> str:
        """Return what the release calls itself; the folder's name if it does not say."""
        version = self.defined("comfyui_version", "__version__")
        value = getattr(version and version.node, "value", None)
        return str(value.value) if isinstance(value, ast.Constant) else self.folder.name

    def problem(self, use: Use) -> str | None:
        """Return what is not as we need it, in a word or two; None if nothing is missing."""
        found = self.defined(use.module, use.path)
        if found is None:
            return ABSENT
        if use.given is not None:
            function = self._called(found)
            if function is not None and not _takes(function, use.given, use.named):
                return f"takes ({', '.join(_parameters(function))})"
        gone = [name for name in use.mentions if name not in _names_in(self._called(found) or found.node)]
        return f"without {', '.join(gone)}" if gone else None

    def has(self, use: Use) -> bool:
        """Return True if there is such a thing, in whatever form."""
        return self.defined(use.module, use.path) is not None

    def defined(self, module: str, path: str) -> Definition | None:
        """Return what a dotted path in a module leads to, through classes, their bases, and imports."""
        first, *rest = path.split(".")
        found = self._in_module(module, first)
        for name in rest:
            found = found and self._in_class(found, name)
        return found

    def _called(self, found: Definition) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
        """Return the function that a call runs: of a class its ``__init__``, without ``self``."""
        if isinstance(found.node, ast.ClassDef):
            constructor = self._in_class(found, "__init__")
            return constructor.node if constructor and isinstance(constructor.node, _FUNCTIONS) else None
        return found.node if isinstance(found.node, _FUNCTIONS) else None

    @functools.cache  # noqa: B019 - one object for each release, as long as the command runs
    def _body(self, module: str) -> Sequence[ast.stmt]:
        base = self.folder.joinpath(*module.split("."))
        for file in (base.with_suffix(".py"), base / "__init__.py"):
            if file.is_file():
                return tuple(_statements(ast.parse(file.read_text(encoding="utf-8")).body))
        return ()

    def _in_module(self, module: str, name: str) -> Definition | None:
        for statement in self._body(module):
            if name in _defined_names(statement):
                return Definition(statement, module)
            if isinstance(statement, ast.ImportFrom) and not statement.level and statement.module:
                for alias in statement.names:
                    if (alias.asname or alias.name) == name:
                        return self._in_module(statement.module, alias.name) or Definition(statement, module)
        return None

    def _in_class(self, found: Definition, name: str) -> Definition | None:
        if not isinstance(found.node, ast.ClassDef):
            return None
        for statement in _statements(found.node.body):
            if name in _defined_names(statement):
                return Definition(statement, found.module)
        for base in found.node.bases:
            of_base = self._in_module(found.module, base.id) if isinstance(base, ast.Name) else None
            inherited = of_base and self._in_class(of_base, name)
            if inherited:
                return inherited
        return None


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements, also of branches, which all count as if they ran."""
    for statement in body:
        yield statement
        if isinstance(statement, (ast.If, ast.Try, ast.With)):
            for branch in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(statement, branch, ()))
            for handler in getattr(statement, "handlers", ()):
                yield from _statements(handler.body)


def _defined_names(statement: ast.stmt) -> set[str]:
    if isinstance(statement, (*_FUNCTIONS, ast.ClassDef)):
        return {statement.name}
    if isinstance(statement, ast.Assign):
        return {target.id for target in statement.targets if isinstance(target, ast.Name)}
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return {statement.target.id}
    return set()


def _names_in(node: ast.AST) -> set[str]:
    """Return the names, attributes and texts in code."""
    found = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            found.add(part.id)
        elif isinstance(part, ast.Attribute):
            found.add(part.attr)
        elif isinstance(part, ast.arg):
            found.add(part.arg)
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            found.add(part.value)
    return found


def _takes(function: ast.FunctionDef | ast.AsyncFunctionDef, given: Sequence[str], named: Sequence[str]) -> bool:
    """Return True if a function can be called with so many positional arguments, and these by name."""
    given = given if given[:1] == ("self",) or not _is_method(function) else ("self", *given)
    try:
        _signature(function).bind(*given, **dict.fromkeys(named))
    except TypeError:
        return False
    return True


def _is_method(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    if any(isinstance(name, ast.Name) and name.id == "staticmethod" for name in function.decorator_list):
        return False
    names = _parameters(function)
    return names[:1] in (["self"], ["cls"])


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    return [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]


def _signature(function: ast.FunctionDef | ast.AsyncFunctionDef) -> inspect.Signature:
    taken, kind = function.args, inspect.Parameter
    optional = len(_parameters(function)) - len(taken.defaults)
    parameters = [
        kind(name, kind.POSITIONAL_OR_KEYWORD, default=kind.empty if index < optional else None)
        for index, name in enumerate(_parameters(function))
    ]
    if taken.vararg:
        parameters.append(kind(taken.vararg.arg, kind.VAR_POSITIONAL))
    for argument, default in zip(taken.kwonlyargs, taken.kw_defaults, strict=True):
        parameters.append(kind(argument.arg, kind.KEYWORD_ONLY, default=kind.empty if default is None else None))
    if taken.kwarg:
        parameters.append(kind(taken.kwarg.arg, kind.VAR_KEYWORD))
    return inspect.Signature(parameters)


def table(sources: Sequence[Source], relied_on: Mapping[str, Sequence[Use]] = EVERYTHING) -> str:
    """Return the table in Markdown: a row for each use that is not there in all ``sources``, and one that counts."""
    columns = [source.version for source in sources]
    lines = [f"| for | what | {' | '.join(columns)} |", f"|---|---|{'---|' * len(columns)}"]
    there = [0] * len(columns)
    for kind, uses in relied_on.items():
        for use in uses:
            problems = [
                None if kind in WHERE_IT_IS and not any(map(source.has, uses)) else source.problem(use)
                for source in sources
            ]
            there = [count + (problem is None) for count, problem in zip(there, problems, strict=True)]
            if any(problems):
                lines.append(f"| {kind} | `{use}` | {' | '.join(problem or THERE for problem in problems)} |")
    total = sum(map(len, relied_on.values()))
    lines.append(f"| all | as it is used | {' | '.join(f'{count} of {total}' for count in there)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Print the table of the folders given. Returns 2 if one is not ComfyUI's."""
    folders = [Path(argument) for argument in arguments]
    wrong = [folder for folder in folders if not (folder / "main.py").is_file()]
    if wrong or not folders:
        for folder in wrong:
            print(f"{folder} has no main.py; name folders of ComfyUI's source", file=sys.stderr)
        print("python -m tools.hosts COMFY_DIR...", file=sys.stderr)
        return 2
    print(table([Source(folder) for folder in folders]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
