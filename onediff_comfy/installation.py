"""The pack as a folder among ComfyUI's custom nodes, made from an installed wheel or a checkout.

A wheel has the parts of the pack that are no Python package of their own (``__init__.py``, ``nodes/``,
``workflows/``, …) in ``onediff_comfy/pack``; in a checkout they are beside ``onediff_comfy``.
"""

from __future__ import annotations

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
    if folder.is_symlink() or folder.exists():
        _make_sure_it_is_ours(folder)
    new = folder.with_name(f"{PACK_NAME}-new{_NOT_LOADED}")
    shutil.rmtree(new, ignore_errors=True)
    try:
        _copy_to(new)
        if folder.exists():
            shutil.rmtree(folder)
        new.rename(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)
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
    shutil.rmtree(folder)
    return folder


def _folder(comfyui: Path) -> Path:
    custom_nodes = comfyui.expanduser() / "custom_nodes"
    if not custom_nodes.is_dir():
        raise FileNotFoundError(f"{comfyui} has no folder custom_nodes; give --comfyui the folder of ComfyUI")
    return custom_nodes.resolve() / PACK_NAME


def _make_sure_it_is_ours(folder: Path) -> None:
    if folder.is_symlink() or not (folder / _MARK).is_file():
        raise FileExistsError(f"{folder} was not put there by this command; remove it yourself, then try again")


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
