"""The browser that tests of the editor and the workflows' thumbnails start: a Chromium of this machine.

``python -m dev.browser`` prints its path.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
"""What Chromium and Chrome are called on a PATH, in the order in which they are tried."""

NO_BROWSER = "no Chromium or Chrome on the PATH; install one (apt install chromium), or python -m playwright install"
"""Why a test of the editor is skipped."""

LAUNCH_ARGUMENTS = ("--no-sandbox",)
"""For playwright's ``launch``: root, and most containers, have no user namespaces to make the sandbox from."""

_PLAYWRIGHTS = """
from playwright.sync_api import sync_playwright
with sync_playwright() as playwright:
    print(playwright.chromium.executable_path)
"""
_ANSWER_SECONDS = 30


def find_browser(python: str = sys.executable) -> str | None:
    """The program to start, from the PATH or else playwright's own; None where there is none that runs.

    Args:
        python: the interpreter whose playwright is asked for the browser that it has installed.
    """
    return next((program for program in _candidates(python) if _output_of([program, "--version"])), None)


def _candidates(python: str) -> Iterator[str]:
    yield from filter(None, map(shutil.which, NAMES))
    # In a process of its own: playwright refuses a second instance beside one that runs.
    installed = _output_of([python, "-c", _PLAYWRIGHTS])
    if installed:
        yield installed


def _output_of(command: list[str]) -> str | None:
    """What a program prints, or None if it is not there, fails or says nothing, as Ubuntu's stand-in for a snap."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


if __name__ == "__main__":
    print(find_browser() or NO_BROWSER)
