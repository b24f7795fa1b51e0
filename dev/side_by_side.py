"""Run one command beside others that run one after another, and say how long each took.

    python -m dev.side_by_side LOG BESIDE COMMAND...

The output of ``BESIDE`` goes to the file ``LOG`` and is printed when all are done, so that the two do not mix. The
first failure ends everything. The exit status is that of the command that failed, else 0. ``make test`` uses this:
OneFlow's tests need an environment of their own and nothing of the others.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path


def run(log: Path, beside: str, commands: Sequence[str]) -> int:
    """Run the shell command ``beside`` and, at the same time, ``commands`` in their order.

    Returns:
        The exit status of the first command that failed, of ``beside`` last; 0 if none did.
    """
    begun = time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        other = subprocess.Popen(beside, shell=True, stdout=output, stderr=output, start_new_session=True)
        try:
            status = _in_order(commands)
        except BaseException:
            _end(other)
            raise
        if status:
            _end(other)
        else:
            status = other.wait()
            print(f"\n$ {beside}\n{log.read_text(errors='replace')}", end="")
    used = os.times()
    minutes, seconds = divmod(round(time.monotonic() - begun), 60)
    cpu = used.children_user + used.children_system
    print(f"{'FAILED' if status else 'passed'} in {minutes} min {seconds} s, {cpu:.0f} s of CPU time", flush=True)
    return status


def _in_order(commands: Sequence[str]) -> int:
    for command in commands:
        begun = time.monotonic()
        status = subprocess.run(command, shell=True).returncode
        print(f"{command}: {time.monotonic() - begun:.0f} s", flush=True)
        if status:
            return status
    return 0


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command with everything that it started."""
    if os.name == "posix":
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
    else:
        process.terminate()
    process.wait()


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
