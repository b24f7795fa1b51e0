"""Which browser the tests of the editor start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dev.browser import find_browser

pytestmark = pytest.mark.skipif(os.name == "nt", reason="the programs here are shell scripts")


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes a program on a PATH that has nothing else."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def make(name: str, script: str) -> str:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return str(path)

    return make


def test_the_first_on_the_path_is_taken(program) -> None:
    program("google-chrome", "echo Chrome 1")
    wanted = program("chromium", "echo Chromium 1")
    assert find_browser(python=program("python", "exit 1")) == wanted


def test_one_that_does_not_run_is_passed_over(program) -> None:
    """Ubuntu's chromium-browser is a script that asks for a snap."""
    program("chromium-browser", "echo 'requires the chromium snap' >&2; exit 1")
    wanted = program("google-chrome", "echo Chrome 1")
    assert find_browser(python=program("python", "exit 1")) == wanted


def test_without_one_on_the_path_playwrights_own_is_taken(program) -> None:
    wanted = program("chrome-of-playwright", "echo Chromium 1")
    assert find_browser(python=program("python", f"echo {wanted}")) == wanted


def test_playwrights_own_counts_only_when_it_is_installed(program) -> None:
    assert find_browser(python=program("python", "echo /nowhere/chrome")) is None
