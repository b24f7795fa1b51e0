"""The processes of a test server."""

from __future__ import annotations

import contextlib
import os
import time

import psutil

from dev.host import ComfyServer

_WORKER = "onediff_comfy.host.process.compile_worker"


def process_of(server: ComfyServer) -> psutil.Process:
    """The server's own process, a child of this one."""
    return next(child for child in psutil.Process(os.getpid()).children() if str(server.port) in _arguments(child))


def megabytes_of(process: psutil.Process) -> float:
    """Physical memory that a process holds."""
    return float(process.memory_info().rss) / 2**20


def compile_process_of(server: ComfyServer, seconds: float = 60) -> psutil.Process:
    """The process that compiles in the background for ``server``; waits until there is one."""
    host, deadline = process_of(server), time.monotonic() + seconds
    while time.monotonic() < deadline:
        for child in host.children():
            if _WORKER in _arguments(child):
                return child
        time.sleep(0.1)
    raise AssertionError("no process compiles in the background")


def outlived(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Those that still run after this long; one that ended and was not collected by its parent does not run."""
    deadline = time.monotonic() + seconds
    while (running := list(filter(_runs, processes))) and time.monotonic() < deadline:
        time.sleep(0.2)
    return running


def _arguments(process: psutil.Process) -> list[str]:
    """The command line; nothing of a process that has just ended."""
    with contextlib.suppress(psutil.Error):
        return list(process.cmdline())
    return []


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
