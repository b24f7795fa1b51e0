"""dev/side_by_side.py: what runs beside is not lost, and a failure of either is the whole's."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
from children import has_ended

from dev import side_by_side


def python(code: str) -> str:
    return f"{shlex.quote(sys.executable)} -c {shlex.quote(code)}"


def test_both_run_at_once_and_what_is_said_beside_comes_last(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    began, wait = tmp_path / "began", "import pathlib, time\nwhile not pathlib.Path({!r}).exists(): time.sleep(0.02)\n"
    beside = python(f"open({str(began)!r}, 'w').close(); print('beside')")
    assert side_by_side.run(tmp_path / "log", beside, [python(wait.format(str(began)) + "print('first')")]) == 0
    said = capfd.readouterr().out
    assert said.index("\nfirst\n" if not said.startswith("first") else "first\n") < said.index("\nbeside\n")
    assert said.splitlines()[-1].startswith("passed in 0 min ") and said.splitlines()[-1].endswith(" s of CPU time")


@pytest.mark.parametrize(("beside", "commands"), [(0, (0, 3, 0)), (3, (0, 0))])
def test_the_first_failure_is_the_status(
    beside: int, commands: tuple[int, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = [python(f"print('command {number}'); exit({status})") for number, status in enumerate(commands)]
    assert side_by_side.run(tmp_path / "log", python(f"exit({beside})"), run) == 3
    said = capfd.readouterr().out
    assert "\ncommand 2\n" not in said, "what comes after a failure was run"
    assert said.splitlines()[-1].startswith("FAILED in ")


def test_a_failure_ends_what_runs_beside_with_all_that_it_started(tmp_path: Path) -> None:
    began = tmp_path / "began"
    began.touch()
    beside = python(
        "import pathlib, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(began)!r}).write_text(str(child.pid))\n"
        "child.wait()"
    )
    wait = f"import pathlib, time\nwhile not pathlib.Path({str(began)!r}).read_text(): time.sleep(0.02)\nexit(1)"
    assert side_by_side.run(tmp_path / "log", beside, [python(wait)]) == 1
    assert has_ended(int(began.read_text()))
