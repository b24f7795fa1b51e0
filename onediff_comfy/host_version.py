"""Where ComfyUI is, and which, found from files alone: without importing it."""

from __future__ import annotations

import re
from pathlib import Path

MINIMUM_COMFYUI = (0, 16, 3)
"""The oldest ComfyUI whose node API has what our nodes use; ``requires-comfyui`` in pyproject.toml says the same."""

_FILE = "comfyui_version.py"
_VERSION = re.compile(r"""^__version__\s*=\s*["']([^"']+)["']""", re.MULTILINE)


def find_comfyui() -> Path | None:
    """Return the folder of the ComfyUI that this pack lies in, or that is the current folder or in it; or None."""
    pack = Path(__file__).resolve().parents[1]
    here = Path.cwd()
    return next((place for place in (*pack.parents, here, here / "ComfyUI") if (place / _FILE).is_file()), None)


def version_in(folder: Path) -> str | None:
    """Return the version of the ComfyUI in a folder, or None if there is none."""
    try:
        found = _VERSION.search((folder / _FILE).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return None
    return found[1] if found else None
