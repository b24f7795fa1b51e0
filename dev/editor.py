"""ComfyUI's editor in a headless browser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, Page, sync_playwright

from .browser import LAUNCH_ARGUMENTS, NO_BROWSER, find_browser
from .host import ComfyServer

_TIMEOUT = 120_000  # milliseconds; a first start on a slow machine

# Without what would stand over the graph: the greeting of a first start, the map, the figures in the corner.
_SETTINGS = {
    "Comfy.TutorialCompleted": True,
    "Comfy.Minimap.Visible": False,
    "Comfy.Graph.CanvasInfo": False,
    "Comfy.Graph.CanvasMenu": False,
    "Comfy.NodeBadge.NodeSourceBadgeMode": "None",
}


@contextmanager
def chromium() -> Iterator[Browser]:
    """A headless browser of this machine.

    Raises:
        RuntimeError: there is none.
    """
    program = find_browser()
    if program is None:
        raise RuntimeError(NO_BROWSER)
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=list(LAUNCH_ARGUMENTS))
        yield started
        started.close()


@contextmanager
def editor(server: ComfyServer) -> Iterator[Page]:
    """A page with the editor of a running server, ready for ``app.loadGraphData``.

    Raises:
        RuntimeError: there is no browser.
    """
    settings = server.base_dir / "user" / "default" / "comfy.settings.json"
    settings.parent.mkdir(parents=True, exist_ok=True)
    settings.write_text(json.dumps(_SETTINGS))
    with chromium() as browser:
        page = browser.new_page()
        page.goto(server.url, timeout=_TIMEOUT)
        page.wait_for_function("window.app?.extensionManager && app.canvas?.graph", timeout=_TIMEOUT)
        yield page
