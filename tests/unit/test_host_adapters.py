"""What depends on the kind of the host's object is asked of its adapter, in one place."""

from __future__ import annotations

import ast
from pathlib import Path

from onediff_comfy.host.compatibility import KINDS

HOST = Path("onediff_comfy", "host")


def test_nothing_in_the_host_layer_branches_on_a_kind(root: Path) -> None:
    branches = [
        f"{path.name}:{node.lineno} {ast.unparse(node)}"
        for path in sorted((root / HOST).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Compare)
        for side in (node.left, *node.comparators)
        if isinstance(side, ast.Constant) and side.value in KINDS
    ]
    assert branches == []


def test_every_kind_has_an_adapter_of_its_own(root: Path) -> None:
    folder = root / HOST / "adapters"
    table = next(
        node.value
        for node in ast.parse((folder / "adapter.py").read_text(encoding="utf-8")).body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "_MODULES"
    )
    assert table is not None
    modules = ast.literal_eval(table)
    assert list(modules) == list(KINDS)
    for name in modules.values():
        parsed = ast.parse((folder / f"{name.removeprefix('.')}.py").read_text(encoding="utf-8"))
        assert "ADAPTER" in [ast.unparse(node.targets[0]) for node in parsed.body if isinstance(node, ast.Assign)], name
