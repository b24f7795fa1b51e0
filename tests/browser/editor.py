"""ComfyUI's editor in a browser, used as a person uses it: keys, clicks, files. Only looking goes through scripts."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from playwright.sync_api import Page

from dev.host import ComfyServer
from dev.workflow_files import editor_form
from dev.workflows import Workflow

_READY_MS = 60_000
_SETTLED_MS = 800
_TEXT_ON_NODE = "$$node-text-preview"  # the widget in which the editor shows what send_progress_text says


class Editor:
    """One open page.

    Attributes:
        page: Playwright's.
        errors: script errors of the page so far.
    """

    def __init__(self, page: Page, server: ComfyServer) -> None:
        self.page, self._server = page, server
        self.errors: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.goto(server.url)
        page.wait_for_function("window.app && window.app.graph && window.app.vueAppReady", timeout=_READY_MS)
        page.wait_for_timeout(_SETTLED_MS)
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
        self.open_text(json.dumps(editor_form(workflow, self._server.get_json("/object_info"))))

    def open_text(self, text: str) -> None:
        """Open a file with this text, through the editor's own file dialog."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "opened.json"
            file.write_text(text, encoding="utf-8")
            with self.page.expect_file_chooser() as chooser:
                self.page.keyboard.press("Control+o")
            chooser.value.set_files(file)
            self.page.wait_for_timeout(_SETTLED_MS)
            self.close_dialogs()

    def run(self, timeout: float = 300) -> None:
        """Press Run and wait until the server is done.

        Raises:
            AssertionError: the server did not take the workflow, or it failed.
        """
        before = set(self._server.get_json("/history"))
        self.press_run()
        deadline = time.monotonic() + timeout
        while not (new := set(self._server.get_json("/history")) - before):
            assert time.monotonic() < deadline, f"not done after {timeout:.0f} s"
            self.page.wait_for_timeout(200)
        (prompt,) = new
        status = self._server.get_json(f"/history/{prompt}")[prompt]["status"]
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
        """The nodes on the canvas: ``type``, ``title``, ``values`` by widget name, ``missing`` where unknown."""
        script = """() => window.app.graph.nodes.map(node => ({
            type: node.type, title: node.title, missing: !LiteGraph.registered_node_types[node.type],
            values: Object.fromEntries((node.widgets ?? []).map(widget => [widget.name, widget.value]))}))"""
        found: list[Mapping[str, Any]] = self.page.evaluate(script)
        return found

    def images(self) -> int:
        """How many pictures the nodes show."""
        script = "() => window.app.graph.nodes.reduce((sum, node) => sum + (node.imgs?.length ?? 0), 0)"
        return int(self.page.evaluate(script))

    def fit(self) -> None:
        """Show the whole workflow."""
        self.page.keyboard.press(".")
        self.page.wait_for_timeout(_SETTLED_MS)

    def screenshot(self, path: Path) -> None:
        self.page.screenshot(path=path)
