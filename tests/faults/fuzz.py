"""Reads mutated files with every command that reads one, in a process of its own; prints what came of it, as JSON.

python tests/faults/fuzz.py FOLDER FIRST LAST
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "faults")]

from mutations import mutated  # noqa: E402
from test_store import KEY, GraphStore, Trust, make_artifact  # noqa: E402

from onediff_comfy.__main__ import main  # noqa: E402
from onediff_comfy.store.store import default_store  # noqa: E402

_SECONDS = 20  # of one command, before it counts as one that hangs


def commands(file: Path, out: Path) -> list[list[str]]:
    """Every command that reads a file of graphs, with what it prints for people and for programs."""
    kept = KEY[:12]
    return [
        ["list"], ["list", "--json"], ["verify"], ["verify", "--json"], ["show", kept], ["show", "--json", kept],
        ["show", str(file)], ["show", "--json", str(file)], ["export", kept, str(out)], ["import", str(file)],
        ["import", "--trust", str(file)],
    ]  # fmt: skip


def read(arguments: list[str]) -> tuple[int, str]:
    """The exit status of a command, and everything that it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        status = main(["graphs", *arguments])
    return status, printed.getvalue()


def problem_of(arguments: list[str]) -> str | None:
    """What is wrong with how a command ended, if anything is."""
    signal.alarm(_SECONDS)
    try:
        status, printed = read(arguments)
    except BaseException:  # which a person would see as a traceback, or as a process that had to be ended
        return traceback.format_exc(limit=-3)
    finally:
        signal.alarm(0)
    if status not in (0, 1):
        return f"exit status {status}"
    if any(not character.isprintable() and character != "\n" for character in printed):
        return f"printed what a terminal acts on: {printed[:300]!r}"
    return None


def outside(folder: Path) -> set[str]:
    """Everything beside the folders that may be written to."""
    return {str(path) for path in folder.rglob("*") if path.relative_to(folder).parts[0] not in ("cache", "config")}


def fuzz(folder: Path, first: int, last: int) -> dict[str, Any]:
    os.environ.update(ONEDIFF_CACHE_DIR=str(folder / "cache" / "deep"), ONEDIFF_CONFIG_DIR=str(folder / "config"))
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(TimeoutError("it hangs")))
    trust = Trust(folder / "config")
    path = GraphStore(folder / "cache" / "deep", trust).save(make_artifact())
    content, sound = path.read_bytes(), path.with_name(f"{'6' * 64}.graph")
    file, out = folder / "some.graph", folder / "out.graph"
    file.touch()
    out.touch()
    before = outside(folder)
    problems, calls, refused, slowest = [], 0, 0, 0.0
    for number in range(first, last):
        changed = mutated(content, number, trust.seal)
        (folder / "config" / "trusted.json").unlink(missing_ok=True)
        for arguments in commands(file, out):
            path.write_bytes(changed)
            file.write_bytes(changed)
            begun = time.monotonic()
            problem = problem_of(arguments)
            slowest = max(slowest, time.monotonic() - begun)
            calls += 1
            if problem:
                problems.append(f"{number} {arguments}: {problem}")
        path.write_bytes(changed)
        found = default_store().find(KEY)
        refused += found is None
        if found is not None and set(found.data) != set(found.manifest.parts):
            problems.append(f"{number}: other parts than the manifest's")
        assert not sound.exists()
    if outside(folder) != before:
        problems.append(f"written outside: {outside(folder) - before}")
    return {
        "files": last - first,
        "calls": calls,
        "refused": refused,
        "problems": problems,
        "slowest": slowest,
        "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }


if __name__ == "__main__":
    print(json.dumps(fuzz(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))  # noqa: T201
