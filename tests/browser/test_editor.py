"""The pack in ComfyUI's editor, in a real browser: what a person sees from opening a workflow to the image."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from controls import install_controls
from editor import Editor
from model_parts import install_model_parts
from pictures import FAMILIES, Counters
from shipped import small

from dev.environment import repository
from dev.host import ComfyServer
from tools.templates import TITLES
from tools.workflow_files import workflows
from tools.workflows import Workflow

FLUX = FAMILIES["flux"]
NODES = sorted(path.name for path in (repository() / "web" / "docs").iterdir())


@pytest.fixture(scope="module")
def own_server(start_server: Callable[..., ComfyServer]) -> Iterator[ComfyServer]:
    """An installation of its own, in which nothing is compiled, and whose language can be changed."""
    with start_server() as running:
        yield running


def test_progress_appears_on_the_node_and_then_what_came_of_it(
    open_editor: Callable[..., Editor], own_server: ComfyServer
) -> None:
    editor = open_editor(of=own_server)
    counters = Counters(own_server)
    editor.open(FLUX.workflow(501, "inductor", size=(96, 160)))
    editor.press_run()
    editor.wait_for_text("OneDiffModelSpeedup", "compiling, ")
    status = editor.wait_for_text("OneDiffModelSpeedup", "96×160 b1")
    assert status.startswith("compiled graph · 96×160 b1 · ")
    assert re.search(r" · compiled in \d+ s$", status)
    assert (counters.served, counters.compiled, counters.fallbacks) == (FLUX.steps, 1, {})
    editor.open(FLUX.workflow(502, "inductor", size=(96, 160)))
    editor.run()
    assert editor.wait_for_text("OneDiffModelSpeedup", "recompiles").endswith(" · 0 recompiles")


def test_a_reason_stands_on_the_node_and_stays_there(open_editor: Callable[..., Editor]) -> None:
    editor = open_editor()
    editor.open(FLUX.workflow(503, "oneflow", size=64))  # not in the developer environment
    editor.run()
    text = editor.wait_for_text("OneDiffModelSpeedup", "engine is not available")
    assert text.startswith("not accelerated: the oneflow engine is not available")


def test_the_report_shows_its_text_and_its_picture(open_editor: Callable[..., Editor]) -> None:
    editor = open_editor()
    workflow = FLUX.workflow(504, "eager", size=(64, 96))
    workflow["report"] = {"class_type": "OneDiffReport", "inputs": {"model": ["speedup", 0], "after": ["decode", 0]}}
    editor.open(workflow)
    editor.run()
    text = editor.wait_for_text("OneDiffReport", "All together")
    assert f"MODEL: {FLUX.steps} of {FLUX.steps} calls served by compiled graphs" in text
    editor.wait_for_picture("OneDiffReport")
    assert editor.pictures_on("OneDiffReport") == 1


_FIRST = ("text_to_image", "step_cache", "image_to_image")  # of the others, test_workflows sees that they run


@pytest.mark.parametrize(
    "name", [name if name in _FIRST else pytest.param(name, marks=pytest.mark.slow) for name in workflows()]
)
def test_a_workflow_opens_runs_and_shows_its_image(
    open_editor: Callable[..., Editor], server: ComfyServer, name: str
) -> None:
    """The shipped file opens as it is; the same on a tiny checkpoint runs."""
    install_controls(server)
    install_model_parts(server)
    editor = open_editor()
    editor.open_text((repository() / "workflows" / f"{TITLES[name]}.json").read_text())
    assert not [node["type"] for node in editor.nodes() if node["missing"]]
    workflow: Workflow = small(name, 600 + len(name))
    for node in workflow.values():
        if "engine" in node["inputs"] and name != "save_compiled_graph":
            node["inputs"]["engine"] = "eager"  # in no time; compiling is for the tests of the host
    counters = Counters(server)
    editor.open(workflow)
    editor.run()
    if name != "video":  # which is no picture
        editor.wait_for_picture("SaveImage")
    assert counters.served > 0 and counters.fallbacks == {}


@pytest.mark.parametrize("words", ["torch compile", "tensorrt", "speed", "加速"])
def test_the_search_finds_the_node(open_editor: Callable[..., Editor], words: str) -> None:
    editor = open_editor()
    editor.open(FLUX.workflow(506))  # with room below it
    editor.find(words, "OneDiff Model Speedup")


def test_the_template_browser_has_every_workflow_with_its_picture(open_editor: Callable[..., Editor]) -> None:
    editor = open_editor()
    shown = editor.templates("onediff-comfy")
    assert sorted(shown) == sorted(TITLES[name] for name in workflows())
    assert all(shown.values()), "a template without its picture"


def test_a_template_offers_to_download_its_models(open_editor: Callable[..., Editor]) -> None:
    editor = open_editor()
    page = editor.page
    page.get_by_text("Templates").first.click()
    page.get_by_role("dialog").get_by_text("onediff-comfy", exact=True).click()
    page.get_by_test_id(f"template-workflow-{TITLES['text_to_image_sd15']}").click()
    page.get_by_role("button", name="View details").click()
    page.get_by_text("v1-5-pruned-emaonly-fp16.safetensors").first.wait_for()
    page.get_by_role("button", name=re.compile("Download")).first.wait_for()


def _every_node() -> Workflow:
    """One of each, connected to nothing."""
    return {name: {"class_type": name, "inputs": {}} for name in NODES}


@pytest.mark.slow
def test_every_node_has_a_help_page_with_a_picture(open_editor: Callable[..., Editor]) -> None:
    editor = open_editor()
    for node in NODES:
        editor.open({"node": {"class_type": node, "inputs": {}}})
        text = editor.read_help(node)
        title = next(line for line in (repository() / "web" / "docs" / node / "en.md").read_text().splitlines() if line)
        assert text.splitlines()[0] == title.removeprefix("# ")


@pytest.mark.slow
def test_in_chinese_no_english_is_left(open_editor: Callable[..., Editor], own_server: ComfyServer) -> None:
    """Behind this ``own_server`` is Chinese: the language is a setting of the installation."""
    editor = open_editor(of=own_server)
    editor.choose_language("中文")
    editor.open(_every_node())
    english = [text for node in editor.texts(NODES) for text in node if not _is_chinese(text)]
    assert english == []
    for node in NODES:
        editor.open({"node": {"class_type": node, "inputs": {}}})
        assert _is_chinese(editor.read_help(node).splitlines()[0])
    workflow: dict[str, Any] = FLUX.workflow(505, "eager", size=64)
    workflow["report"] = {"class_type": "OneDiffReport", "inputs": {"model": ["speedup", 0], "after": ["decode", 0]}}
    editor.open(workflow)
    editor.run()
    assert editor.wait_for_text("OneDiffModelSpeedup", "64×64 b1").startswith("编译图 · 64×64 b1 · ")
    assert all(map(_is_chinese, editor.wait_for_text("OneDiffReport", "MODEL").splitlines()))


# Names of things, not words of a language; the host's own Chinese texts have them too.
_NAMES = {"vae", "clip", "controlnet", "latent", "json"}


def _is_chinese(text: str) -> bool:
    return any("\u4e00" <= character <= "\u9fff" for character in text) or text.lower() in _NAMES


def test_a_workflow_that_is_saved_and_opened_again_is_the_same(open_editor: Callable[..., Editor]) -> None:
    """What the editor writes for our nodes it reads again, values at their places."""
    editor = open_editor()
    text = (repository() / "workflows" / f"{TITLES['shape_bucket']}.json").read_text()
    editor.open_text(text)
    before = editor.nodes()
    editor.open_text(json.dumps(editor.page.evaluate("() => window.app.graph.serialize()")))
    assert editor.nodes() == before
