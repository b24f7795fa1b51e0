"""tests/host/spreading.py: what shares the server runs in one process, and begins first."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from servers import MOST_SERVERS
from spreading import ByWhatIsShared, asks_for_the_server, turn

SHARED = ("host/test_any_size.py", "host/test_panel.py", "host/test_shape_bucket.py", "browser/test_editor.py")
ALONE = ("host/test_background.py", "host/test_faults.py", "package/test_installed.py", "unit/test_general.py")


@pytest.mark.parametrize(("file", "shared"), [*((f, True) for f in SHARED), *((f, False) for f in ALONE)])
def test_a_file_is_known_by_the_fixtures_that_it_takes(root: Path, file: str, shared: bool) -> None:
    assert asks_for_the_server(root / "tests" / file) is shared


def scope(root: Path, file: str) -> str:
    spread: Any = SimpleNamespace(config=SimpleNamespace(rootpath=root))
    return ByWhatIsShared._split_scope(spread, f"tests/{file}::test_it[1]")


def test_each_row_of_tests_shares_a_server_of_its_own(root: Path) -> None:
    files = ("host/test_any_size.py", "host/test_shape_bucket.py", "browser/test_editor.py", "unit/test_general.py")
    assert len({scope(root, file) for file in files}) == 4
    assert scope(root, "host/test_any_size.py") == scope(root, "host/test_panel.py")
    assert scope(root, "host/test_shape_bucket.py") == scope(root, "host/test_vae_speedup.py")


def test_as_many_rows_share_a_server_as_there_may_be_servers(root: Path) -> None:
    """A file that is renamed would go back to the other row, and nobody would notice."""
    shared = [file for file in (root / "tests/host").glob("test_*.py") if asks_for_the_server(file)]
    rows = [scope(root, f"host/{file.name}") for file in shared]
    assert sorted(map(rows.count, set(rows)))[0] == 5
    assert len(set(rows)) == MOST_SERVERS


def test_what_takes_long_begins_first(root: Path) -> None:
    turns = [turn(root / "tests" / file) for file in (SHARED[0], *ALONE)]
    assert turns == sorted(turns) and len(set(turns)) == 4
