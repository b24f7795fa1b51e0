"""Workflows of the earlier OneDiff in the editor: opened, replaced at the press of a button, saved, opened again."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from controls import install_controls
from editor import Editor
from migration import NAMES, api_form, editor_form, migrated
from old_files import API, FILES, PNG, node_types, wires_of, with_nodes
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from playwright.sync_api import Page

from dev.host import ComfyServer
from onediff_comfy.host.legacy.replacements import NOT_REPLACED
from tools.workflow_files import editor_form as as_the_editor_saves

_SETTLED_MS = 800


@pytest.fixture(scope="module")
def editor(open_for_all: Callable[..., Editor], server: ComfyServer) -> Editor:
    """One page for all, where the files are that the workflows name."""
    install_controls(server)
    return open_for_all()


@pytest.fixture(scope="module", params=NAMES)
def replaced(request: pytest.FixtureRequest, editor: Editor) -> tuple[str, Page]:
    """A workflow after the button was pressed, by name. Each once, so its tests only look."""
    editor.open_text(editor_form(request.param))
    assert any(node["class_type"] is None for node in _sent(editor.page).values()), "nothing was missing"
    _replace_all(editor.page)
    return request.param, editor.page


_OF_LOADERS = pytest.mark.parametrize("replaced", ["loaders"], indirect=True, scope="module")


def _replace_all(page: Page) -> None:
    """What docs/from-onediff.md tells the person to press."""
    details = page.get_by_role("button", name="View details")
    replace = page.get_by_role("button", name="Replace All")
    details.or_(replace).first.wait_for()
    if details.count():  # not where the list of errors is open already
        details.click()
    replace.click()
    replaced = """kept => window.app.graph.nodes.every(
        node => node.type in LiteGraph.registered_node_types || kept.includes(node.type))"""
    page.wait_for_function(replaced, arg=list(NOT_REPLACED))
    page.wait_for_timeout(_SETTLED_MS)


def _sent(page: Page) -> dict[str, Any]:
    """What the editor would hand in to the host: class and inputs of each node."""
    prompt = page.evaluate("async () => (await window.app.graphToPrompt()).output")
    return {name: {"class_type": node["class_type"], "inputs": node["inputs"]} for name, node in prompt.items()}


def test_every_node_is_replaced_and_values_and_wires_stay(replaced: tuple[str, Page]) -> None:
    """The editor makes of its form what the host makes of the API's, which tests/host/test_old_workflows.py runs."""
    name, page = replaced
    sent, expected = _sent(page), migrated(api_form(name))
    assert {node: content["class_type"] for node, content in sent.items()} == {
        node: content["class_type"] for node, content in expected.items()
    }
    for node, content in expected.items():
        for given, value in content["inputs"].items():
            assert sent[node]["inputs"][given] == value, (node, given)
        wires = {given for given, value in sent[node]["inputs"].items() if isinstance(value, list)}
        assert wires == {given for given, value in content["inputs"].items() if isinstance(value, list)}, node


def test_each_replaced_node_has_the_size_that_it_needs(replaced: tuple[str, Page]) -> None:
    """The editor gives it the size of the node that was there."""
    _, page = replaced
    sizes = page.evaluate(
        """() => window.app.graph.nodes.filter(node => node.type.startsWith("OneDiff"))
            .map(node => [node.type, [...node.size], [...node.computeSize()]])"""
    )
    assert len(sizes) > 3
    assert [size for size in sizes if size[1][1] != size[2][1]] == []
    assert [size for size in sizes if size[1][0] < size[2][0]] == [], "its title or fields would be cut"


@_OF_LOADERS
def test_every_wire_is_known_at_both_ends(replaced: tuple[str, Page]) -> None:
    """An input alone is enough to run; without the output's end a wire stays behind when its node goes."""
    ends = replaced[1].evaluate(
        """() => window.app.graph.nodes.flatMap(node => node.inputs ?? []).filter(input => input.link != null)
            .map(input => window.app.graph.links.get(input.link))
            .map(link => {
                const output = window.app.graph.getNodeById(link.origin_id).outputs[link.origin_slot];
                return [link.id, output.links ?? []];
            })"""
    )
    assert len(ends) == 13
    assert all(wire in known for wire, known in ends), ends


@_OF_LOADERS
def test_a_note_is_drawn_on_the_node_at_once(replaced: tuple[str, Page]) -> None:
    """Fields of several lines are elements beside the canvas, and those of a replaced node are not shown."""
    notes = replaced[1].evaluate(
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


@_OF_LOADERS
def test_what_was_saved_afterwards_opens_without_a_question(replaced: tuple[str, Page], editor: Editor) -> None:
    """The last of these: what it opens takes the place of what the others look at."""
    _, page = replaced
    before = _sent(page)
    editor.open_text(json.dumps(page.evaluate("() => window.app.graph.serialize()")))
    assert page.get_by_role("button", name="View details").count() == 0
    assert page.get_by_role("button", name="Replace All").count() == 0
    assert _sent(page) == before


@pytest.mark.parametrize("form", ["json", "png"])
@pytest.mark.parametrize("name", NAMES)
def test_a_file_in_the_apis_form_keeps_nodes_and_wires(editor: Editor, tmp_path: Path, name: str, form: str) -> None:
    """The editor asks no question about such a file, and by itself would leave out what it does not know."""
    workflow = api_form(name)
    if form == "json":
        editor.open_text(json.dumps(workflow))
    else:
        about = PngInfo()
        about.add_text("prompt", json.dumps(workflow))
        Image.new("RGB", (8, 8)).save(tmp_path / "image.png", pnginfo=about)
        editor.open_file(tmp_path / "image.png")
    sent, expected = _sent(editor.page), migrated(workflow)
    assert {node: content["class_type"] for node, content in sent.items()} == {
        node: content["class_type"] for node, content in expected.items()
    }
    for node, content in expected.items():
        for given, value in content["inputs"].items():
            assert sent[node]["inputs"][given] == value, (node, given)


def test_a_picture_with_the_editors_form_is_offered_replacements(editor: Editor, tmp_path: Path) -> None:
    about = PngInfo()
    about.add_text("workflow", editor_form("speedup_nodes"))
    about.add_text("prompt", json.dumps(api_form("speedup_nodes")))
    Image.new("RGB", (8, 8)).save(tmp_path / "image.png", pnginfo=about)
    editor.open_file(tmp_path / "image.png")
    _replace_all(editor.page)
    expected = migrated(api_form("speedup_nodes"))
    assert sorted(node["class_type"] for node in _sent(editor.page).values()) == sorted(
        node["class_type"] for node in expected.values()
    )


_CASES = {case: [name for name, other in FILES.items() if other == case] for case in FILES.values()}
"""The files of each form and set of old nodes: to the editor they are the same."""


@pytest.mark.parametrize(("form", "old"), [pytest.param(*case, id=", ".join(names)) for case, names in _CASES.items()])
def test_every_file_of_the_earlier_onediff_opens_with_its_nodes(
    editor: Editor, tmp_path: Path, form: str, old: Sequence[str]
) -> None:
    """Written here with the nodes of each; what is wired to them is still wired to what took their places."""
    workflow = with_nodes(old)
    if form == API:
        editor.open_text(json.dumps(workflow))
    else:
        known = {**editor.server.get_json("/object_info"), **node_types(old)}
        text = json.dumps(as_the_editor_saves(workflow, known, note=""))
        if form == PNG:
            about = PngInfo()
            about.add_text("workflow", text)
            Image.new("RGB", (8, 8)).save(tmp_path / "image.png", pnginfo=about)
            editor.open_file(tmp_path / "image.png")
        else:
            editor.open_text(text)
        _replace_all(editor.page)
    sent, expected = _sent(editor.page), migrated(workflow)
    assert {node: content["class_type"] for node, content in sent.items()} == {
        node: content["class_type"] for node, content in expected.items()
    }
    assert sum(content["class_type"].startswith("OneDiff") for content in sent.values()) == len(
        [node for node in old if node not in NOT_REPLACED]
    )
    assert wires_of(sent) == wires_of(workflow)
    values = [value for node in workflow.values() for value in node["inputs"].values() if isinstance(value, str)]
    kept = [value for node in sent.values() for value in node["inputs"].values()]
    assert all(value in kept for value in values)
