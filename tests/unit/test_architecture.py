"""The serving layer stays what a stranger can read: small classes, short functions, and no reaching into others."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

MOST_METHODS, MOST_FIELDS = 15, 11
MOST_LINES_OF_A_FUNCTION, MOST_PARAMETERS, MOST_LINES_OF_A_FILE = 50, 6, 350


def _files(root: Path) -> list[Path]:
    return sorted((root / "onediff_comfy" / "serving").rglob("*.py"))


def _classes(root: Path) -> Iterator[tuple[str, ast.ClassDef]]:
    for path in _files(root):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                yield f"{path.name}:{node.name}", node


def _functions(node: ast.AST) -> Iterator[ast.FunctionDef]:
    return (each for each in ast.walk(node) if isinstance(each, ast.FunctionDef))


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _fields(kind: ast.ClassDef) -> set[str]:
    stores = (node for node in ast.walk(kind) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    return {node.attr for node in stores if _is_self(node.value)}


def test_classes_have_few_fields_and_methods(root: Path) -> None:
    large = {
        name: (len(_fields(kind)), methods)
        for name, kind in _classes(root)
        if (methods := sum(isinstance(node, ast.FunctionDef) for node in kind.body)) > MOST_METHODS
        or len(_fields(kind)) > MOST_FIELDS
    }
    # The façade has the whole interface of an accelerated object: what the host, the report and Warm Up ask of it. The
    # resolver owns the routes, and all that finds or forgets one is there.
    assert large.keys() <= {"dispatcher.py:Dispatcher", "resolver.py:Resolver"}, large


def test_functions_and_files_are_short(root: Path) -> None:
    found = []
    for path in _files(root):
        text = path.read_text(encoding="utf-8")
        if len(text.splitlines()) > MOST_LINES_OF_A_FILE:
            found.append(path.name)
        for function in _functions(ast.parse(text)):
            assert function.end_lineno is not None
            parameters = [arg.arg for arg in (*function.args.args, *function.args.kwonlyargs) if arg.arg != "self"]
            if function.end_lineno - function.lineno >= MOST_LINES_OF_A_FUNCTION or len(parameters) > MOST_PARAMETERS:
                found.append(f"{path.name}:{function.name}")
    assert found == []


@pytest.mark.parametrize("allowed", [("view",)])  # a dispatcher's view of itself
def test_nobody_calls_what_is_anothers_alone(root: Path, allowed: tuple[str, ...]) -> None:
    reached = [
        f"{path.name}:{node.lineno} {ast.unparse(node)}"
        for path in _files(root)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
        if not _is_self(node.value) and not (isinstance(node.value, ast.Name) and node.value.id in allowed)
    ]
    assert reached == []
