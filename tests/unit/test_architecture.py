"""The core stays what a stranger can read: small classes, short functions and files, and nobody reaches into others."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

CORE = ("capture", "engines", "runtime", "cache", "compilation", "serving", "store", "fleet")
MOST_FIELDS, MOST_METHODS = 10, 15
MOST_LINES_OF_A_FUNCTION, MOST_PARAMETERS, MOST_LINES_OF_A_FILE = 50, 6, 350
MOST_FILES_OF_A_FOLDER = 8

# Tables of torch's operators, in OneFlow's: each function has the parameters of the operator that it stands for.
TABLES = "engines/oneflow/lowering"

# At most three. Each is the better choice, for the reason beside it.
EXCEPTIONS = {
    # Stands for torch.nn.functional.scaled_dot_product_attention while a forward is traced, so it is called like it.
    "engines/inductor/attention_kernels.py:attention has 7 parameters",
    # A kernel for a GPU is launched with addresses and strides, one by one: there is nothing that could hold them.
    "engines/inductor/kernels.py:norm_rope_kernel has 18 parameters",
}


def _sources(root: Path) -> list[tuple[str, Path]]:
    package = root / "onediff_comfy"
    return [(path.relative_to(package).as_posix(), path) for f in CORE for path in sorted((package / f).rglob("*.py"))]


def _trees(root: Path) -> list[tuple[str, ast.Module]]:
    return [(name, ast.parse(path.read_text(encoding="utf-8"))) for name, path in _sources(root)]


def _nodes(tree: ast.AST, *kinds: type[ast.AST]) -> Iterator[ast.AST]:
    return (node for node in ast.walk(tree) if isinstance(node, kinds))


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _is_frozen(kind: ast.ClassDef) -> bool:
    """Return True for values: frozen dataclasses and models, and named tuples."""
    made = [
        *kind.keywords,
        *(word for call in kind.decorator_list if isinstance(call, ast.Call) for word in call.keywords),
    ]
    frozen = any(word.arg == "frozen" and ast.unparse(word.value) == "True" for word in made)
    return frozen or any(ast.unparse(base) == "NamedTuple" for base in kind.bases)


def _methods(kind: ast.ClassDef) -> list[str]:
    return [node.name for node in kind.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def _fields(kind: ast.ClassDef) -> set[str]:
    declared = {
        node.target.id for node in kind.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    stored = {
        node.attr
        for node in ast.walk(kind)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value)
    }
    return declared | stored


def _too_large(name: str, tree: ast.Module) -> Iterator[str]:
    """Say what is larger than it may be, of the classes and functions of a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            if len(_methods(node)) > MOST_METHODS:
                yield f"{name}:{node.name} has {len(_methods(node))} methods"
            if len(_fields(node)) > MOST_FIELDS and not _is_frozen(node):
                yield f"{name}:{node.name} has {len(_fields(node))} fields"
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            parameters = [argument.arg for argument in arguments if argument.arg not in ("self", "cls")]
            if lines > MOST_LINES_OF_A_FUNCTION:
                yield f"{name}:{node.name} has {lines} lines"
            if len(parameters) > MOST_PARAMETERS and not name.startswith(TABLES):
                yield f"{name}:{node.name} has {len(parameters)} parameters"


def test_classes_functions_and_files_are_small(root: Path) -> None:
    found = {line for name, tree in _trees(root) for line in _too_large(name, tree)}
    for name, path in _sources(root):
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > MOST_LINES_OF_A_FILE:
            found.add(f"{name} has {lines} lines")
    assert found - EXCEPTIONS == set()
    assert EXCEPTIONS - found == set(), "no exception any more"
    assert len(EXCEPTIONS) <= 3


def test_what_is_too_large_is_found() -> None:
    """Guards the test above."""
    body = "\n".join(f"    def m{number}(self): self.f{number} = 0" for number in range(16))
    function = "def long(a, b, c, d, e, f, *, g):\n" + "    pass\n" * 50
    found = set(_too_large("file.py", ast.parse(f"class Large:\n{body}\n{function}")))
    expected = {"Large has 16 methods", "Large has 16 fields", "long has 51 lines", "long has 7 parameters"}
    assert found == {f"file.py:{text}" for text in expected}


def test_folders_hold_few_files(root: Path) -> None:
    folders: defaultdict[Path, list[str]] = defaultdict(list)
    for _, path in _sources(root):
        if path.stem != "__init__":
            folders[path.parent].append(path.name)
    assert len(folders) > len(CORE)
    assert {str(folder): names for folder, names in folders.items() if len(names) > MOST_FILES_OF_A_FOLDER} == {}


def test_every_folder_of_the_package_is_distributed(root: Path) -> None:
    """pyproject.toml has to name them. What it leaves out is missing for whoever installs with pip."""
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 brings it")
    listed = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    folders = {path.parent.relative_to(root) for path in (root / "onediff_comfy").rglob("__init__.py")}
    outer = {"onediff_comfy.pack", "onediff_comfy.pack.nodes"}
    assert {".".join(folder.parts) for folder in folders} | outer == set(listed)


def test_no_two_modules_are_called_alike(root: Path) -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted((root / "onediff_comfy").rglob("*.py")):
        if not path.stem.startswith("__"):
            places[path.stem].append(str(path.relative_to(root)))
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def _private(tree: ast.Module) -> set[str]:
    """Return the private names that the classes of a file give their methods and attributes."""
    names = {name for kind in _nodes(tree, ast.ClassDef) for name in (*_methods(kind), *_fields(kind))}  # type: ignore[arg-type]
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def _reached(tree: ast.Module, private: set[str]) -> Iterator[tuple[int, str]]:
    """Find where a file uses private names of other classes than the one that it is in."""
    own: dict[int, set[str]] = {}
    for kind in _nodes(tree, ast.ClassDef):
        names = {*_methods(kind), *_fields(kind)}  # type: ignore[arg-type]
        for node in ast.walk(kind):
            own[id(node)] = own.get(id(node), set()) | names
    for node in _nodes(tree, ast.Attribute):
        assert isinstance(node, ast.Attribute)
        if node.attr in private and not _is_self(node.value) and node.attr not in own.get(id(node), ()):
            yield node.lineno, ast.unparse(node)


def test_nobody_uses_what_is_another_classes_alone(root: Path) -> None:
    trees = _trees(root)
    private = {name for _, tree in trees for name in _private(tree)} - set(vars(torch.nn.Module()))
    assert len(private) > 100
    assert [f"{name}:{line} {what}" for name, tree in trees for line, what in _reached(tree, private)] == []


def test_use_of_what_is_another_classes_alone_is_found() -> None:
    """Guards the test above."""
    source = "class A:\n def _own(self): ...\nclass B:\n def use(self, a):\n  a._own()\n"
    tree = ast.parse(source)
    assert list(_reached(tree, _private(tree))) == [(5, "a._own")]
