"""host/process/compile_worker.py: it stands back behind the process that makes images."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from onediff_comfy.compilation.background import Job, Outcome


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


def test_who_is_killed_while_it_writes_its_result_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever started it would take half of one for an answer."""
    compile_worker = importlib.import_module("onediff_comfy.host.process.compile_worker")
    work, result = tmp_path / "job", tmp_path / "result"
    work.write_bytes(Job(b"", "forward", False, "", {}, {}, "cpu", True, {}).to_bytes())
    monkeypatch.setattr("sys.argv", ["worker", str(work), str(result), str(os.getppid())])
    monkeypatch.setattr(compile_worker, "_stand_back", lambda _job: None)
    monkeypatch.setattr(compile_worker, "_end_with", lambda _parent: None)
    monkeypatch.setattr(compile_worker, "run", lambda _job: Outcome("written in full"))

    def killed(_descriptor: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", killed)
        with pytest.raises(KeyboardInterrupt):
            compile_worker.main()
    assert not result.exists()
    monkeypatch.setattr("sys.argv", ["worker", str(work), str(result), str(os.getppid())])
    assert compile_worker.main() == 0
    assert Outcome(**json.loads(result.read_text())) == Outcome("written in full")
