"""ComfyUI's editor in a browser, used as a person uses it: keys, clicks, files. Only looking goes through scripts."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from playwright.sync_api import FileChooser, Locator, Page
from playwright.sync_api import TimeoutError as PlaywrightTimeout

from dev.host import ComfyServer
from tools.thumbnails import SIDE
from tools.workflow_files import editor_form
from tools.workflows import Workflow

_READY_MS = 60_000
_SETTLED_MS = 800
_TEXT_ON_NODE = "$$node-text-preview"  # the widget in which the editor shows what send_progress_text says


class Editor:
    """One open page.

    Attributes:
        page: Playwright's.
        server: whose editor it is.
        errors: script errors of the page so far.
    """

    def __init__(self, page: Page, server: ComfyServer) -> None:
        self.page, self.server = page, server
        self.errors: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.goto(server.url)
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        script = "window.app && window.app.graph && window.app.vueAppReady"
        self.page.wait_for_function(script, timeout=_READY_MS)
        self.page.wait_for_timeout(_SETTLED_MS)
        self.close_dialogs()

    def close_dialogs(self) -> None:
        """What greets a new person, templates and news."""
        for _ in range(3):
            if not self.page.get_by_role("dialog").count():
                break
            self.page.keyboard.press("Escape")
            self.page.wait_for_timeout(300)

    def open(self, workflow: Workflow) -> None:
        """Open a workflow, given in API form, in the form that the editor saves."""
        self.open_text(json.dumps(editor_form(workflow, self.server.get_json("/object_info"), note="")))

    def open_text(self, text: str) -> None:
        """Open a file with this text, through the editor's own file dialog."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "opened.json"
            file.write_text(text, encoding="utf-8")
            self.open_file(file)

    def open_file(self, file: Path) -> None:
        """Open a file, a picture with a workflow in it for instance, through the editor's own file dialog."""
        chooser = self._file_dialog()
        self.page.evaluate("() => window.app.graph.nodes.forEach(node => { node.wasThereBefore = true; })")
        chooser.set_files(file)
        opened = "() => { const n = window.app.graph.nodes; return n.length && !n.some(node => node.wasThereBefore); }"
        self.page.wait_for_function(opened)
        self.page.wait_for_timeout(_SETTLED_MS)
        self.close_dialogs()

    def _file_dialog(self) -> FileChooser:
        for _ in range(10):  # the page listens to keys some time after it is drawn
            try:
                with self.page.expect_file_chooser(timeout=3000) as chooser:
                    self.page.keyboard.press("Control+o")
            except PlaywrightTimeout:
                continue
            return chooser.value
        raise AssertionError("the editor opens no file dialog")

    def run(self, timeout: float = 900) -> None:
        """Press Run and wait until the server is done.

        Raises:
            AssertionError: the server did not take the workflow, or it failed.
        """
        before = set(self.server.get_json("/history"))
        self.press_run()
        deadline = time.monotonic() + timeout
        while not (new := set(self.server.get_json("/history")) - before):
            assert time.monotonic() < deadline, f"not done after {timeout:.0f} s"
            self.page.wait_for_timeout(200)
        (prompt,) = new
        status = self.server.get_json(f"/history/{prompt}")[prompt]["status"]
        assert status["status_str"] == "success", status
        self.page.wait_for_timeout(_SETTLED_MS)

    def press_run(self) -> None:
        self.page.get_by_test_id("queue-button").click()

    def text_on(self, node_type: str) -> str | None:
        """What a node of this type shows under its fields, or None."""
        script = """([type, widget]) => window.app.graph.nodes.filter(node => node.type === type)
            .flatMap(node => node.widgets ?? []).find(found => found.name === widget)?.value"""
        return self.page.evaluate(script, [node_type, _TEXT_ON_NODE])

    def wait_for_text(self, node_type: str, part: str, timeout: float = 120) -> str:
        """What a node shows once it has ``part`` in it."""
        deadline = time.monotonic() + timeout
        while part not in (text := self.text_on(node_type) or ""):
            assert time.monotonic() < deadline, f"{node_type} shows {text!r}, not {part!r}"
            self.page.wait_for_timeout(100)
        return text

    def nodes(self) -> list[Mapping[str, Any]]:
        """The nodes on the canvas, without notes: ``type``, ``title``, ``values`` by widget, ``missing``."""
        script = """() => window.app.graph.nodes.filter(node => !node.isVirtualNode).map(node => ({
            type: node.type, title: node.title, missing: !LiteGraph.registered_node_types[node.type],
            values: Object.fromEntries((node.widgets ?? []).map(widget => [widget.name, widget.value]))}))"""
        found: list[Mapping[str, Any]] = self.page.evaluate(script)
        return found

    def texts(self, node_types: Sequence[str]) -> list[list[str]]:
        """What is written on nodes of each type: title, labels of inputs, outputs and fields."""
        script = """types => types.map(type => {
            const node = window.app.graph.nodes.find(node => node.type === type);
            const label = slot => slot.label ?? slot.localized_name ?? slot.name;
            return [node.title, ...[...node.inputs ?? [], ...node.outputs ?? [], ...node.widgets ?? []].map(label)];
        })"""
        found: list[list[str]] = self.page.evaluate(script, node_types)
        return found

    def pictures_on(self, node_type: str) -> int:
        """How many pictures the nodes of a type show."""
        script = """type => window.app.graph.nodes.filter(node => node.type === type)
            .reduce((sum, node) => sum + (node.imgs?.length ?? 0), 0)"""
        return int(self.page.evaluate(script, node_type))

    def wait_for_picture(self, node_type: str, timeout: float = 30) -> None:
        """Wait until a node of a type shows a picture; it is drawn some time after the run."""
        deadline = time.monotonic() + timeout
        while not self.pictures_on(node_type):
            assert time.monotonic() < deadline, f"{node_type} shows no picture"
            self.page.wait_for_timeout(100)

    def templates(self, pack: str) -> dict[str, bool]:
        """A pack's workflows in the template browser, and whether the picture of each is there."""
        self.page.get_by_text("Templates").first.click()
        self.page.get_by_role("dialog").get_by_text(pack, exact=True).click()
        found: dict[str, bool] = {}
        cards = self.page.locator('[data-testid^="template-workflow-"]:has(img)')
        cards.first.hover()
        for _ in range(10):  # cards are there while they are in view
            # By name, and all at once: the editor makes cards and takes them away, and the one in a place is another.
            for test_id in cards.evaluate_all("cards => cards.map(card => card.dataset.testid)"):
                name = test_id.removeprefix("template-workflow-")
                found[name] = found.get(name, False) or self._has_own_picture(self.page.get_by_test_id(test_id))
            self.page.mouse.wheel(0, 300)
            self.page.wait_for_timeout(_SETTLED_MS)
        return found

    def click_node(self, node_type: str) -> None:
        """Click on a node's title."""
        script = """type => {
            const node = window.app.graph.nodes.find(node => node.type === type);
            const view = window.app.canvas.ds, canvas = window.app.canvas.canvas.getBoundingClientRect();
            return [canvas.x + (node.pos[0] + 60 + view.offset[0]) * view.scale,
                    canvas.y + (node.pos[1] - 12 + view.offset[1]) * view.scale];
        }"""
        self.page.mouse.click(*self.page.evaluate(script, node_type))
        self.page.wait_for_timeout(_SETTLED_MS)

    def _has_own_picture(self, card: Locator) -> bool:
        """The editor's stand-in for a missing picture has another size."""
        picture = card.locator("img").first.element_handle()
        try:
            self.page.wait_for_function("([img, side]) => img.naturalWidth === side", arg=[picture, SIDE], timeout=2000)
        except PlaywrightTimeout:
            return False
        return True

    def read_help(self, node_type: str) -> str:
        """Ask for a node's help page, and wait until its picture is there; the text of the page."""
        self.click_node(node_type)
        if not self._help().is_visible():
            self.page.get_by_test_id("info-button").click()
        picture = self._help().locator(f'img[src*="/{node_type}/"]').first
        picture.wait_for()
        self.page.wait_for_function("picture => picture.naturalWidth > 0", arg=picture.element_handle())
        return self._help().inner_text()

    def _help(self) -> Locator:
        return self.page.locator(".node-help-content")

    def choose_language(self, name: str) -> None:
        """Choose a language, by its own name, in the settings."""
        self.page.keyboard.press("Control+,")
        self.page.get_by_placeholder("Search Settings...").fill("language")
        self.page.wait_for_timeout(_SETTLED_MS)
        self.page.get_by_role("combobox").last.click()
        with self.page.expect_response(lambda answer: answer.url.endswith("/settings/Comfy.Locale")):
            self.page.get_by_role("option", name=name, exact=True).click()
        self.page.reload()
        self._wait_until_ready()

    def find(self, words: str, title: str, first: bool = False, timeout: float = 30) -> list[str]:
        """Type into the search that a double click on the empty canvas opens, until a node is found; the nodes' names.

        Args:
            words: that are typed.
            title: of the node.
            first: wait until it is the first of those that are found.
            timeout: seconds for that; after it the names are those that are there.

        Raises:
            PlaywrightTimeout: it is not.
        """
        size = self.page.viewport_size
        assert size is not None
        self._open_search(size["width"] / 2, size["height"] * 0.96)
        self.page.keyboard.type(words)
        options = self.page.get_by_role("option")
        options.filter(has_text=title).first.wait_for()
        names, deadline = self._names_in(options), time.monotonic() + timeout
        while title not in (names[:1] if first else names) and time.monotonic() < deadline:
            self.page.wait_for_timeout(100)
            names = self._names_in(options)
        self.page.keyboard.press("Escape")
        self.page.wait_for_timeout(_SETTLED_MS)  # or what is typed next goes into the box that is closing
        return names

    def _names_in(self, options: Locator) -> list[str]:
        return [text.split("\n")[0] for text in options.all_inner_texts()]

    def _open_search(self, x: float, y: float, tries: int = 5) -> None:
        """Double click there; again if nothing comes of it, as happens while the canvas is being drawn."""
        for left in reversed(range(tries)):
            self.page.mouse.dblclick(x, y)
            try:
                self.page.get_by_role("combobox").first.wait_for(timeout=4000)
                return
            except PlaywrightTimeout:
                if not left:
                    raise

    def screenshot(self, path: Path) -> None:
        self.page.screenshot(path=path)
