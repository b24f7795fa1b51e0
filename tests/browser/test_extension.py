"""What the pack adds to ComfyUI's editor: bar, whole status, sidebar, settings. One server and one page for all."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from editor import Editor
from encoders import encoded
from pictures import FAMILIES, Counters
from playwright.sync_api import Browser, Page, Route

from dev.environment import repository
from dev.host import ComfyServer

FLUX = FAMILIES["flux"]
NODE = "OneDiffModelSpeedup"
OF_PROMPTS = "OneDiffCLIPSpeedup"
_SOON_MS = 30_000


@pytest.fixture(scope="module")
def editor(open_for_all: Callable[..., Editor], server: ComfyServer) -> Editor:
    """One page for all, where nothing is compiled."""
    for action in ("clear", "free"):
        server.post(f"/onediff/panel/{action}")
    return open_for_all()


@pytest.fixture
def chinese(editor: Editor, server: ComfyServer) -> Iterator[None]:
    """Chinese, chosen as a person chooses it; the language is the installation's."""
    editor.choose_language("中文")
    yield
    server.post("/settings", {"Comfy.Locale": "en"})


BAR = """async ([type, language]) => {
    const { barOf } = await import("/extensions/onediff-comfy/onediff/status.js");
    const node = window.app.graph.nodes.find(node => node.type === type);
    return barOf(String(node.id), language)?.label ?? null;
}"""
"""What is written on the bar of the first node of a type now, as the extension draws it; null without a bar."""


def _bar(page: Page) -> str | None:
    return page.evaluate(BAR, [NODE, "en"])


def _wait_for_bar(page: Page, node: str, language: str, words: str) -> None:
    """Wait until the bar says what matches ``words``: phases follow each other as fast as the machine goes.

    ``wait_for_function`` cannot: it takes the promise of a function that is asynchronous for a yes.
    """
    label = page.evaluate(
        f"""async ([words, soon, ...of]) => {{
            let label, end = performance.now() + soon;
            do {{
                await new Promise(requestAnimationFrame);
                label = await ({BAR})(of) ?? "";
            }} while (!new RegExp(`^${{words}}$`).test(label) && performance.now() < end);
            return label;
        }}""",
        [words, _SOON_MS, node, language],
    )
    assert re.fullmatch(words, label)


def test_a_node_shows_a_bar_while_it_compiles(editor: Editor, server: ComfyServer) -> None:
    """Of all that Inductor compiles and keeps a text encoder takes the least time."""
    counters = Counters(server)
    editor.open(encoded("a lighthouse", "inductor"))
    editor.press_run()
    editor.wait_for_text(OF_PROMPTS, "compiling, ")
    _wait_for_bar(editor.page, OF_PROMPTS, "en", "Compiling · .* s")
    _wait_for_bar(editor.page, OF_PROMPTS, "zh", "编译中 · .* 秒")
    editor.screenshot(_picture("bar"))
    editor.wait_for_text(OF_PROMPTS, "compiled graph ready")
    _wait_for_bar(editor.page, OF_PROMPTS, "en", "")
    editor.open(encoded("two dogs", "inductor"))
    editor.run()
    assert (counters.served, counters.compiled, counters.fallbacks) == (2, 1, {})


def test_a_node_says_what_came_of_an_image(editor: Editor, server: ComfyServer) -> None:
    counters = Counters(server)
    editor.open(FLUX.workflow(701, "eager", size=(96, 160)))
    editor.run()
    status = editor.wait_for_text(NODE, "96×160 b1")
    assert re.fullmatch(r"compiled graph · 96×160 b1 · .*compiled in [\d.]+ s", status)
    assert (counters.served, counters.compiled, counters.fallbacks) == (FLUX.steps, 1, {})
    editor.open(FLUX.workflow(702, "eager", size=(96, 160)))
    editor.run()
    assert editor.wait_for_text(NODE, "recompiles").endswith(" · 0 recompiles")


def test_the_sidebar_lists_graphs_by_family_and_frees_their_memory(editor: Editor, server: ComfyServer) -> None:
    """The text encoder's, which is kept, and the model's, which the eager engine does not keep."""
    page = editor.page
    page.get_by_role("button", name="OneDiff").first.click()
    panel = page.locator(".onediff-panel")
    panel.get_by_text("all sizes").first.wait_for()
    for family in ("Flux", "CLIP text encoder"):
        assert panel.get_by_role("heading", name=f"{family} · ").count() == 1
    assert f"{2 * FLUX.steps} calls" in panel.inner_text()
    assert "Nothing ran without acceleration." in panel.inner_text()
    editor.screenshot(_picture("sidebar"))
    assert server.get_json("/onediff/report")["graphs_in_memory"] == 2
    panel.get_by_role("button", name="Free memory").click()
    page.get_by_text("Freed: ").first.wait_for()
    assert server.get_json("/onediff/report")["graphs_in_memory"] == 0
    assert len(_kept(server)) == 1
    page.get_by_role("button", name="OneDiff").first.click()


def _kept(server: ComfyServer) -> list[Path]:
    return list((server.base_dir / "onediff-cache" / "graphs").glob("*.graph"))


def test_a_status_is_not_cut_and_a_click_opens_and_copies_it(editor: Editor) -> None:
    page = editor.page
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    editor.open(FLUX.workflow(706, "oneflow", size=64))
    editor.run()
    said = editor.wait_for_text(NODE, "engine is not available")
    status = page.locator('[data-onediff="status"]')
    status.wait_for()
    cut = """element => {
        const text = element.querySelector(".break-all");
        return [text.scrollHeight > element.clientHeight, getComputedStyle(text).wordBreak];
    }"""
    page.wait_for_function(f"element => !({cut})(element)[0]", arg=status.element_handle())
    assert status.evaluate(cut) == [False, "normal"]
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
    """Told as a server tells it, by the event that tests/host/test_background.py and unit/test_status.py look at."""
    editor.open(FLUX.workflow(703, "eager"))
    label = editor.page.evaluate(
        """async type => {
            const { barOf } = await import("/extensions/onediff-comfy/onediff/status.js");
            const node = String(window.app.graph.nodes.find(node => node.type === type).id);
            const progress = { phase: "background", seconds: 7, expected: null };
            const detail = { node, text: "compiling in the background, 7 s", progress };
            window.comfyAPI.api.api.dispatchEvent(new CustomEvent("onediff.status", { detail }));
            return barOf(node, "en")?.label ?? null;
        }""",
        NODE,
    )
    assert re.fullmatch(r"Compiling in the background · \d+ s", label or "")
    editor.page.get_by_text("Compiled in the background.").wait_for()
    assert _bar(editor.page) is None
    editor.screenshot(_picture("toast"))


@pytest.mark.slow  # the one before, and host/test_background.py
def test_a_person_sees_the_background_compile_and_end(editor: Editor, server: ComfyServer) -> None:
    kept_before = set(_kept(server))
    editor.open(FLUX.workflow(1000, "inductor", size=(64, 96), compile="background"))
    seen = ""
    for seed in range(1001, 1100):  # images are made without the graph until another process has it
        editor.run()
        seen = editor.text_on(NODE) or ""
        if "compiled graph" in seen:
            break
        editor.open(FLUX.workflow(seed, "inductor", size=(64, 96), compile="background"))
    assert "compiled graph" in seen
    editor.page.get_by_text("Compiled in the background.").wait_for()
    for path in set(_kept(server)) - kept_before:  # the last test of this file removes the one that the first left
        path.unlink()
    server.post("/onediff/panel/free")


def test_a_new_node_has_the_settings_values_and_an_opened_one_its_own(editor: Editor) -> None:
    page = editor.page
    page.evaluate("async () => window.app.extensionManager.setting.set('OneDiff.Compile', 'background')")
    made = """type => { const node = LiteGraph.createNode(type); window.app.graph.add(node);
        const value = node.widgets.find(widget => widget.name === "compile").value;
        window.app.graph.remove(node); return value; }"""
    assert page.evaluate(made, NODE) == "background"
    editor.open(FLUX.workflow(705, "eager", compile="wait"))
    (node,) = (node for node in editor.nodes() if node["type"] == NODE)
    assert node["values"]["compile"] == "wait"
    page.evaluate("async () => window.app.extensionManager.setting.set('OneDiff.Compile', 'wait')")
    assert page.evaluate(made, NODE) == "wait"


def test_behind_a_path_prefix_the_extension_loads_and_the_diagnosis_is_whole(
    browser: Browser, server: ComfyServer
) -> None:
    """As behind a proxy that gives ComfyUI a folder of a site: nothing beside the folder answers."""
    site = f"{server.url}/comfy"

    def through(route: Route) -> None:
        if route.request.url.startswith(f"{site}/"):
            route.continue_(url=server.url + route.request.url.removeprefix(site))
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
    for name in ("Folder for compiled graphs", "Disk space for compiled graphs, in MB", "Engine for new nodes"):
        page.get_by_role("dialog").get_by_text(name).first.wait_for()
    page.get_by_role("dialog").get_by_text("Who waits for compilation in new nodes").first.wait_for()
    editor.screenshot(_picture("settings"))
    page.keyboard.press("Escape")


def _open_settings(page: Page) -> None:
    page.keyboard.press("Control+,")
    page.get_by_role("dialog").get_by_text("OneDiff", exact=True).first.click()
    page.wait_for_timeout(500)


@pytest.mark.usefixtures("chinese")
def test_in_chinese_sidebar_status_and_settings_are_chinese(editor: Editor, server: ComfyServer) -> None:
    """The last of this file: its page stays Chinese, and the graph that the first one left goes."""
    page = editor.page
    editor.open(FLUX.workflow(708, "oneflow", size=64))
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
    panel.get_by_role("button", name="删除", exact=True).first.click()
    panel.get_by_text("还没有编译图").wait_for()
    assert _kept(server) == []
    _open_settings(page)
    for name in ("编译图的文件夹", "磁盘上的编译图", "新节点的引擎"):
        page.get_by_role("dialog").get_by_text(name).first.wait_for()
    page.get_by_role("dialog").get_by_text("新节点", exact=True).wait_for()
    editor.screenshot(_picture("settings-zh"))


def _picture(name: str) -> Path:
    folder = repository() / ".cache" / "screenshots"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"extension-{name}.png"
