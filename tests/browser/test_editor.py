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
def editor(open_for_all: Callable[..., Editor]) -> Editor:
    """One page for all: to load the editor takes a browser without a GPU several seconds."""
    return open_for_all()


def test_the_report_shows_its_text_and_its_picture(editor: Editor) -> None:
    workflow = FLUX.workflow(504, "eager", size=(64, 96))
    workflow["report"] = {"class_type": "OneDiffReport", "inputs": {"model": ["speedup", 0], "after": ["decode", 0]}}
    editor.open(workflow)
    editor.run()
    text = editor.wait_for_text("OneDiffReport", "All together")
    assert f"MODEL: {FLUX.steps} of {FLUX.steps} calls served by compiled graphs" in text
    editor.wait_for_picture("OneDiffReport")
    assert editor.pictures_on("OneDiffReport") == 1


_FIRST = "step_cache"  # host/test_workflows.py sees that each runs, and that both forms say the same


@pytest.mark.parametrize(
    "name", [name if name == _FIRST else pytest.param(name, marks=pytest.mark.slow) for name in workflows()]
)
def test_a_workflow_opens_runs_and_shows_its_image(editor: Editor, server: ComfyServer, name: str) -> None:
    """The shipped file opens as it is; the same on a tiny checkpoint runs."""
    install_controls(server)
    install_model_parts(server)
    editor.open_text((repository() / "workflows" / f"{TITLES[name]}.json").read_text())
    assert not [node["type"] for node in editor.nodes() if node["missing"]]
    if name == "optimize":  # its engine compiles in another process first: host/test_optimize.py
        return
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


def test_the_search_finds_the_nodes(editor: Editor) -> None:
    """The editor looks at names first: where other nodes have the word in theirs, those come before it."""
    editor.open(FLUX.workflow(506))  # with room below it
    for words in ("optimize", "faster", "fp8", "编译", "加速"):
        assert editor.find(words, "OneDiff Optimize", first=True)[0] == "OneDiff Optimize", words
    for words in ("speed", "compile", "cache"):
        assert "OneDiff Optimize" in editor.find(words, "OneDiff Optimize"), words
    editor.find("tensorrt", "OneDiff Model Speedup")


def test_a_workflow_that_is_saved_and_opened_again_is_the_same(editor: Editor) -> None:
    """What the editor writes for our nodes it reads again, values at their places."""
    text = (repository() / "workflows" / f"{TITLES['shape_bucket']}.json").read_text()
    editor.open_text(text)
    before = editor.nodes()
    editor.open_text(json.dumps(editor.page.evaluate("() => window.app.graph.serialize()")))
    assert editor.nodes() == before


def test_the_template_browser_has_every_workflow_and_offers_to_download_its_models(editor: Editor) -> None:
    shown = editor.templates("onediff-comfy")
    assert sorted(shown) == sorted(TITLES[name] for name in workflows())
    assert all(shown.values()), "a template without its picture"
    page = editor.page
    card = page.get_by_test_id(f"template-workflow-{TITLES['text_to_image_sd15']}")
    for _ in range(10):  # cards are there while they are in view
        if card.count():
            break
        page.mouse.wheel(0, -300)
        page.wait_for_timeout(300)
    card.click()
    page.get_by_role("button", name="View details").click()
    page.get_by_text("v1-5-pruned-emaonly-fp16.safetensors").first.wait_for()
    page.get_by_role("button", name=re.compile("Download")).first.wait_for()


def _every_node() -> Workflow:
    """One of each, connected to nothing."""
    return {name: {"class_type": name, "inputs": {}} for name in NODES}


@pytest.fixture
def chinese(server: ComfyServer) -> Iterator[ComfyServer]:
    """The shared server while its person has chosen Chinese in the settings."""
    yield server
    server.post("/settings", {"Comfy.Locale": "en"})


@pytest.mark.slow
def test_every_node_has_a_help_page_with_a_picture(editor: Editor) -> None:
    for node in NODES:
        editor.open({"node": {"class_type": node, "inputs": {}}})
        text = editor.read_help(node)
        title = next(line for line in (repository() / "web" / "docs" / node / "en.md").read_text().splitlines() if line)
        assert text.splitlines()[0] == title.removeprefix("# ")


@pytest.mark.slow
def test_in_chinese_no_english_is_left(open_editor: Callable[..., Editor], chinese: ComfyServer) -> None:
    editor = open_editor(of=chinese)
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
