"""Where Inductor and Triton keep machine code, and look for it before they make it: a folder that is ours alone.

PyTorch's own choice is a folder under the temporary one that is named by the user: anybody on the machine can make it
first, and what lies in it under the right name runs. Ours is private (``files.private_folder``), unless a person chose
one with ``TORCHINDUCTOR_CACHE_DIR``. PyTorch is told by environment variables, which are as they were afterwards. By
then everything that a graph needs is loaded: Inductor waits for its kernels when it imports the code that calls them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ...environment import environment
from ...files import ours_alone, private_folder, read_regular, write_atomically
from ...folders import cache_folder
from ...messages import Message, message

_INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"
_TRITON = "TRITON_CACHE_DIR"
_OWN = "onediff-machine-code"
"""Its name: it is emptied without a question, and a person may have chosen a folder for the cache that has others."""
_LARGEST = 4 << 30
"""Bytes that our own folder may take; beyond it everything goes, and what is needed is written again."""

log = logging.getLogger(__name__)


@contextlib.contextmanager
def in_code_folder() -> Iterator[Path]:
    """Inside, Inductor and Triton keep machine code in the folder that this yields, from one process to the next."""
    chosen = _chosen(_INDUCTOR)
    folder = Path(chosen) if chosen else _own_folder()
    with environment().overridden({_INDUCTOR: str(folder), _TRITON: _chosen(_TRITON) or str(folder / "triton")}):
        yield folder


@contextlib.contextmanager
def in_new_code_folder() -> Iterator[Path]:
    """Inside, Inductor and Triton keep machine code in an empty folder, which is gone afterwards."""
    from torch._inductor.utils import clear_caches

    with tempfile.TemporaryDirectory(prefix="onediff-", ignore_cleanup_errors=True) as folder:
        clear_caches()  # or what is known from elsewhere would not be written here
        try:
            with environment().overridden({_INDUCTOR: folder, _TRITON: os.path.join(folder, "triton")}):
                yield Path(folder)
        finally:
            clear_caches()


def put_code(path: Path, code: bytes) -> None:
    """Make the file hold exactly these bytes, whatever is there.

    Raises:
        OSError: it cannot be written.
    """
    try:
        if not path.is_symlink() and read_regular(path, len(code)) == code:
            return
    except OSError:
        pass  # none, another, or no file at all: all are replaced
    write_atomically(path, code)


def headers_are_ours() -> bool:
    """Return False if another user could have put compiled headers where PyTorch looks for them: what is in them runs.

    It looks in its own choice of folder, wherever it is told to keep everything else.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    folder = Path(default_cache_dir(), "precompiled_headers")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return ours_alone(folder)
    except OSError:
        return False


def unusable() -> Message | None:
    """Why Inductor, which writes every kernel to a folder, cannot; known before minutes of work."""
    folder = _chosen(_INDUCTOR) or str(_own_folder())
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return message(
            "its cache folder {folder} cannot be written to ({error}); "
            "make it writable or set TORCHINDUCTOR_CACHE_DIR to a folder that is",
            folder=folder,
            error=error.strerror or error,
        )


def _chosen(variable: str) -> str | None:
    """Return the folder that a person chose. Jobs set the variables for a while, and PyTorch to its own choice."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    value = environment().get(variable)
    default = Path(default_cache_dir())
    if not value or default in (path := Path(os.path.abspath(value)), *path.parents):
        return None
    return str(path)


def empty_own_folder() -> None:
    """Remove everything from our own folder: something in it is damaged. What is needed is written again."""
    if not _chosen(_INDUCTOR):
        _empty(_own_folder())


def _own_folder() -> Path:
    """Return our private folder; where there can be none, one for this process only."""
    folder = cache_folder() / _OWN
    try:
        made = private_folder(folder)
    except OSError as error:
        return _passing(folder, str(error))
    _make_room(made)
    return made


@functools.cache
def _make_room(folder: Path) -> None:
    """Empty the folder if it has grown too large; looked at once in a process."""
    size = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # another process may remove it meanwhile
            size += path.lstat().st_size
    if size > _LARGEST:
        _empty(folder)


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()


@functools.cache
def _passing(folder: Path, problem: str) -> Path:
    log.warning(
        "OneDiff: machine code cannot be kept in %s (%s); loading compiled graphs takes some seconds longer",
        folder,
        problem,
    )
    return Path(_until_the_end().name)


@functools.cache
def _until_the_end() -> tempfile.TemporaryDirectory[str]:
    """Make a folder that goes when the process ends."""
    return tempfile.TemporaryDirectory(prefix="onediff-", ignore_cleanup_errors=True)
