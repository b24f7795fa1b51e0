"""What all tests share: figures that a run should end with, kernels that an earlier test has compiled, idle threads."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_REPOSITORY = Path(__file__).parent.parent
# Threads that wait for each other are to sleep, not to spin: where something else wants a core too, spinning made
# a tiny model ten times slower. OpenMP reads it when PyTorch is imported, so it is set before anything does that.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Captures for all sizes reason about symbols by sympy, which remembers a thousand results unless it is told otherwise.
os.environ.setdefault("SYMPY_CACHE_SIZE", "100000")
if shutil.which("g++") and os.name == "posix":  # every process that a test starts inherits it
    os.environ.setdefault("CXX", str(_REPOSITORY / "dev" / "cached-g++"))
    os.environ.setdefault("CACHED_CXX_DIR", str(_REPOSITORY / ".cache" / "kernels"))

# What is found out about graphs is remembered in the user's folders. A test that read there what an earlier state of
# the code had found would fail for no reason of this one's; and what tests find is not for the user.
_OWN_FOLDERS = tempfile.TemporaryDirectory(prefix="onediff-tests-")
os.environ["ONEDIFF_CACHE_DIR"] = str(Path(_OWN_FOLDERS.name) / "cache")
os.environ["ONEDIFF_CONFIG_DIR"] = str(Path(_OWN_FOLDERS.name) / "config")

with contextlib.suppress(ImportError):  # OneFlow's environment has none
    from hypothesis import HealthCheck, settings

    # What an example takes is not what is tested: beside other work one of a few milliseconds may take a second.
    settings.register_profile("in any time", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("in any time")

pytest_plugins = ["servers", "fleets"]  # of tests/host, one server for these and the browser's; of tests/fleet

_TALLY = pytest.StashKey[list[str]]()


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Spread the tests by what they share. (xdist's own groups do nothing under pytest 9.2.)"""
    from spreading import ByWhatIsShared  # needs xdist

    return ByWhatIsShared(config, log) if config.getvalue("dist") == "loadscope" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the tests as one of several processes takes them."""
    if hasattr(config, "workerinput"):
        from spreading import turn

        items.sort(key=lambda item: turn(item.path))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep pytest's own costs out of captures.

    What is imported by now is left out when garbage is looked for: a seventh of what a capture takes. And pytest
    listens to loggers that pass nothing on. PyTorch writes records of all that it traces for whoever listens to this
    one, a tenth of a capture.
    """
    gc.freeze()
    logging.getLogger("torch.__trace").propagate = True


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Have each test draw the same random numbers in every run, whatever ran before it, its fixtures too."""
    seed = zlib.crc32(item.nodeid.encode())
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


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
