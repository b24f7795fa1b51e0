"""Processes that others started, and that should have ended with them."""

from __future__ import annotations

import time

import psutil

WAIT = 10.0  # seconds after which one goes on


def has_ended(pid: int) -> bool:
    """Return True once a process does not run any more. One that goes on is ended here, too late."""
    try:
        process, deadline = psutil.Process(pid), time.monotonic() + WAIT
        # One that ended and was not collected by its parent does not run.
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > deadline:
                process.kill()
                return False
            time.sleep(0.02)
    except psutil.NoSuchProcess:
        pass
    return True
