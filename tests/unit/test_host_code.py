"""The name of the host's code is that of what the host has imported."""

from __future__ import annotations

import importlib
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host of two files, and this module as a process has it that has asked for nothing yet."""
    (tmp_path / "comfy").mkdir()
    for name in ("model_management", "attention"):
        (tmp_path / "comfy" / f"{name}.py").write_text("scale = 1\n")
    for name in [name for name in sys.modules if name.partition(".")[0] == "comfy"]:
        monkeypatch.delitem(sys.modules, name)
    package, module = ModuleType("comfy"), ModuleType("comfy.model_management")
    module.__file__ = str(tmp_path / "comfy" / "model_management.py")
    package.model_management = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "comfy", package)
    monkeypatch.setitem(sys.modules, "comfy.model_management", module)
    return tmp_path / "comfy"


def _in_a_new_process() -> ModuleType:
    return importlib.reload(importlib.import_module("onediff_comfy.host.process.host_code"))


def test_an_update_of_the_host_while_it_runs_does_not_rename_what_it_runs(host: Path) -> None:
    started = _in_a_new_process()
    started.take_early()
    for thread in threading.enumerate():
        if thread.name == "onediff-host-code":
            thread.join(20)
    (host / "attention.py").write_text("scale = 2\n")
    before = started.host_code()
    assert _in_a_new_process().host_code() != before
    (host / "attention.py").write_text("scale = 1\n")
    assert _in_a_new_process().host_code() == before


def test_code_in_another_file_is_other_code(host: Path) -> None:
    before = _in_a_new_process().host_code()
    (host / "attention.py").rename(host / "samplers.py")
    assert _in_a_new_process().host_code() != before
