"""docs/oneflow.md says what is in the table. ``UPDATE_DOCS=1`` writes it instead of comparing."""

from __future__ import annotations

import json
import os

import pytest

pytest.importorskip("oneflow", reason="OneFlow is not in this Python; make test-oneflow runs these in one that has it")

from families import RESULTS

from dev.environment import repository
from onediff_comfy.engines.oneflow.lowering import FAMILIES

PAGE = repository() / "docs" / "oneflow.md"


def operators_table() -> str:
    rows = ["| family | operators |", "| --- | --- |"]
    for family, table in FAMILIES.items():
        names = sorted(str(operator).removeprefix("aten.").removesuffix(".default") for operator in table)
        rows.append(f"| {family} ({len(names)}) | {', '.join(f'`{name}`' for name in names)} |")
    return "\n".join(rows).replace("`<built-in function getitem>`", "results of several")


def with_section(page: str, name: str, content: str) -> str:
    """The page with what stands between ``<!-- name -->`` and the next ``<!-- end -->`` replaced."""
    before, mark, rest = page.partition(f"<!-- {name} -->\n")
    assert mark, f"the page has no section {name}"
    _, end, after = rest.partition("<!-- end -->")
    return f"{before}{mark}{content}\n{end}{after}"


def families_table() -> str:
    rows = ["| family | OneFlow | the image | otherwise |", "| --- | --- | --- | --- |"]
    for name, found in json.loads(RESULTS.read_text()).items():
        served = "served" if not found["fallbacks"] else "eager"
        same = "the same" if found["same"] else "differs"
        rows.append(f"| {name} | {served} | {same} | {'; '.join(found['fallbacks'])} |")
    return "\n".join(rows)


def test_the_page_says_what_is_in_the_table_and_what_was_sampled() -> None:
    page = PAGE.read_text()
    expected = with_section(page, "operators", operators_table())
    expected = with_section(expected, "families", families_table())
    if os.environ.get("UPDATE_DOCS"):
        PAGE.write_text(expected)
    else:
        assert page == expected, "run this test with UPDATE_DOCS=1"
