"""host/legacy/replacements.py: its table and the page that shows it; a host that takes no replacements."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from onediff_comfy.host.legacy.replacements import NOT_REPLACED, REPLACEMENTS, Replacement, register_replacements

BOOSTERS = ("Booster", "Optimizer")


def _row(replacement: Replacement) -> str:
    carried = ", ".join(f"`{old}`" if old == new else f"`{old}` as `{new}`" for new, old in replacement.inputs.items())
    return f"| `{replacement.old}` | `{replacement.new}` | {carried} | {replacement.changes} |"


def _table() -> str:
    rows = ["| old node | new node | carried over | what changes |", "|---|---|---|---|"]
    rows += [_row(replacement) for replacement in REPLACEMENTS]
    rows += [f"| `{old}` | none: shown as missing | | {remedy} |" for old, remedy in NOT_REPLACED.items()]
    return "\n".join(rows)


def test_the_page_shows_the_table(root: Path) -> None:
    """``UPDATE_DOCS=1`` writes it instead of comparing."""
    page = root / "docs" / "from-onediff.md"
    before, mark, rest = page.read_text().partition("<!-- nodes -->\n")
    assert mark
    _, end, after = rest.partition("<!-- end -->")
    expected = f"{before}{mark}{_table()}\n{end}{after}"
    if os.environ.get("UPDATE_DOCS"):
        page.write_text(expected)
    assert page.read_text() == expected, "run this test with UPDATE_DOCS=1"


def test_each_old_node_is_replaced_once() -> None:
    old = [replacement.old for replacement in REPLACEMENTS]
    assert len(set(old)) == len(old)
    assert not set(old) & set(NOT_REPLACED)


def test_values_are_taken_from_fields_whose_place_is_known() -> None:
    """The editor saved values of fields by position: a name that is not in the list would be lost without a word."""
    fields = {"ckpt_name", "vae_speedup", "control_net_name", "unet_name", "filename_prefix"}
    for replacement in REPLACEMENTS:
        assert set(replacement.inputs.values()) & fields <= set(replacement.widgets), replacement.old


def test_what_has_no_counterpart_says_what_to_do() -> None:
    for replacement in REPLACEMENTS:
        if replacement.new == "OneDiffOldNode":
            assert replacement.noted
            assert any(word in replacement.changes for word in ("Delete", "Use ", "handed on")), replacement.old
    boosters = [replacement for replacement in REPLACEMENTS if replacement.old.endswith(BOOSTERS)]
    assert len(boosters) >= 9
    # Were their wires carried over, the host would ask the node behind for an input that it does not have.
    assert all(not replacement.outputs for replacement in boosters)


class _Host(types.ModuleType):
    """``comfy_api.latest`` of a host whose registration does as it is told."""

    def __init__(self, register: Any) -> None:
        super().__init__("comfy_api.latest")
        replacement = type("NodeReplace", (), {"__init__": lambda self, **fields: vars(self).update(fields)})
        self.io = types.SimpleNamespace(NodeReplace=replacement)
        self.ComfyAPI = lambda: types.SimpleNamespace(node_replacement=types.SimpleNamespace(register=register))


def _on(monkeypatch: pytest.MonkeyPatch, host: types.ModuleType) -> None:
    monkeypatch.setitem(sys.modules, "comfy_api", types.ModuleType("comfy_api"))
    monkeypatch.setitem(sys.modules, "comfy_api.latest", host)


def test_every_replacement_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []

    async def register(replacement: Any) -> None:
        taken.append(replacement.old_node_id)

    _on(monkeypatch, _Host(register))
    asyncio.run(register_replacements())
    assert taken == [replacement.old for replacement in REPLACEMENTS]


@pytest.mark.parametrize("missing", ["ComfyAPI", "io"])
def test_a_host_without_replacements_is_done_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, missing: str
) -> None:
    host = _Host(None)
    delattr(host, missing)
    _on(monkeypatch, host)
    with caplog.at_level(logging.WARNING):
        asyncio.run(register_replacements())
    assert caplog.records == []


def test_a_host_that_takes_other_replacements_is_named_and_the_pack_loads(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def register(_replacement: Any) -> None:
        raise TypeError("no such argument")

    _on(monkeypatch, _Host(register))
    asyncio.run(register_replacements())
    assert ["no such argument" in record.getMessage() for record in caplog.records] == [True]
