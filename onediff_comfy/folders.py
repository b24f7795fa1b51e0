"""Where the pack keeps its files, with or without ComfyUI around.

``ONEDIFF_CACHE_DIR`` overrides the cache folder; ``ONEDIFF_SHARED_CACHE_DIR`` names a further one
that is only read (a fleet's); ``ONEDIFF_CONFIG_DIR`` overrides the folder of the signing key.
``ONEDIFF_STORE_URL`` names an object store that machines share, and ``ONEDIFF_STORE_ROLE`` what this one is to it.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import tempfile
from pathlib import Path

log = logging.getLogger(__name__)

_NAME = "onediff-comfy"

GRAPHS = "graphs"
"""The folder of compiled graphs within a cache folder."""


def cache_folder() -> Path:
    """Return the folder of compiled graphs: large, and may be deleted at any time."""
    return _folder("ONEDIFF_CACHE_DIR", "XDG_CACHE_HOME", ".cache", "Library/Caches")


def shared_cache_folder() -> Path | None:
    """Return a cache folder that others write and we only read, if one was set."""
    value = os.environ.get("ONEDIFF_SHARED_CACHE_DIR")
    return Path(value) if value else None


def store_url() -> str:
    """Return the URL of the object store that a fleet shares; empty if there is none."""
    return os.environ.get("ONEDIFF_STORE_URL", "").strip()


def store_role() -> str:
    """Return what this machine is to that store: ``worker``, which only reads, or ``builder``, which signs."""
    return os.environ.get("ONEDIFF_STORE_ROLE", "").strip() or "worker"


def config_folder() -> Path:
    """Return the folder of the signing key and the list of trusted graphs: small and private."""
    return _folder("ONEDIFF_CONFIG_DIR", "XDG_CONFIG_HOME", ".config", "Library/Application Support")


def _folder(override: str, xdg: str, unix: str, mac: str) -> Path:
    if value := os.environ.get(override):
        return Path(value)
    try:
        if sys.platform == "win32":
            base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
        elif sys.platform == "darwin":
            base = Path.home() / mac
        else:
            base = Path(os.environ.get(xdg) or Path.home() / unix)
    except RuntimeError:  # a user without a home, as in containers; processes that compile in the background are told
        os.environ[override] = str(Path(_of_this_process().name, override.lower()))
        return Path(os.environ[override])
    return base / _NAME


@functools.cache
def _of_this_process() -> tempfile.TemporaryDirectory[str]:
    """Return a private folder that goes with the process."""
    log.warning(
        "OneDiff: this user has no home folder, so compiled graphs are kept until the process ends; ONEDIFF_CACHE_DIR "
        "and ONEDIFF_CONFIG_DIR may name folders that stay"
    )
    return tempfile.TemporaryDirectory(prefix=f"{_NAME}-", ignore_cleanup_errors=True)
