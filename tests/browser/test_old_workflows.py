"""Workflows of the earlier OneDiff in the editor: opened, replaced at the press of a button, saved, opened again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dev.browser import LAUNCH_ARGUMENTS, NO_BROWSER, find_browser
from dev.checkpoints import ensure_checkpoints
from dev.environment import comfyui_path, repository
from dev.host import ComfyServer

pytest.importorskip("playwright", reason="playwright is not installed; make setup installs it")

from controls import install_controls
from migration import NAMES, api_form, editor_form, migrated
from playwright.sync_api import Page, sync_playwright

TINY_NODES = repository() / "tests" / "host" / "tiny_nodes"
_READY_MS, _SETTLED_MS = 90_000, 800


@pytest.fixture(scope="module")
def old_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyServer]:
    """A server with the tiny checkpoint and ControlNet that the workflows name."""
    base = tmp_path_factory.mktemp("old")
    checkpoints = repository() / ".cache" / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    ensure_checkpoints(comfyui_path(), checkpoints, ["sd15_min"])
    server = ComfyServer(comfyui_path(), base, cpu=True, packs=[("tiny_nodes", TINY_NODES)])
    server.checkpoints.parent.mkdir(parents=True)
    server.checkpoints.symlink_to(checkpoints, target_is_directory=True)
    install_controls(server)
    with server:
        yield server


@pytest.fixture(scope="module")
def page(old_server: ComfyServer) -> Iterator[Page]:
    """The editor of that server, as a new person's browser shows it. A script error fails the test that comes last."""
    program = find_browser()
    if program is None:
        pytest.skip(NO_BROWSER)
    errors: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(LAUNCH_ARGUMENTS))
        opened = browser.new_context(viewport={"width": 1600, "height": 1000}, locale="en").new_page()
        opened.on("pageerror", lambda error: errors.append(str(error)))
        opened.goto(old_server.url)
        opened.wait_for_function("window.app && window.app.graph && window.app.vueAppReady", timeout=_READY_MS)
        opened.wait_for_timeout(_SETTLED_MS)
        for _ in range(3):  # templates, news
            if opened.get_by_role("dialog").count():
                opened.keyboard.press("Escape")
                opened.wait_for_timeout(300)
        yield opened
        browser.close()
    assert errors == []


def _open(page: Page, file: Path) -> None:
    with page.expect_file_chooser() as chooser:
        page.keyboard.press("Control+o")
    chooser.value.set_files(file)
    name = json.dumps(file.stem)
    page.wait_for_function(f"() => document.title.includes({name}) && window.app.graph.nodes.length > 0")
    page.wait_for_timeout(_SETTLED_MS)


def _opened(page: Page, name: str, folder: Path) -> None:
    file = folder / f"{name}.json"
    file.write_text(editor_form(name))
    _open(page, file)


def _replace_all(page: Page) -> None:
    """What docs/from-onediff.md tells the person to press."""
    details = page.get_by_role("button", name="View details")
    if details.count():  # not where the list of errors is open already
        details.click()
    page.get_by_role("button", name="Replace All").click()
    page.wait_for_timeout(_SETTLED_MS)


def _sent(page: Page) -> dict[str, Any]:
    """What the editor would hand in to the host: class and inputs of each node."""
    prompt = page.evaluate("async () => (await window.app.graphToPrompt()).output")
    return {name: {"class_type": node["class_type"], "inputs": node["inputs"]} for name, node in prompt.items()}


@pytest.mark.parametrize("name", NAMES)
def test_every_node_is_replaced_and_values_and_wires_stay(page: Page, name: str, tmp_path: Path) -> None:
    """The editor makes of its form what the host makes of the API's, which tests/host/test_old_workflows.py runs."""
    _opened(page, name, tmp_path)
    assert any(node["class_type"] is None for node in _sent(page).values()), "nothing was missing"
    _replace_all(page)
    sent, expected = _sent(page), migrated(api_form(name))
    assert {node: content["class_type"] for node, content in sent.items()} == {
        node: content["class_type"] for node, content in expected.items()
    }
    for node, content in expected.items():
        for given, value in content["inputs"].items():
            assert sent[node]["inputs"][given] == value, (node, given)
        wires = {given for given, value in sent[node]["inputs"].items() if isinstance(value, list)}
        assert wires == {given for given, value in content["inputs"].items() if isinstance(value, list)}, node


def test_what_was_saved_afterwards_opens_without_a_question(page: Page, tmp_path: Path) -> None:
    _opened(page, "loaders", tmp_path)
    _replace_all(page)
    before = _sent(page)
    saved = tmp_path / "saved_again.json"
    saved.write_text(json.dumps(page.evaluate("() => window.app.graph.serialize()")))
    _open(page, saved)
    assert page.get_by_role("button", name="View details").count() == 0
    assert page.get_by_role("button", name="Replace All").count() == 0
    assert _sent(page) == before


def test_a_note_is_drawn_on_the_node_at_once(page: Page, tmp_path: Path) -> None:
    """Fields of several lines are elements beside the canvas, and those of a replaced node are not shown."""
    _opened(page, "loaders", tmp_path)
    _replace_all(page)
    notes = page.evaluate(
        """() => window.app.graph.nodes.flatMap(node => node.widgets ?? [])
            .filter(widget => widget.name === "note" && widget.value)
            .map(widget => [widget.value, widget.element === undefined])"""
    )
    assert sorted(text.split(":")[0] for text, _ in notes) == [
        "DeepCache is not done",
        "Not needed",
        "Use ComfyUI's Compare Images in place of this node. (In place of ShowImageDiff.)",
    ]
    assert all(drawn for _, drawn in notes)
