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


def use_cache_settings() -> None:
    """Keep graphs where the person's settings say, and as many; environment variables that are set go first.

    The settings become these variables, so that processes which compile in the background see them too.
    """
    chosen = _settings()
    for name, (variable, value_of) in _VARIABLES.items():
        try:
            if (value := value_of(chosen.get(name))) is not None:
                os.environ.setdefault(variable, value)
        except Exception as error:  # a person typed it
            log.warning("OneDiff: the setting %s is of no use (%s); it is as if it were not set", name, error)


def _folder(setting: Any) -> str | None:
    named = isinstance(setting, str) and setting.strip()
    return str(Path(setting.strip()).expanduser().absolute()) if named else None


def _megabytes(setting: Any) -> str | None:
    return str(int(setting)) if isinstance(setting, (int, float)) and setting >= 1 else None


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


_VARIABLES = {
    "OneDiff.CacheFolder": ("ONEDIFF_CACHE_DIR", _folder),
    "OneDiff.CacheLimitMB": ("ONEDIFF_CACHE_LIMIT_MB", _megabytes),
}
