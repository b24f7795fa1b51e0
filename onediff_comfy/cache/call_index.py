"""Which graphs serve which calls, which options a model reads, and whose code fixes sizes: in memory, then stored."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .. import __version__
from ..capture.call import NotCovered
from ..capture.shape_range import ShapeRange
from ..store.artifact import Artifact
from ..store.store import GraphStore

log = logging.getLogger(__name__)

_EXACT_ONLY = "exact_only"


def reader_of(fingerprint: str, code: str) -> str:
    """Return under which name it is known what a call reads: its target's, or that with the functions' ``code``."""
    return hashlib.sha256(f"{fingerprint} {code}".encode()).hexdigest() if code else fingerprint


@dataclass(frozen=True)
class Candidate:
    """A graph that may serve calls of one kind, and the sizes it serves."""

    graph_key: str
    shapes: ShapeRange


def _candidate(graph_key: str, shapes: Mapping[str, Any]) -> Candidate | None:
    try:
        return Candidate(graph_key, ShapeRange.from_json(shapes))
    except (ValueError, KeyError, TypeError, NotCovered) as error:
        log.debug("a note on graph %.12s cannot be read and is ignored: %r", graph_key, error)
        return None


class CallIndex:
    """Finds graphs by call key.

    Args:
        store: what other processes noted; without one, nothing outlives this process.
    """

    def __init__(self, store: GraphStore | None) -> None:
        self._store = store
        self._candidates: dict[str, tuple[Candidate, ...]] = {}
        self._options_read: dict[str, frozenset[str]] = {}
        self._exact_only: set[str] = set()

    def options_read(self, fingerprint: str) -> frozenset[str]:
        """Return the options that a target is known to read.

        Args:
            fingerprint: of the target, and of the code of functions that it is handed (``reader_of``).
        """
        if fingerprint not in self._options_read:
            noted = self._store.notes.options(fingerprint) if self._store else ()
            self._options_read[fingerprint] = frozenset(noted)
        return self._options_read[fingerprint]

    def learn_option(self, fingerprint: str, name: str) -> None:
        """Remember that the target with this fingerprint reads the option ``name``."""
        read = self._options_read[fingerprint] = self.options_read(fingerprint) | {name}
        if self._store:
            self._store.notes.add_options(fingerprint, read)

    def is_exact_only(self, call_key: str) -> bool:
        """Return True if calls of all sizes named ``call_key`` are known to have graphs for one set of sizes only.

        Another version of the pack may capture more, so it finds out anew.
        """
        if (
            call_key not in self._exact_only
            and self._store
            and self._store.notes.read(_EXACT_ONLY, call_key) == __version__
        ):
            self._exact_only.add(call_key)
        return call_key in self._exact_only

    def note_exact_only(self, call_key: str) -> None:
        """Remember that the code of calls of all sizes named ``call_key`` fixes sizes."""
        self._exact_only.add(call_key)
        if self._store:
            self._store.notes.write(_EXACT_ONLY, call_key, __version__)

    def candidates(self, call_key: str) -> tuple[Candidate, ...]:
        """Return the graphs that are known to serve calls like this one, whoever compiled them and when."""
        found = self._candidates.get(call_key)
        if not found:
            noted = self._store.notes.calls(call_key) if self._store else []
            found = tuple(candidate for key, shapes in noted if (candidate := _candidate(key, shapes)) is not None)
            self._candidates[call_key] = found
        return found

    def serve_with(self, call_key: str, graph_key: str, shapes: ShapeRange) -> None:
        """Remember that calls named ``call_key``, of sizes in ``shapes``, are served by the graph ``graph_key``."""
        candidate = Candidate(graph_key, shapes)
        if candidate not in self.candidates(call_key):
            self._candidates[call_key] = (*self.candidates(call_key), candidate)
            if self._store:
                self._store.notes.add_call(call_key, graph_key, shapes.to_json())

    def forget_candidates(self, call_key: str) -> None:
        """Ask the store again next time: another process may have compiled one."""
        self._candidates.pop(call_key, None)

    def adopt(self, artifact: Artifact) -> None:
        """Take in a graph from a file: the next call that it serves finds it.

        Raises:
            ArtifactError, Untrusted, OSError: see ``GraphStore.adopt``.
        """
        assert self._store is not None
        self._store.adopt(artifact)
        # What was asked before the file came may have been answered otherwise.
        for call_key in artifact.manifest.calls:
            self.forget_candidates(call_key)
        for fingerprint in artifact.manifest.options_read:
            self._options_read.pop(fingerprint, None)
