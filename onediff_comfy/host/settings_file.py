"""The settings that a person made in the editor, and that hold from the start of a process on."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import folder_paths

log = logging.getLogger(__name__)

_FILE = Path("default", "comfy.settings.json")
_CACHE_FOLDER, _CACHE_LIMIT = "OneDiff.CacheFolder", "OneDiff.CacheLimitMB"


def use_cache_settings() -> None:
    """Keep graphs where the person's settings say, and as many; environment variables that are set go first.

    The settings become these variables, so that processes which compile in the background see them too.
    """
    chosen = _settings()
    folder, megabytes = chosen.get(_CACHE_FOLDER), chosen.get(_CACHE_LIMIT)
    if isinstance(folder, str) and folder.strip():
        os.environ.setdefault("ONEDIFF_CACHE_DIR", str(Path(folder.strip()).expanduser().absolute()))
    if isinstance(megabytes, (int, float)) and megabytes >= 1:
        os.environ.setdefault("ONEDIFF_CACHE_LIMIT_MB", str(int(megabytes)))


def _settings() -> Mapping[str, Any]:
    """Return what the settings' file has; nothing where there is none, or where the host serves many users."""
    try:
        from comfy.cli_args import args

        if args.multi_user:
            return {}
        found = json.loads(Path(folder_paths.get_user_directory(), _FILE).read_text(encoding="utf-8"))
    except Exception as error:  # a setting is never worth a pack that does not load
        log.debug("no settings of the editor: %s", error)
        return {}
    return found if isinstance(found, dict) else {}
