"""The documents: lines that fit a screen, files that exist, and a design that is read in one sitting."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools import bench_tables, patched_models, small_cards
from tools.marked_tables import ResultsTable

MOST_COLUMNS, MOST_WORDS = 120, 2_500
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
_FILE = re.compile(r"`([\w./]+(?:\.py|/))`")


def _documents(root: Path) -> list[Path]:
    folders = (root / "docs", root / "benchmarks", root / "web" / "docs")
    return [*root.glob("*.md"), *(path for folder in folders for path in sorted(folder.rglob("*.md")))]


def test_no_line_is_wider_than_the_code(root: Path) -> None:
    wide = [
        f"{path.relative_to(root)}:{number}"
        for path in _documents(root)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > MOST_COLUMNS and not line.startswith("|")  # a row of a table is one line
    ]
    assert wide == []


def test_links_lead_to_files(root: Path) -> None:
    dead = [
        f"{path.relative_to(root)}: {link}"
        for path in (*root.glob("*.md"), *(root / "docs").glob("*.md"), root / "benchmarks" / "NOTES.md")
        for link in _LINK.findall(path.read_text(encoding="utf-8"))
        if "://" not in link and not (path.parent / link).exists()
    ]
    assert dead == []


@pytest.mark.parametrize("page", ["design", "engines", "identity", "weights", "trust", "oneflow", "testing", "fleet"])
def test_files_that_a_page_names_exist(root: Path, page: str) -> None:
    places = (root, root / "onediff_comfy", root / "tests")
    known = {path.name for path in (root / "onediff_comfy").rglob("*.py")}
    named = _FILE.findall((root / "docs" / f"{page}.md").read_text(encoding="utf-8"))
    assert [name for name in named if name not in known and not any((place / name).exists() for place in places)] == []


def test_the_design_is_read_in_one_sitting(root: Path) -> None:
    text = (root / "docs" / "design.md").read_text(encoding="utf-8")
    assert len(text.split()) <= MOST_WORDS
    layers = [path.name for path in (root / "onediff_comfy").iterdir() if (path / "__init__.py").exists()]
    assert [layer for layer in layers if f"{layer}/" not in text] == []


@pytest.mark.parametrize(
    "table", [*small_cards.TABLES, *bench_tables.TABLES, patched_models.TABLE], ids=lambda table: table.name
)
def test_a_table_of_results_is_what_one_file_says(table: ResultsTable) -> None:
    """Run the command in the table's mark after a change."""
    text = table.path.read_text(encoding="utf-8")
    assert table.written() == text
    assert f"<!-- {table.name}: {table.command} -->" in text
