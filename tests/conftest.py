"""What all tests share: figures that a run should end with, kernels that an earlier test has compiled, idle threads."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_REPOSITORY = Path(__file__).parent.parent
# Threads that wait for each other are to sleep, not to spin: where something else wants a core too, spinning made
# a tiny model ten times slower. OpenMP reads it when PyTorch is imported, so it is set before anything does that.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if shutil.which("g++") and os.name == "posix":  # every process that a test starts inherits it
    os.environ.setdefault("CXX", str(_REPOSITORY / "dev" / "cached-g++"))
    os.environ.setdefault("CACHED_CXX_DIR", str(_REPOSITORY / ".cache" / "kernels"))

pytest_plugins = ["servers"]  # of tests/host; one server for these and for the browser's

_TALLY = pytest.StashKey[list[str]]()


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Say which tests share something that takes long to make, so that one process runs them all.

    What takes longest begins first: whoever is done with it takes what is left.
    """
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(_group(item)))
    if hasattr(config, "workerinput"):
        items.sort(key=_turn)


def _group(item: pytest.Item) -> str:
    """What a test shares: the server, a server of its file's, or what else its file makes."""
    fixtures = getattr(item, "fixturenames", ())
    return "server" if "server" in fixtures else f"{item.path.name}{' own_server' * ('own_server' in fixtures)}"


def _turn(item: pytest.Item) -> int:
    marker = item.get_closest_marker("xdist_group")
    assert marker is not None
    group, folder = marker.args[0], item.path.parent.name
    return ["server", "host", "package", "faults", "unit"].index("server" if "server" in group else folder)


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Adds a line to the summary at the end of the run: how often something was tried, what came out."""
    return request.config.stash.setdefault(_TALLY, []).append


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand this process's lines to the one that prints the summary."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["tally"] = session.config.stash.get(_TALLY, [])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take the lines of a process that is done."""
    lines = getattr(node, "workeroutput", {}).get("tally", [])
    node.config.stash.setdefault(_TALLY, []).extend(lines)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    lines = config.stash.get(_TALLY, [])
    if lines:
        terminalreporter.section("counted")
        for line in lines:
            terminalreporter.line(line)
