"""Notes: small facts about graphs and calls on disk, one a file. Sealed, for they decide which graph serves a call."""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..files import private_lock, read_regular, write_atomically
from ..folders import GRAPHS
from ..settings import GRAPH_SUFFIX
from .artifact import parse_json
from .trust import Trust

log = logging.getLogger(__name__)

OPTIONS = "options"
"""The kind of the notes on what targets, and functions that nodes put into them, are known to read."""
PROVED = "proved"
"""The kind of the notes on the sizes for which a graph's output agreed with eager's, by its artifact's digest."""
RETIRED = "retired"
"""The kind of the notes on graphs that were found wrong. They are written, and never written anew: none can be lost."""

_SUFFIXES = {GRAPHS: GRAPH_SUFFIX, "locks": ".lock"}
_MAX_NOTE = 64 << 20
_LOCK_TIMEOUT_S = 2
"""A lock is held for milliseconds: whoever holds it longer was stopped, and nobody is to wait for that."""
_LOCK_POLL_S = 0.002
"""Somebody who writes many notes leaves the lock free for a moment in between, which one who looks rarely misses."""
# Of a graph key, a call or whatever else a file is named by: nothing that could lead out of its folder.
_FILE_NAME = re.compile(r"[0-9A-Za-z_-]{1,128}")


class Notes:
    """What was found out about graphs and calls, by kind and name.

    Args:
        folders: the first is read and written, the others are read where it has no note.
        trust: seals and judges.
    """

    def __init__(self, folders: Sequence[Path], trust: Trust) -> None:
        self._folders, self._trust = folders, trust
        self._patience_s: float = _LOCK_TIMEOUT_S

    def add_call(self, call_key: str, graph_key: str, shapes: Mapping[str, Any]) -> None:
        """Remember that calls named ``call_key`` of sizes within ``shapes`` are served by a graph."""
        self.update(
            "calls",
            call_key,
            lambda noted: [*(pair for pair in _pairs(noted) if pair[0] != graph_key), (graph_key, shapes)],
        )

    def calls(self, call_key: str) -> list[tuple[str, Mapping[str, Any]]]:
        """Return the graphs, with their ranges of sizes, that are known to serve calls named ``call_key``."""
        return _pairs(self.read("calls", call_key))

    def add_options(self, fingerprint: str, names: Collection[str]) -> None:
        """Remember that a target reads options of these names, besides those that are known."""
        self.update(OPTIONS, fingerprint, lambda noted: sorted({*_names(noted), *names}))

    def options(self, fingerprint: str) -> list[str]:
        """Return the names of the options that a target is noted to read."""
        return _names(self.read(OPTIONS, fingerprint))

    def update(self, kind: str, name: str, change: Callable[[Any], Any]) -> None:
        """Write anew what other processes may be writing too: none of them loses what another has noted.

        Args:
            change: makes the value of what is noted here now, None if nothing is.
        """
        with self._locked():
            # As this class reads it, from folders: a fleet's store would be asked under the lock.
            self.write(kind, name, change(Notes.read(self, kind, name)))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other processes from updating notes. Where there can be no lock, a note may be lost.

        Who has waited in vain does not wait again while the lock is held: notes are written in the middle of sampling.
        """
        path = path_in(self._folders[0], "locks", "notes")
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(private_lock(path).acquire(self._patience_s, _LOCK_POLL_S))
                self._patience_s = _LOCK_TIMEOUT_S
            except (OSError, NotImplementedError) as error:  # a timeout is an OSError
                self._patience_s = 0
                log.debug("a note is written without a lock: %s", error)
            yield

    def write(self, kind: str, name: str, value: Any) -> None:
        """Remember a small fact, where it can be kept; sealed, for it decides which graph serves a call."""
        text = json.dumps([kind, name, value], sort_keys=True)
        try:
            content = json.dumps({"text": text, "seal": self._trust.seal(text)}).encode()
            write_atomically(path_in(self._folders[0], kind, name), content)
        except OSError as error:
            log.debug("could not write the %s note %s: %s", kind, name, error)

    def read(self, kind: str, name: str) -> Any | None:
        """Return what was noted, if it carries our seal; None otherwise."""
        for folder in self._folders:
            try:
                content = parse_json(read_regular(path_in(folder, kind, name), _MAX_NOTE))
                text = content["text"]
                if not self._trust.sealed_by_us(text, content["seal"]):
                    continue
                found_kind, found_name, value = parse_json(text)
            except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
                continue
            if (found_kind, found_name) == (kind, name):
                return value
        return None


def _names(noted: Any) -> list[str]:
    return [name for name in noted if isinstance(name, str)] if isinstance(noted, list) else []


def _pairs(noted: Any) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the pairs of a note of calls; none of what another version has noted in another form."""
    pairs = [pair for pair in noted if isinstance(pair, list) and len(pair) == 2] if isinstance(noted, list) else []
    return [(key, shapes) for key, shapes in pairs if isinstance(key, str) and isinstance(shapes, dict)]


def path_in(folder: Path, kind: str, name: str) -> Path:
    """Return where a graph, a lock or a note is.

    Raises:
        ValueError: the name is none that a file of the store has.
    """
    if not _FILE_NAME.fullmatch(kind) or not _FILE_NAME.fullmatch(name):
        raise ValueError(f"{kind!r} and {name!r} name no file of the store")
    return folder / kind / f"{name}{_SUFFIXES.get(kind, '.json')}"
