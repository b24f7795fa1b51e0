"""ComfyUI's own editor through the gateway, in a real browser: queue, progress, picture, interrupt."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from editor import Editor
from fleets import Fleet, picture
from playwright.sync_api import Browser, Page

from dev.browser import NO_BROWSER, find_browser
from dev.editor import chromium

_LONG = 400  # steps: half a minute, of which the test sees the first


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Headless Chromium."""
    if find_browser() is None:
        pytest.skip(NO_BROWSER)
    with chromium() as started:
        yield started


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A new person's page."""
    context = browser.new_context(viewport={"width": 1600, "height": 1000}, locale="en")
    yield context.new_page()
    context.close()


def test_a_person_runs_and_stops_workflows(fleet: Fleet, page: Page) -> None:
    editor = Editor(page, fleet.gateway)
    page.evaluate(
        """() => {
            window.told = {progress: 0, queue: []};
            window.app.api.addEventListener("progress", () => window.told.progress++);
            window.app.api.addEventListener("status", event => {
                window.told.queue.push(event.detail?.exec_info?.queue_remaining);
            });
        }"""
    )
    editor.open(picture(70, steps=8))
    editor.run()
    editor.wait_for_picture("SaveImage")
    told = page.evaluate("() => window.told")
    assert told["progress"] > 1
    assert 1 in told["queue"] and told["queue"][-1] == 0

    editor.open(picture(71, steps=_LONG))
    editor.press_run()
    fleet.wait_for("prompt that runs", lambda: fleet.status()["queue"]["running"] == 1)
    page.evaluate("() => window.app.api.interrupt(null)")
    fleet.wait_for("stop", lambda: sum(fleet.status()["queue"].values()) == 0)
    *_, last = fleet.gateway.get_json("/history").values()
    assert [name for name, _ in last["status"]["messages"]][-1] == "execution_interrupted"
    assert editor.errors == []


def test_the_fleets_page_shows_its_workers(fleet: Fleet, page: Page) -> None:
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(f"{fleet.gateway.url}/fleet")
    names = [worker["name"] for worker in fleet.status()["workers"]]
    for name in names:
        page.locator("#workers td", has_text=name).first.wait_for()
    assert page.locator("#workers tr").count() == 1 + len(names)
    assert "running" in page.locator("#summary").inner_text()
    assert errors == []
