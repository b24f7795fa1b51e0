"""host/report/status.py: texts reach the node that the editor knows."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

import pytest


@pytest.mark.parametrize(
    ("node_id", "shown_on"),
    [
        ("10", "10"),
        ("5:10", "5:10"),  # in a subgraph
        ("10.model", "10"),  # what a node expands to: the editor has no such node
        ("5:10.0.0.2", "5:10"),  # likewise, by the host's own GraphBuilder
    ],
)
def test_a_text_is_shown_on_the_node_that_the_person_sees(
    said: tuple[Any, list[tuple[str, str]]], node_id: str, shown_on: str
) -> None:
    status, shown = said
    status.status_of(node_id)("compiling")
    assert shown == [("COMPILING", shown_on)]


def test_the_parts_of_a_node_are_shown_together(said: tuple[Any, list[tuple[str, str]]]) -> None:
    status, shown = said
    for part, text in (("MODEL", "loading"), ("VAE", "compiling"), ("MODEL", "done")):
        status.status_of(f"7.{part}")(text)
    assert [text for text, _ in shown] == ["LOADING", "MODEL: LOADING\nVAE: COMPILING", "MODEL: DONE\nVAE: COMPILING"]
    status.status_of("7.0.0.2")("of a part that the host numbered")
    assert shown[-1] == ("OF A PART THAT THE HOST NUMBERED", "7")
    status.forget_parts("7")
    status.status_of("7.VAE")("done")
    assert shown[-1] == ("DONE", "7")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[tuple[str, str]]]:
    """The module in a process with a server, and what that is told: text and node. The language is capital letters."""
    shown: list[tuple[str, str]] = []
    server = types.ModuleType("server")
    instance = types.SimpleNamespace(send_progress_text=lambda text, node: shown.append((text, node)))
    server.PromptServer = types.SimpleNamespace(instance=instance)  # type: ignore[attr-defined]
    language = types.ModuleType("onediff_comfy.host.language")
    language.in_their_language = str.upper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "server", server)
    monkeypatch.setitem(sys.modules, "onediff_comfy.host.language", language)
    monkeypatch.delitem(sys.modules, "onediff_comfy.host.report.status", raising=False)
    status = importlib.import_module("onediff_comfy.host.report.status")
    monkeypatch.delitem(
        sys.modules, "onediff_comfy.host.report.status"
    )  # others are to have one with the real language
    return status, shown
