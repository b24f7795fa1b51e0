"""Reading and writing files: never half of one, never something that is no file, private unless a person shares it."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import filelock

from .messages import message, printable
from .terminal import quoted

TEMPORARY_SUFFIX = ".onediff-part"
"""Of files that are being written. What crashed writers left is removed: nobody else's may have such a name."""

_LONGEST_NAME = 200
"""Bytes of a name: file systems take 255, less what is added to it."""
_PRIVATE_FILE = 0o600
_PRIVATE_FOLDER = 0o700
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
OTHERS_ANYTHING = stat.S_IRWXG | stat.S_IRWXO
"""Rights that a file may have to be refused for, as mode bits."""

# A FIFO that nobody writes to would hold whoever opens it for ever, a terminal could become ours.
_READ = (
    os.O_RDONLY
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_NOCTTY", 0)
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
)


class NotPrivate(PermissionError):
    """Other users of this machine own a file or folder of ours, or have rights to it."""


@contextlib.contextmanager
def open_regular(path: Path, limit: int, forbidden: int = 0) -> Iterator[tuple[BinaryIO, int]]:
    """Yield a regular file, to be read, and its size. What is opened is what is judged: nothing can come in between.

    Args:
        path: of a regular file, or of a link to one.
        limit: bytes that it may have.
        forbidden: rights of others that it must not have, as mode bits; if any, it must be ours as well.

    Raises:
        NotPrivate: others own it or have such rights to it.
        OSError: it is missing, a folder, a pipe or a device, or longer than ``limit``.
    """
    try:
        descriptor = os.open(path, _READ)
    except ValueError as error:
        raise OSError(message("no file can have the name {path}", path=printable(str(path)))) from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise OSError(message("{path} is not a regular file", path=path))
    with os.fdopen(descriptor, "rb") as file:
        if forbidden:
            _refuse_rights(path, status, forbidden)
        if status.st_size > limit:
            raise OSError(message("{path} is larger than {limit} MB", path=path, limit=limit >> 20))
        yield file, status.st_size


def read_regular(path: Path, limit: int, forbidden: int = 0) -> bytes:
    """Return the content of a regular file; as ``open_regular``.

    Raises:
        OSError: also, it was written to meanwhile.
    """
    with open_regular(path, limit, forbidden) as (file, size):
        content = file.read(size + 1)
        if len(content) > size:  # of a file that grows without end, too
            raise OSError(message("{path} was written to while it was read", path=path))
        return content


def _refuse_rights(path: Path, status: os.stat_result, forbidden: int) -> None:
    """Refuse what others own or have rights to. Root may use what any user owns: containers are run like that."""
    if os.name != "posix":  # elsewhere a person's folders are private by other means
        return
    if status.st_uid not in (0, os.geteuid()) and os.geteuid() != 0:
        raise NotPrivate(message("{path} belongs to another user; remove it, or take it over", path=path))
    if status.st_mode & forbidden:
        raise NotPrivate(
            message(
                "other users of this machine have access to {path} (mode {mode}); run: {command}",
                path=path,
                mode=f"{stat.S_IMODE(status.st_mode):o}",
                command=f"chmod go-rwx {quoted(path.absolute())}",
            )
        )


def check_name(name: str) -> None:
    """Refuse what no file can be named, before there is anything to write.

    Args:
        name: as a person gives it: may name folders too.

    Raises:
        ValueError: says what to change.
    """
    if not name.isprintable():
        raise ValueError(
            message(
                "{name} has characters that names of files cannot have; use letters, digits and spaces",
                name=printable(name),
            )
        )
    longest = max(len(part.encode()) for part in name.split("/"))
    if longest > _LONGEST_NAME:
        raise ValueError(
            message("a name of {length} characters is too long for a file; use a shorter one", length=longest)
        )


def private_lock(path: Path, timeout_s: float = -1) -> filelock.BaseFileLock:
    """Return a lock between processes that no other user can hold. It goes with the process, however that ends.

    Args:
        path: of the lock's file.
        timeout_s: how long to wait for it; for ever, if negative.

    Raises:
        OSError: its folder cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    return filelock.FileLock(path, timeout=timeout_s, mode=_PRIVATE_FILE)


def private_folder(path: Path) -> Path:
    """Make a folder that no other user can write to or put another in the place of, or find that it is one.

    Returns:
        Its path without links, so that none of them can lead elsewhere later.

    Raises:
        NotPrivate: others could change it, or a folder that it is in.
        OSError: it cannot be made, or is a link.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=_PRIVATE_FOLDER)
    path = path.parent.resolve(strict=True) / path.name
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=_PRIVATE_FOLDER)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise OSError(message("{path} is not a folder", path=path))
    _refuse_rights(path, status, OTHERS_ANYTHING)
    for folder in (path, *path.parents):
        _refuse_exchangeable(folder)
    return path


def ours_alone(folder: Path) -> bool:
    """Return True if no other user can put anything into a folder, or another folder in its place."""
    try:
        for place in (folder, *folder.parents):
            _refuse_exchangeable(place)
            if place.is_symlink():
                return False
        return folder.is_dir() and not folder.lstat().st_mode & stat.S_ISVTX
    except OSError:
        return False


def _refuse_exchangeable(folder: Path) -> None:
    """Refuse a folder in which other users can rename what is ours: unlike a file, also where we are root."""
    if os.name != "posix":
        return
    status = folder.lstat()
    if status.st_uid not in (0, os.geteuid()):
        raise NotPrivate(message("{path} belongs to another user; remove it, or take it over", path=folder))
    if not status.st_mode & stat.S_ISVTX:  # in a sticky folder only a file's owner renames it
        _refuse_rights(folder, status, OTHERS_WRITE)


def write_atomically(path: Path, content: bytes, modified_ns: int | None = None) -> None:
    """Write ``content`` to ``path``: afterwards it is there whole, or what was there before still is.

    Only this user may read it, whatever the umask: whoever wants to share a file says so.

    Args:
        path: where it is to be.
        content: all of it.
        modified_ns: when it is said to have been written, nanoseconds since the epoch; None for now.

    Raises:
        OSError: the disk is full, the folder is read-only, ...; nothing is left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _passing_name(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    try:
        with os.fdopen(os.open(temporary, flags, _PRIVATE_FILE), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if modified_ns is not None:
            with contextlib.suppress(OSError):  # of a file system without: what it says by itself is right, most often
                os.utime(temporary, ns=(modified_ns, modified_ns))
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    _sync_folder(path.parent)


def remove_judged(path: Path, judged: Callable[[Path], bool]) -> bool:
    """Remove a file, unless it is another by now than the one that is to go: others write to our folders too.

    Args:
        path: of the file.
        judged: tells of the file at a path whether it is the one; asked again once nobody else can replace it.

    Returns:
        Whether it was removed.

    Raises:
        OSError: it is gone already, or cannot be removed.
    """
    if not judged(path):
        return False
    aside, is_the_one = _passing_name(path), False
    path.rename(aside)
    try:
        is_the_one = judged(aside)
    finally:
        if not is_the_one:
            _put_back(aside, path)
    aside.unlink(missing_ok=True)  # whoever clears away what crashed writers left may have been quicker
    return is_the_one


def file_version(path: Path) -> tuple[int, int, int]:
    """Return when a file was written, its size and its place on the disk: another of its name differs in one.

    Raises:
        OSError: it is missing.
    """
    status = path.stat()
    return status.st_mtime_ns, status.st_size, status.st_ino


def of_version(version: tuple[int, int, int]) -> Callable[[Path], bool]:
    """Return what tells whether the file at a path is of this version."""
    return lambda path: file_version(path) == version


def _put_back(aside: Path, path: Path) -> None:
    """Give a file its name back, unless there is a newer one of that name."""
    try:
        os.link(aside, path)
    except FileExistsError:
        pass
    except OSError:  # a file system without links
        if not os.path.lexists(path):
            aside.rename(path)
    aside.unlink(missing_ok=True)


def _passing_name(path: Path) -> Path:
    """Return a name beside ``path`` for a moment."""
    # Short, because path may already be as long as names may be; unique, because others write too.
    return path.parent / f".{os.getpid()}-{secrets.token_hex(6)}{TEMPORARY_SUFFIX}"


def _sync_folder(folder: Path) -> None:
    """Make the rename itself survive a power cut, where the system lets us."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
