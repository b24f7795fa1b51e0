"""host/process/compile_worker.py: it stands back behind the process that makes images."""

from __future__ import annotations

import importlib
import os
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.mark.parametrize(("device", "allowed", "threads"), [("cuda:0", 16, "4"), ("cuda:0", 2, "1"), ("cpu", 16, None)])
def test_compilers_take_a_quarter_of_the_cores_that_this_process_may_use(
    device: str, allowed: int, threads: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_worker = importlib.import_module("onediff_comfy.host.process.compile_worker")

    nice = list[int]()
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "")  # what is set in the test goes with it
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(allowed)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "nice", nice.append, raising=False)
    job: Any = SimpleNamespace(device=device)
    compile_worker._stand_back(job)
    assert os.environ.get("TORCHINDUCTOR_COMPILE_THREADS") == threads
    assert nice == [5 if device == "cpu" else 19]
