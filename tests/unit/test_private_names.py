"""No test reaches into the private parts of what serves calls: a refactoring that keeps behaviour breaks no test."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

import torch

# Of the packages that answer calls, make graphs, keep them and replay them.
_SERVING = ("graphs", "serving", "compilation", "cache", "runtime")


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _defined(root: Path) -> set[str]:
    """The private names that the serving layer gives its functions, classes, constants and attributes."""
    names = set()
    for folder in _SERVING:
        for path in sorted((root / "onediff_comfy" / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    names.add(node.name)
                elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                    names.add(node.id if isinstance(node, ast.Name) else node.attr)
    return set(filter(_private, names)) - set(vars(torch.nn.Module()))


def _touched(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The names of other objects' parts that a file reads, imports or replaces, with their lines."""
    elsewhere = {name for name, package in _imported(tree) if package not in _SERVING}
    own = {node.attr for node in ast.walk(tree) if _is_self_dot(node) and isinstance(node.ctx, ast.Store)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not _is_self_dot(node) and node.attr not in own:
            if _name_of(node.value) not in elsewhere:
                yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and _package(node) in _SERVING:
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and _called(node).endswith("attr") and _name_of(node.args[0]) not in elsewhere:
            yield from ((node.lineno, arg.value) for arg in node.args if _is_text(arg))  # getattr, setattr, ...


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """What a file imports from the product, and from which of its packages."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("onediff_comfy"):
            yield from ((alias.asname or alias.name, _package(node)) for alias in node.names)


def _package(node: ast.ImportFrom) -> str:
    top, _, rest = (node.module or "").partition(".")
    return rest.partition(".")[0] if top == "onediff_comfy" else ""


def _is_self_dot(node: ast.AST) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and _name_of(node.value) in ("self", "cls")


def _called(node: ast.Call) -> str:
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def _name_of(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def test_no_test_touches_a_private_name_of_the_serving_layer(root: Path) -> None:
    defined = _defined(root)
    assert len(defined) > 50, "the layer is elsewhere now; name its folders here"
    wrong = [
        f"{path.relative_to(root)}:{line} {name}"
        for path in sorted((root / "tests").rglob("*.py"))
        if path.parent.name != "oneflow"  # of an engine alone
        for line, name in _touched(ast.parse(path.read_text(encoding="utf-8")))
        if name in defined
    ]
    assert wrong == []
