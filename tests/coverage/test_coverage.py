"""The coverage matrix: every cell equal to ComfyUI's own result, and docs/coverage.md what was measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from breakages import BREAKAGES
from matrix import ORDERS
from patches import ROWS, Row
from scenes import FAMILIES

from tools import coverage

CELLS = [
    (row, family, engine, order)
    for row in ROWS
    for family in row.families
    for engine in ("eager", "inductor")
    if engine == "eager" or family in row.compiled
    for order in ORDERS
]


@pytest.fixture(scope="session")
def cells(tmp_path_factory: pytest.TempPathFactory) -> list[coverage.Cell]:
    return coverage.measure_all(tmp_path_factory.mktemp("coverage"))


def test_every_family_is_measured() -> None:
    assert set(coverage.FAMILIES) == set(FAMILIES)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("row", "family", "engine", "order"), CELLS, ids=[f"{row.name}, {'-'.join(rest)}" for row, *rest in CELLS]
)
def test_a_cell_is_eagers_picture(row: Row, family: str, engine: str, order: str, cells: list[coverage.Cell]) -> None:
    place = (row.name, family, engine, order)
    (cell,) = (cell for cell in cells if (cell["row"], cell["family"], cell["engine"], cell["order"]) == place)
    assert cell["faults"] == [], cell


@pytest.mark.timeout(3600)
def test_the_document_is_what_was_measured(cells: list[coverage.Cell], tally: Callable[[str], None]) -> None:
    calls = Counter({name: sum(cell[name] for cell in cells) for name in ("calls", "served")})
    wrong = sum(bool(cell["faults"]) for cell in cells)
    tally(
        f"coverage: {len(cells)} cells, {calls['calls']} model calls, {calls['served']} by compiled graphs, "
        f"the others eager with a reason; {wrong} cells wrong"
    )
    text = coverage.document(cells)
    written = coverage.DOCUMENT.read_text(encoding="utf-8")
    assert written == text, "docs/coverage.md is not what was measured: run python -m tools.coverage --write"


def test_most_of_what_people_use_is_accelerated() -> None:
    """Of the cells that there were when patches ran eager; what is left draws random numbers, or keeps state."""
    rows = [line.strip("| \n").split(" | ") for line in coverage.DOCUMENT.read_text(encoding="utf-8").splitlines()]
    table = [cells for cells in rows if len(cells) == len(coverage.FAMILIES) + 1]
    columns = [1 + coverage.FAMILIES.index(name) for name in ("sd15", "sdxl", "flux", "sd15 inpainting")]
    found = {(cells[0], column): cells[column] for cells in table for column in columns if cells[column] != "–"}
    accelerated = {"accelerated", "**accelerated**", "per size", "**per size**"}
    left = {row for (row, _), state in found.items() if state not in accelerated}
    assert len(found) == 90
    assert sum(state in accelerated for state in found.values()) >= 84
    assert left <= {
        "HyperTile",
        "TomePatchModel",
        "SelfAttentionGuidance",
        "torch.compile wrapper (backend eager)",
        "forward of a layer replaced, and put back",
    }


@pytest.mark.parametrize("name", BREAKAGES)
def test_the_matrix_notices_a_broken_key(name: str, tmp_path: Path, tally: Callable[[str], None]) -> None:
    """Calls that differ in patches, dtypes or sizes, taken for one by a deliberate fault."""
    broken = BREAKAGES[name]
    place = ("--rows", broken.row, "--families", broken.family)
    cells = coverage.measure(tmp_path / "report.json", *place, "--break", name)
    faults = [fault for cell in cells for fault in cell["faults"]]
    tally(f"coverage: with {name} left out of the key: {'; '.join(dict.fromkeys(faults)) or 'not noticed'}")
    assert faults
