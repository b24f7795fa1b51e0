"""The language that the person uses, and messages in it.

The log and JSON stay English, for those who are asked about them and for programs. What a node shows and the errors
that the host shows are translated here, at the last moment.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import folder_paths

from ..messages import translated
from .report.reasons import in_their_words

_LOCALES = Path(__file__).resolve().parents[2] / "locales"
_ENGLISH = "en"
_USER, _SETTINGS_FILE, _SETTING = "default", "comfy.settings.json", "Comfy.Locale"


def in_their_language(text: str) -> str:
    """Return a message in the person's language, without code in it; any other string as it is."""
    return translated(in_their_words(text), _catalogue(language()))


@contextlib.contextmanager
def errors_in_their_language() -> Iterator[None]:
    """Raise the errors of a block with their messages in the person's language."""
    try:
        yield
    except Exception as error:
        error.args = tuple(in_their_language(said) if isinstance(said, str) else said for said in error.args)
        raise


def language() -> str:
    """Return the language that is chosen in the host's settings now: "en", "zh", "zh-TW", ... Cheap.

    English where none was chosen, and where the host serves many users: whose workflow runs is not known here.
    """
    try:  # a text is never worth a failed image, whatever another version of the host keeps elsewhere
        from comfy.cli_args import args

        if args.multi_user:
            return _ENGLISH
        path = Path(folder_paths.get_user_directory(), _USER, _SETTINGS_FILE)
        status = path.stat()
    except Exception:
        return _ENGLISH
    return _chosen(path, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=1)
def _chosen(path: Path, _modified: int, _size: int) -> str:
    """Return the setting in a file; read it again once the file is another."""
    try:
        return str(json.loads(path.read_text(encoding="utf-8")).get(_SETTING) or _ENGLISH)
    except (OSError, ValueError, AttributeError):
        return _ENGLISH


@functools.cache
def _catalogue(language: str) -> Mapping[str, str]:
    """Return the translated templates of a language; none of a language without a translation."""
    try:
        catalogue: dict[str, str] = json.loads((_LOCALES / language / "messages.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return catalogue
