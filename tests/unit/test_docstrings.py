"""Docstrings of functions say what to do or what is returned: they begin with a verb in the imperative."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

# What descriptions of a result begin with, instead of "Return ...".
_NO_VERB = re.compile(
    r"(?:An?|The|Th(?:is|at|ese|ose)|Its?|What|Whether|Why|How|Where|Which|Who|When|As|All|Each|Every|Everything|No|Nothing"
    r"|None|One|Only|Some|To|In|Of|For|By|With|Without|Before|After|Around|True|False)\b|[^A-Z]"
)


def _functions(root: Path) -> Iterator[tuple[str, str]]:
    package = root / "onediff_comfy"
    paths = [*package.glob("*.py"), *(root / "nodes").glob("*.py")]
    for folder in ("host", "store", "fleet"):
        paths += (package / folder).rglob("*.py")
    for path in sorted(paths):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    yield f"{path.relative_to(root)}:{node.lineno} {node.name}", text


def test_docstrings_begin_with_a_verb(root: Path) -> None:
    weights = str(Path("onediff_comfy", "host", "weights"))  # not rewritten yet
    described = [name for name, text in _functions(root) if not name.startswith(weights) and _NO_VERB.match(text)]
    assert described == []
