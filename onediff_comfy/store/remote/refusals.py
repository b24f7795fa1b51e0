"""What was refused: counted, said once, and kept aside for a person to look at. Nothing here is ever loaded."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import threading
from pathlib import Path

from ...files import write_atomically
from .tier_counters import TierCounters

log = logging.getLogger(__name__)

_MOST_KEPT = 20
_MOST_BYTES = 256 << 20


class Refusals:
    """Takes what was refused.

    Args:
        folder: where it is kept, at most 20 objects.
        counters: told of each refusal.
    """

    def __init__(self, folder: Path, counters: TierCounters) -> None:
        self.folder, self._counters = folder, counters
        self._lock = threading.Lock()
        self._known: dict[tuple[str, str], str] = {}
        self._damaged: dict[tuple[str, str], str] = {}

    def keep(self, path: str, version: str, content: bytes, reason: str) -> None:
        """Keep an object aside, and say so: once for each object and reason.

        Args:
            path: its path in the store.
            version: its version there.
            content: as much of it as was read.
            reason: why it was refused.
        """
        with self._lock:
            if self._known.get((path, version)) == reason:
                return
            self._known[path, version] = reason
        self._counters.count("refusals")
        log.warning("OneDiff: %s in the store was refused: %s; it is kept aside in %s", path, reason, self.folder)
        name = hashlib.sha256(f"{path} {version}".encode()).hexdigest()[:24]
        with contextlib.suppress(OSError):  # counted and said all the same
            write_atomically(self.folder / f"{name}.object", content[:_MOST_BYTES])
            about = {"path": path, "version": version, "reason": reason}
            write_atomically(self.folder / f"{name}.json", json.dumps(about, indent=1).encode())
            self._make_room()

    def note_damaged(self, path: str, version: str, reason: str) -> None:
        """Remember what was found wrong with the bytes of this version: nobody here need fetch them again."""
        self._damaged[path, version] = reason

    def damage(self, path: str, version: str) -> str | None:
        """Return what was found wrong with the bytes of this version, if it was."""
        return self._damaged.get((path, version))

    def _make_room(self) -> None:
        kept = sorted(self.folder.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in kept[_MOST_KEPT:]:
            path.unlink(missing_ok=True)
            path.with_suffix(".object").unlink(missing_ok=True)
