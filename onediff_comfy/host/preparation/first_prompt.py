"""Prepare for the first prompt while the host waits for it: import the core and a compiler, and load graphs.

Else that prompt would wait for them, one to three seconds. While a prompt runs they compete with all that runs; see
``serving.resolution.pending``.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from pathlib import Path

from ...folders import GRAPHS, cache_folder, shared_cache_folder, store_url
from ..compatibility import host_changed
from ..process.prompts import between_prompts
from ..versions import torch_too_old

log = logging.getLogger(__name__)

_LOOKED_AGAIN_AFTER = 0.25  # seconds


def prepare_when_idle() -> None:
    """Begin once the host waits for a prompt, on a thread of its own. Whoever has no graphs pays nothing."""
    folders = [folder for folder in (cache_folder(), shared_cache_folder()) if folder is not None]
    if store_url() or any(map(_has_graphs, folders)):
        threading.Thread(target=_prepare, name="onediff-first-prompt", daemon=True).start()


def _has_graphs(folder: Path) -> bool:
    try:
        return any((folder / GRAPHS).iterdir())
    except OSError:
        return False


def _prepare() -> None:
    _wait_until_idle()
    if torch_too_old() is not None or host_changed("everything") is not None:
        return
    try:
        importlib.import_module("..adapters.model", __package__)
        latest_graphs = importlib.import_module("..process.latest_graphs", __package__)
        latest_graphs.import_compiler()
        latest_graphs.load(before_each=_wait_until_idle)
    except Exception:  # who runs a node is told
        log.debug("not all was prepared before the first prompt", exc_info=True)


def _wait_until_idle() -> None:
    while not _is_idle():
        time.sleep(_LOOKED_AGAIN_AFTER)


def _is_idle() -> bool:
    with between_prompts() as between:
        return between
