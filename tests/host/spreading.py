"""Which tests one process runs, where pytest-xdist spreads them: those that share what takes long to make."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

_SHARED = {"server", "emptied", "elsewhere", "open_editor", "fleet"}
_ORDER = ("host", "package", "fleet", "faults", "unit")
"""Of what needs no shared server, by how long a file takes."""


class ByWhatIsShared(LoadScopeScheduling):  # type: ignore[misc]
    """Has one process run a file's tests, and one all files of a folder that ask for the shared server.

    The editor's tests, in a folder of their own, have a server of their own: they compile little, and without them the
    process of the other server's tests ended six minutes after all others.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = Path(nodeid.split("::", 1)[0])
        return f"server of {file.parent}" if asks_for_the_server(self.config.rootpath / file) else str(file)


def turn(path: Path) -> int:
    """Return when a file's tests begin: what takes longest begins first, and whoever is done takes what is left."""
    folder = path.parent.name
    return 0 if asks_for_the_server(path) else 1 + (_ORDER.index(folder) if folder in _ORDER else len(_ORDER))


@functools.cache
def asks_for_the_server(path: Path) -> bool:
    """Return True if a test or fixture of the file takes one of the fixtures that start the shared server."""
    functions = (node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.FunctionDef))
    return any(
        _SHARED & {argument.arg for argument in function.args.args}
        for function in functions
        if function.name.startswith("test_") or any("fixture" in ast.unparse(mark) for mark in function.decorator_list)
    )
