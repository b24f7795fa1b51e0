"""tests/host/spreading.py: what shares the server runs in one process, and begins first."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from spreading import ByWhatIsShared, asks_for_the_server, turn

SHARED = ("host/test_any_size.py", "host/test_panel.py", "host/test_shape_bucket.py", "browser/test_editor.py")
ALONE = ("host/test_background.py", "host/test_faults.py", "package/test_installed.py", "unit/test_general.py")


@pytest.mark.parametrize(("file", "shared"), [*((f, True) for f in SHARED), *((f, False) for f in ALONE)])
def test_a_file_is_known_by_the_fixtures_that_it_takes(root: Path, file: str, shared: bool) -> None:
    assert asks_for_the_server(root / "tests" / file) is shared


def test_each_folder_shares_a_server_of_its_own(root: Path) -> None:
    spread: Any = SimpleNamespace(config=SimpleNamespace(rootpath=root))
    names = [
        "tests/host/test_any_size.py",
        "tests/host/test_shape_bucket.py",
        "tests/browser/test_editor.py",
        "tests/unit/test_general.py",
    ]
    first, second, editor, alone = (ByWhatIsShared._split_scope(spread, f"{name}::test_it[1]") for name in names)
    assert first == second
    assert len({first, editor, alone}) == 3


def test_what_takes_long_begins_first(root: Path) -> None:
    turns = [turn(root / "tests" / file) for file in (SHARED[0], *ALONE)]
    assert turns == sorted(turns) and len(set(turns)) == 4
