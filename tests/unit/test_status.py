"""host/report/status.py: texts reach the node that the editor knows."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

import pytest

from onediff_comfy.messages import message


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


def test_the_editor_is_sent_each_text_as_data_too(
    said: tuple[Any, list[tuple[str, str]]], events: list[tuple[str, Any, str]]
) -> None:
    status, _ = said
    status.status_of("10.model")("done")
    assert events == [("onediff.status", {"node": "10", "text": "DONE", "progress": None}, "who asked")]


@pytest.mark.parametrize(
    ("text", "progress"),
    [
        (
            message("compiling, {seconds:.0f} s of about {expected:.0f} s", seconds=12.34, expected=90),
            {"phase": "compiling", "seconds": 12.3, "expected": 90.0},
        ),
        (message("compiling, {seconds:.0f} s", seconds=3), {"phase": "compiling", "seconds": 3.0, "expected": None}),
        (
            message("compiling in the background, {seconds:.0f} s", seconds=5),
            {"phase": "background", "seconds": 5.0, "expected": None},
        ),
        (message("capturing"), {"phase": "capturing", "seconds": None, "expected": None}),
        (message("compiling failed ({kind}: {first_line})", kind="E", first_line="no"), None),
        (message("compiled graph"), None),
        ("compiling, 3 s", None),  # no message: of somebody else
    ],
)
def test_work_that_somebody_waits_for_is_told_as_data(
    said: tuple[Any, list[tuple[str, str]]], text: str, progress: object
) -> None:
    assert said[0].progress_of(text) == progress


@pytest.fixture
def events() -> list[tuple[str, Any, str]]:
    """The messages that the server sends to the editor: name, data, to whom."""
    return []


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, events: list[tuple[str, Any, str]]) -> tuple[Any, list[tuple[str, str]]]:
    """The module in a process with a server, and what that is told: text and node. The language is capital letters."""
    shown: list[tuple[str, str]] = []
    server = types.ModuleType("server")
    instance = types.SimpleNamespace(
        send_progress_text=lambda text, node: shown.append((text, node)),
        send_sync=lambda *event: events.append(event),
        client_id="who asked",
    )
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
