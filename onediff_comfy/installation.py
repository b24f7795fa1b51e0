"""The pack as a folder among ComfyUI's custom nodes, made from an installed wheel or a checkout.

A wheel has the parts of the pack that are no Python package of their own (``__init__.py``, ``nodes/``,
``workflows/``, …) in ``onediff_comfy/pack``; in a checkout they are beside ``onediff_comfy``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path

from . import __version__

PACK_NAME = "onediff-comfy"
"""The folder's name under ``custom_nodes``; workflows name templates and the Manager names packs by it."""

_CORE = Path(__file__).resolve().parent
_PARTS = (
    "__init__.py",
    "nodes",
    "web",
    "locales",
    "workflows",
    "pyproject.toml",
    "README.md",
    "CHANGELOG.md",
    "LICENSE",
)
_MARK = ".installed-by-onediff-comfy"
# ComfyUI loads every folder of custom_nodes but those whose names end like this.
_NOT_LOADED = ".disabled"


def install(comfyui: Path) -> Path:
    """Copy the pack into ``comfyui/custom_nodes``, in place of what an earlier call put there, and return its folder.

    Args:
        comfyui: ComfyUI's folder, or what its ``--base-directory`` names.

    Raises:
        FileNotFoundError: there is no ``custom_nodes``.
        FileExistsError: there is a pack already that this did not put there.
        OSError: it could not be written; what was there is still there.
    """
    folder = _folder(comfyui)
    _make_sure_it_is_ours(folder)
    new, aside = _beside(folder), list[Path]()
    try:
        _copy_to(new)
        while not _takes_the_place(new, folder, aside):
            pass  # another install was quicker: ours comes in place of that one
    except BaseException:  # Ctrl-C too
        _put_back(aside, folder)
        raise
    finally:
        shutil.rmtree(new, ignore_errors=True)
    for old in aside:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def uninstall(comfyui: Path) -> Path:
    """Remove what ``install`` put into ``comfyui/custom_nodes``, and return where it was.

    Raises:
        FileNotFoundError: there is no ``custom_nodes``, or no pack in it.
        FileExistsError: the pack there was not put there by ``install``.
    """
    folder = _folder(comfyui)
    _make_sure_it_is_ours(folder)
    old = _beside(folder)
    try:
        found = _set_aside(folder, old)  # no moment in which half a pack is there
    except BaseException:  # Ctrl-C too
        _put_back([old], folder)
        raise
    if not found:
        raise FileNotFoundError(f"there is no {folder}; nothing was removed")
    shutil.rmtree(old)
    return folder


def _beside(folder: Path) -> Path:
    """Return a name for a folder that ComfyUI does not load, and that no other process has."""
    return folder.with_name(f"{folder.name}-{secrets.token_hex(4)}{_NOT_LOADED}")


def _takes_the_place(new: Path, folder: Path, aside: list[Path]) -> bool:
    """Put ``new`` in the place of ``folder``. Return False if another came in between.

    Args:
        new: a whole pack.
        folder: where it belongs.
        aside: is told where what was there lies now, before it is moved there.

    Raises:
        FileExistsError: what was there was not put there by ``install``.
        OSError: it cannot be done.
    """
    _make_sure_it_is_ours(folder)
    aside.append(_beside(folder))
    _set_aside(folder, aside[-1])
    try:
        new.rename(folder)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST) or os.path.lexists(folder):  # it may be gone again by now
            return False
        raise
    return True


def _set_aside(folder: Path, old: Path) -> bool:
    """Move the pack to ``old``. Return False if there is none.

    Raises:
        FileExistsError: what was moved there was not put there by ``install``; it is to be put back.
    """
    try:
        folder.rename(old)
    except FileNotFoundError:
        return False
    # Judged where it lies now, for in its place it could be another one by the time that it is moved.
    if not _is_ours(old):
        raise _not_ours(folder)
    return True


def _put_back(aside: Sequence[Path], folder: Path) -> None:
    """Put what was set aside last into its place again, unless another is there, and remove what else is ours.

    Raises:
        FileExistsError: another is there, and what was set aside is not ours to remove; says where it lies.
    """
    for old in reversed(aside):
        if not os.path.lexists(folder):
            with contextlib.suppress(OSError):  # there was none to set aside, or another has come
                old.rename(folder)
        if not os.path.lexists(old):
            continue
        if not _is_ours(old):
            raise FileExistsError(f"{folder} was not put there by this command; another is there now, and it is {old}")
        if os.path.lexists(folder):
            shutil.rmtree(old, ignore_errors=True)


def _folder(comfyui: Path) -> Path:
    custom_nodes = comfyui.expanduser() / "custom_nodes"
    if not custom_nodes.is_dir():
        raise FileNotFoundError(f"{comfyui} has no folder custom_nodes; give --comfyui the folder of ComfyUI")
    return custom_nodes.resolve() / PACK_NAME


def _make_sure_it_is_ours(folder: Path) -> None:
    """Refuse a pack that ``install`` did not put there. None at all is in nobody's way."""
    while (found := _identity(folder)) is not None and not _is_ours(folder):
        if found == _identity(folder):  # and not what another process put there in between
            raise _not_ours(folder)


def _is_ours(folder: Path) -> bool:
    return not folder.is_symlink() and (folder / _MARK).is_file()


def _not_ours(folder: Path) -> FileExistsError:
    return FileExistsError(f"{folder} was not put there by this command; remove it yourself, then try again")


def _identity(folder: Path) -> tuple[int, int] | None:
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _copy_to(folder: Path) -> None:
    parts = _CORE / "pack" if (_CORE / "pack").is_dir() else _CORE.parent
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(_CORE, folder / _CORE.name, ignore=shutil.ignore_patterns("__pycache__", "pack"))
    for name in _PARTS:
        if (parts / name).is_dir():
            shutil.copytree(parts / name, folder / name, ignore=ignore)
        elif (parts / name).is_file():
            shutil.copy2(parts / name, folder / name)
    (folder / _MARK).write_text(f"{__version__}\n", encoding="utf-8")
