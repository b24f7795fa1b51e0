"""A real browser for ComfyUI's editor; pictures of what it showed are kept in .cache/screenshots."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from editor import Editor
from playwright.sync_api import Browser

from dev.browser import NO_BROWSER, find_browser
from dev.editor import chromium
from dev.environment import repository
from dev.host import ComfyServer

SCREENSHOTS = repository() / ".cache" / "screenshots"
WINDOW = {"width": 1600, "height": 1000}


@pytest.fixture(scope="module")  # playwright allows one of itself in a process, and other tests start their own
def browser() -> Iterator[Browser]:
    """Headless Chromium."""
    if find_browser() is None:
        pytest.skip(NO_BROWSER)
    with chromium() as started:
        yield started


@pytest.fixture(scope="session")
def server(start_server: Callable[..., ComfyServer]) -> Iterator[ComfyServer]:
    """The server of this folder. Its graphs are removed and its language changes, so it is not that of tests/host."""
    with start_server() as running:
        yield running


@pytest.fixture
def open_editor(
    browser: Browser, server: ComfyServer, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Editor]]:
    """Opens the shared server's editor as a new person's browser does. A script error of the page fails the test."""
    with _editors(browser, server, request.node.name) as open_:
        yield open_


@pytest.fixture(scope="module")
def open_for_all(
    browser: Browser, server: ComfyServer, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Editor]]:
    """The same, for what several tests of a module look at. A script error fails the last of them."""
    with _editors(browser, server, Path(request.node.name).stem) as open_:
        yield open_


@contextlib.contextmanager
def _editors(browser: Browser, server: ComfyServer, name: str) -> Iterator[Callable[..., Editor]]:
    opened: list[Editor] = []

    def open_(of: ComfyServer = server) -> Editor:
        context = browser.new_context(viewport=WINDOW, locale="en")
        opened.append(Editor(context.new_page(), of))
        return opened[-1]

    yield open_
    for number, editor in enumerate(opened):
        editor.screenshot(_file(name, number))
        editor.page.context.close()
    assert [error for editor in opened for error in editor.errors] == []


def _file(test: str, number: int) -> Path:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    readable = "".join(c if c.isalnum() else "-" for c in test).strip("-")
    return SCREENSHOTS / (f"{readable}.png" if number == 0 else f"{readable}-{number}.png")
