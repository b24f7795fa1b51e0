"""The pack as a folder among ComfyUI's custom nodes, made from an installed wheel or a checkout.

A wheel has the parts of the pack that are no Python package of their own (``__init__.py``, ``nodes/``,
``workflows/``, …) in ``onediff_comfy/pack``; in a checkout they are beside ``onediff_comfy``.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import shutil
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
    new, old = _beside(folder), _beside(folder)
    try:
        _copy_to(new)
        while not _takes_the_place(new, folder, old):  # another install was quicker: ours comes in place of that one
            shutil.rmtree(old, ignore_errors=True)  # there may have been none
    finally:
        shutil.rmtree(new, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
    return folder


def uninstall(comfyui: Path) -> Path:
    """Remove what ``install`` put into ``comfyui/custom_nodes``, and return where it was.

    Raises:
        FileNotFoundError: there is no ``custom_nodes``, or no pack in it.
        FileExistsError: the pack there was not put there by ``install``.
    """
    folder = _folder(comfyui)
    if not folder.is_symlink() and not folder.exists():
        raise FileNotFoundError(f"there is no {folder}; nothing was removed")
    _make_sure_it_is_ours(folder)
    old = _beside(folder)
    folder.rename(old)  # no moment in which half a pack is there
    shutil.rmtree(old)
    return folder


def _beside(folder: Path) -> Path:
    """Return a name for a folder that ComfyUI does not load, and that no other process has."""
    return folder.with_name(f"{folder.name}-{secrets.token_hex(4)}{_NOT_LOADED}")


def _takes_the_place(new: Path, folder: Path, old: Path) -> bool:
    """Put ``new`` in the place of ``folder``, and that to ``old``. Return False if another came in between.

    Raises:
        OSError: it cannot be done; what was there is still there.
    """
    _make_sure_it_is_ours(folder)
    with contextlib.suppress(FileNotFoundError):
        folder.rename(old)
    try:
        new.rename(folder)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST) or folder.exists():  # it may be on its way elsewhere by now
            return False
        if old.exists():
            old.rename(folder)
        raise
    return True


def _folder(comfyui: Path) -> Path:
    custom_nodes = comfyui.expanduser() / "custom_nodes"
    if not custom_nodes.is_dir():
        raise FileNotFoundError(f"{comfyui} has no folder custom_nodes; give --comfyui the folder of ComfyUI")
    return custom_nodes.resolve() / PACK_NAME


def _make_sure_it_is_ours(folder: Path) -> None:
    """Refuse a pack that ``install`` did not put there. None at all is in nobody's way."""
    while (found := _identity(folder)) is not None and (folder.is_symlink() or not (folder / _MARK).is_file()):
        if found == _identity(folder):  # and not what another process put there in between
            raise FileExistsError(f"{folder} was not put there by this command; remove it yourself, then try again")


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
