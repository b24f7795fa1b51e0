"""What the pack adds to ComfyUI's editor: bar, whole status, sidebar, settings. One server and one page for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from editor import Editor
from pictures import FAMILIES
from playwright.sync_api import Browser, Page, Route

from dev.environment import repository
from dev.host import ComfyServer

FLUX = FAMILIES["flux"]
NODE = "OneDiffModelSpeedup"


@pytest.fixture(scope="module")
def own_server(start_server: Callable[..., ComfyServer]) -> Iterator[ComfyServer]:
    """An installation of its own: its graphs are removed, its language is changed."""
    with start_server() as running:
        yield running


@pytest.fixture(scope="module")
def editor(open_for_all: Callable[..., Editor], own_server: ComfyServer) -> Editor:
    return open_for_all(of=own_server)


def _bar(page: Page, language: str = "en") -> str | None:
    """What is written on the bar of the first node of ours now, as the extension draws it."""
    return page.evaluate(
        """async ([type, language]) => {
            const { barOf } = await import("/extensions/onediff-comfy/onediff/status.js");
            const node = window.app.graph.nodes.find(node => node.type === type);
            return barOf(String(node.id), language)?.label ?? null;
        }""",
        [NODE, language],
    )


def test_a_bar_shows_phase_and_time_while_a_graph_is_compiled(editor: Editor) -> None:
    editor.open(FLUX.workflow(701, "inductor", size=(96, 160)))
    editor.press_run()
    editor.wait_for_text(NODE, "compiling, ")
    label = _bar(editor.page)
    assert label is not None and label.startswith("Compiling · ") and label.endswith(" s")
    editor.screenshot(_picture("bar"))
    editor.wait_for_text(NODE, "96×160 b1")
    assert _bar(editor.page) is None


def test_the_sidebar_lists_graphs_by_family_and_removes_them(editor: Editor, own_server: ComfyServer) -> None:
    page = editor.page
    page.get_by_role("button", name="OneDiff").first.click()
    panel = page.locator(".onediff-panel")
    panel.get_by_text("all sizes").wait_for()
    assert panel.get_by_role("heading", name="Flux · ").count() == 1
    assert f"{FLUX.steps} calls" in panel.inner_text()
    assert "Nothing ran without acceleration." in panel.inner_text()
    editor.screenshot(_picture("sidebar"))
    assert own_server.get_json("/onediff/report")["graphs_in_memory"] == 1
    panel.get_by_role("button", name="Free memory").click()
    page.get_by_text("Freed: ").first.wait_for()
    assert own_server.get_json("/onediff/report")["graphs_in_memory"] == 0
    kept = list((own_server.base_dir / "onediff-cache" / "graphs").glob("*.graph"))
    assert len(kept) == 1
    panel.get_by_role("button", name="Remove", exact=True).click()
    panel.get_by_text("No compiled graphs yet.").wait_for()
    assert not kept[0].exists()
    page.get_by_role("button", name="OneDiff").first.click()


def test_a_status_is_not_cut_and_a_click_opens_and_copies_it(editor: Editor) -> None:
    page = editor.page
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    editor.open(FLUX.workflow(702, "oneflow", size=64))
    editor.run()
    said = editor.wait_for_text(NODE, "engine is not available")
    status = page.locator('[data-onediff="status"]')
    status.wait_for()
    page.wait_for_timeout(500)
    cut = status.evaluate(
        """element => {
            const text = element.querySelector(".break-all");
            return [text.scrollHeight > element.clientHeight, getComputedStyle(text).wordBreak];
        }"""
    )
    assert cut == [False, "normal"]
    editor.screenshot(_picture("status"))
    status.click()
    dialog = page.locator(".onediff-dialog")
    assert dialog.locator("pre").inner_text() == said
    dialog.get_by_role("button", name="Copy for a bug report").click()
    dialog.get_by_role("button", name="Copied").wait_for()
    copied = page.evaluate("() => navigator.clipboard.readText()")
    assert copied.startswith(f"{NODE}: {said}\nComfyUI ")
    assert '"served":' in copied and "eager: the oneflow engine is not available" in copied
    editor.screenshot(_picture("whole-status"))
    dialog.get_by_role("button", name="Close").click()
    dialog.wait_for(state="detached")


def test_when_the_background_is_done_a_toast_says_so(editor: Editor) -> None:
    editor.open(FLUX.workflow(703, "inductor", size=(64, 96), compile="background"))
    seen = ""
    for _ in range(100):  # images are made without the graph until another process has it
        editor.run()
        seen = editor.text_on(NODE) or ""
        if "compiled graph" in seen:
            break
        editor.page.evaluate(
            """() => { const sampler = window.app.graph.nodes.find(node => node.type === "KSampler");
                sampler.widgets.find(widget => widget.name === "seed").value += 1; }"""
        )
    assert "compiled graph" in seen
    editor.page.get_by_text("Compiled in the background.").wait_for()
    editor.screenshot(_picture("toast"))


def test_a_new_node_has_the_settings_values_and_an_opened_one_its_own(editor: Editor) -> None:
    page = editor.page
    page.evaluate("async () => window.app.extensionManager.setting.set('OneDiff.Compile', 'background')")
    made = """type => { const node = LiteGraph.createNode(type); window.app.graph.add(node);
        const value = node.widgets.find(widget => widget.name === "compile").value;
        window.app.graph.remove(node); return value; }"""
    assert page.evaluate(made, NODE) == "background"
    editor.open(FLUX.workflow(704, "eager", compile="wait"))
    (node,) = (node for node in editor.nodes() if node["type"] == NODE)
    assert node["values"]["compile"] == "wait"
    page.evaluate("async () => window.app.extensionManager.setting.set('OneDiff.Compile', 'wait')")
    assert page.evaluate(made, NODE) == "wait"


def test_the_search_finds_the_one_node(editor: Editor) -> None:
    """The editor looks at names first: where other nodes have the word in theirs, those come before it."""
    editor.open(FLUX.workflow(705))  # with room below it
    for words in ("optimize", "faster", "fp8", "编译", "加速"):
        assert editor.find(words, "OneDiff Optimize")[0] == "OneDiff Optimize", words
    for words in ("speed", "compile", "cache"):
        assert "OneDiff Optimize" in editor.find(words, "OneDiff Optimize"), words


def test_behind_a_path_prefix_the_extension_loads_and_the_diagnosis_is_whole(
    browser: Browser, own_server: ComfyServer
) -> None:
    """As behind a proxy that gives ComfyUI a folder of a site: nothing beside the folder answers."""
    site = f"{own_server.url}/comfy"

    def through(route: Route) -> None:
        if route.request.url.startswith(f"{site}/"):
            route.continue_(url=own_server.url + route.request.url.removeprefix(site))
        else:
            route.abort()

    page = browser.new_context(locale="en").new_page()
    page.route("**/*", through)
    page.goto(f"{site}/")
    page.wait_for_function("window.app?.graph && window.app.vueAppReady")
    page.get_by_role("button", name="OneDiff").first.wait_for()
    said = page.evaluate(
        """async () => {
            const { diagnosis } = await import("/comfy/extensions/onediff-comfy/onediff/status.js");
            return diagnosis(window.comfyAPI.api.api, "all is well", { type: "OneDiffOptimize" });
        }"""
    )
    page.context.close()
    assert said.startswith("OneDiffOptimize: all is well\nComfyUI ")
    assert '"served":' in said


def test_the_settings_have_a_page(editor: Editor) -> None:
    page = editor.page
    _open_settings(page)
    for name in ("Folder of compiled graphs", "Megabytes that compiled graphs may take", "Engine of new nodes"):
        page.get_by_role("dialog").get_by_text(name).first.wait_for()
    page.get_by_role("dialog").get_by_text("Who waits for compiling, of new nodes").first.wait_for()
    editor.screenshot(_picture("settings"))
    page.keyboard.press("Escape")


def _open_settings(page: Page) -> None:
    page.keyboard.press("Control+,")
    page.get_by_role("dialog").get_by_text("OneDiff", exact=True).first.click()
    page.wait_for_timeout(500)


def test_in_chinese_bar_sidebar_status_and_settings_are_chinese(editor: Editor, own_server: ComfyServer) -> None:
    """The last of this file: the language is the installation's."""
    page = editor.page
    editor.choose_language("中文")
    own_server.post("/onediff/panel/clear")  # or a graph of the other tests serves
    editor.open(FLUX.workflow(706, "inductor", size=(64, 160)))
    editor.press_run()
    editor.wait_for_text(NODE, "编译中")
    label = _bar(page, "zh")
    assert label is not None and label.startswith("编译中 · ") and label.endswith(" 秒")
    editor.screenshot(_picture("bar-zh"))
    editor.wait_for_text(NODE, "64×160 b1")
    editor.open(FLUX.workflow(707, "oneflow", size=64))
    editor.run()
    said = editor.wait_for_text(NODE, "oneflow")
    page.locator('[data-onediff="status"]').click()
    assert page.locator(".onediff-dialog pre").inner_text() == said
    editor.screenshot(_picture("whole-status-zh"))
    page.get_by_role("button", name="关闭").last.click()
    page.get_by_role("button", name="OneDiff").first.click()
    panel = page.locator(".onediff-panel")
    panel.get_by_text("所有尺寸").first.wait_for()
    panel.get_by_role("button", name="释放内存").wait_for()
    for shown in panel.locator("h4, p, button, header strong, header span").all_inner_texts():
        assert any("\u4e00" <= character <= "\u9fff" for character in shown) or shown.startswith("Flux"), shown
    editor.screenshot(_picture("sidebar-zh"))
    _open_settings(page)
    for name in ("编译图的文件夹", "磁盘上的编译图", "新节点的引擎"):
        page.get_by_role("dialog").get_by_text(name).first.wait_for()
    page.get_by_role("dialog").get_by_text("新节点", exact=True).wait_for()
    editor.screenshot(_picture("settings-zh"))


def _picture(name: str) -> Path:
    folder = repository() / ".cache" / "screenshots"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"extension-{name}.png"
