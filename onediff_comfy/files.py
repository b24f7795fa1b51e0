"""Writing files so that no reader, crash or full disk ever leaves half of one."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

TEMPORARY_SUFFIX = ".part"


def write_atomically(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path``: afterwards it is there whole, or what was there before still is.

    Raises:
        OSError: the disk is full, the folder is read-only, ...; nothing is left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Short, because path may already be as long as names may be; unique, because others write too.
    temporary = path.parent / f".{os.getpid()}-{secrets.token_hex(6)}{TEMPORARY_SUFFIX}"
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make the rename itself survive a power cut, where the system lets us."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
