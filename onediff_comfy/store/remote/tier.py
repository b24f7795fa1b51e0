"""The tier: graphs of a fleet in an object store, each published exactly once, none believed unsigned.

v1/graphs/<graph key>              a graph, signed; put if absent
v1/calls/<call key>/<graph key>    that a graph serves a call, and at which sizes; signed
v1/options/<fingerprint>/<graph key>    which options the target of a graph reads; signed
v1/leases/<graph key>              who compiles it now; see ``lease``
"""

from __future__ import annotations

import json
import logging
import random
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..artifact import Artifact, ArtifactError, Manifest, parse_json
from ..graph_file import pack, unpack
from ..signing.key_ring import KeyRing
from ..signing.own_key import OwnKey
from ..signing.signed import START_BYTES, Refused, Statement, check_body, signed, statement_in
from .lease import HELD, HeldLease, Leases, LeaseTimes, Watch
from .objects import Objects, Piece, Unreachable
from .refusals import Refusals
from .tier_counters import TierCounters

log = logging.getLogger(__name__)

MAX_GRAPH = 1 << 30
"""Bytes that a graph in the store may have; the largest that was seen has some 100 MB."""
_MAX_NOTE = 1 << 18
_MOST_NOTES = 64
_PIECE = 4 << 20
"""Bytes that are fetched at a time, each within a few seconds: a slower store is as good as none."""
_TRIES = 3
"""Of a write that others were in the way of."""
_TRIES_BY_OTHERS = 2
"""After so many holders of a lease that published nothing, nobody waits for the next one."""
_ABOUT = ("torch", "python", "os", "machine", "device", "architecture", "cuda", "triton")


@dataclass(frozen=True)
class Fetched:
    """A graph from the store, whole, and signed by a key that this machine believes.

    Attributes:
        artifact: unsealed; seal it before it is kept.
        key_id: whose signature it has.
    """

    artifact: Artifact
    key_id: str


class Tier:
    """A fleet's graphs in an object store.

    Args:
        objects: the store.
        keys: whom this machine believes.
        own_key: of this machine, asked at each use; a worker, which has none, only reads.
        refusals: keeps aside what is refused.
        counters: told of everything.
        times: of leases.
    """

    def __init__(
        self,
        objects: Objects,
        keys: KeyRing,
        own_key: OwnKey,
        refusals: Refusals,
        counters: TierCounters,
        times: LeaseTimes | None = None,
    ) -> None:
        self.objects, self.keys, self.own_key = objects, keys, own_key
        self.refusals, self.counters = refusals, counters
        self.leases = Leases(objects, keys, times or LeaseTimes())

    # -- graphs --------------------------------------------------------------------------------

    def fetch(self, key: str) -> Fetched | None:
        """Return a graph from the store, after every check; None if there is none that may be used.

        Raises:
            Unreachable: the store did not answer.
        """
        path, begun = _graph_path(key), time.monotonic()
        piece = self.objects.read(path, 0, START_BYTES)
        if piece is None:
            return None
        content = piece.content
        try:
            statement, begin = self._stated(path, piece)
        except (Refused, OSError) as refusal:
            self.refusals.keep(path, piece.version, content, str(refusal))
            return None
        try:
            content = _whole(self.objects, path, piece)
            check_body(statement, content[begin:])
            artifact = _graph_in(content[begin:], key)
        except Refused as refusal:
            self.refusals.note_damaged(path, piece.version, str(refusal))
            self.refusals.keep(path, piece.version, content, str(refusal))
            return None
        self.counters.count("fetched")
        self.counters.count("fetched_bytes", len(content))
        self.counters.count("fetched_seconds", time.monotonic() - begun)
        return Fetched(artifact, statement.key)

    def statement(self, key: str) -> Statement | None:
        """Return what a believed signer says of a graph that is published; None if there is none that may be used.

        Raises:
            Unreachable: the store did not answer.
        """
        path = _graph_path(key)
        piece = self.objects.read(path, 0, START_BYTES)
        if piece is None:
            return None
        try:
            return self._judged(path, piece)
        except OSError as error:
            self.refusals.keep(path, piece.version, piece.content, str(error))
            return None

    def refused(self, key: str) -> str | None:
        """Return the version of what lies in a graph's place, if nobody may use it who believes what this machine does.

        Raises:
            Unreachable: the store did not answer.
            OSError: this machine cannot read whom it believes, or believes nobody.
        """
        path = _graph_path(key)
        piece = self.objects.read(path, 0, START_BYTES)
        return piece.version if piece is not None and self._judged(path, piece) is None else None

    def publish(self, artifact: Artifact) -> bool:
        """Put a graph into the store, unless there is one that may be used. Return False if there is.

        Raises:
            Unreachable: the store did not answer.
            PermissionError: this machine is no builder, or its key is revoked.
            OSError: see ``OwnKey``; or it believes nobody, and so cannot judge what is there.
        """
        signer, manifest = self.own_key.signer(), artifact.manifest
        path = _graph_path(manifest.key)
        body = pack([Artifact(artifact.manifest_text, "", artifact.data)])  # our own seal means nothing elsewhere
        content, statement = signed(path, body, _about(manifest), signer)
        if not self._put(manifest.key, content, statement):
            self.counters.count("late")
            return False
        self.counters.count("published")
        self.counters.count("published_bytes", len(content))
        for call_key in manifest.calls:
            self.note_call(call_key, manifest.key, manifest.shapes)
        for fingerprint, names in manifest.options_read.items():
            self._note(f"v1/options/{fingerprint}/{manifest.key}", {"options": list(names)})
        return True

    def _put(self, key: str, content: bytes, statement: Statement) -> bool:
        """Put an object where there is none, or where one lies that nobody may use. False if another is there."""
        path = _graph_path(key)
        for _ in range(_TRIES):
            if self.objects.create(path, content) is not None:
                return True
            there = self.objects.read(path, 0, START_BYTES)
            if there is None:
                continue  # it was removed meanwhile, or another upload was under way that came to nothing
            good = self._judged(path, there)
            if good is not None:
                return good.nonce == statement.nonce  # the answer to our own upload may have got lost
            if self.objects.replace(path, content, there.version) is not None:
                log.warning("OneDiff: %s held what cannot be used, and was replaced", path)
                return True
        raise Unreachable(f"others were writing {path}")

    def _stated(self, path: str, piece: Piece) -> tuple[Statement, int]:
        statement, begin = statement_in(piece.content, path, self.keys)
        if statement.size > MAX_GRAPH:
            raise Refused(f"it has {statement.size >> 20} MB, more than any graph")
        if piece.size != begin + statement.size:
            raise Refused("it has another size than was signed")
        damage = self.refusals.damage(path, piece.version)
        if damage is not None:
            raise Refused(damage)
        return statement, begin

    def _judged(self, path: str, piece: Piece) -> Statement | None:
        """Return what a believed signer says of an object; None if it is refused, and may be replaced or removed.

        Raises:
            OSError: whom this machine believes cannot be read, or is nobody. That is no judgement of the object.
        """
        self.keys.check_that_anybody_is_believed()
        try:
            return self._stated(path, piece)[0]
        except Refused as refusal:
            self.refusals.keep(path, piece.version, piece.content, str(refusal))
            return None

    # -- notes ---------------------------------------------------------------------------------

    def calls(self, call_key: str) -> list[tuple[str, Mapping[str, Any]]]:
        """Return the graphs in the store, with their ranges of sizes, that serve calls named ``call_key``.

        Raises:
            Unreachable: the store did not answer.
        """
        notes = self._notes(f"v1/calls/{call_key}")
        return [(key, note["shapes"]) for key, note in notes.items() if isinstance(note.get("shapes"), dict)]

    def options(self, fingerprint: str) -> list[str]:
        """Return the options that the target with this fingerprint is known to read.

        Raises:
            Unreachable: the store did not answer.
        """
        notes = self._notes(f"v1/options/{fingerprint}").values()
        return sorted({name for note in notes for name in note.get("options", ()) if isinstance(name, str)})

    def note_call(self, call_key: str, graph_key: str, shapes: Mapping[str, Any]) -> None:
        """Note in the store that a graph serves a call; a worker notes nothing.

        Raises:
            Unreachable: the store did not answer.
        """
        self._note(f"v1/calls/{call_key}/{graph_key}", {"shapes": shapes})

    def _note(self, path: str, value: Mapping[str, Any]) -> None:
        body, signer = json.dumps(value, sort_keys=True).encode(), self.own_key.usable()
        if signer is None or len(body) > _MAX_NOTE - START_BYTES:
            return
        content, _ = signed(path, body, {}, signer)
        if self.objects.create(path, content) is None:
            there = self.objects.read(path, 0, _MAX_NOTE)
            if there is not None and self._note_in(path, there) is None:
                self.objects.replace(path, content, there.version)

    def _notes(self, folder: str) -> dict[str, Mapping[str, Any]]:
        found = {}
        for listed in self.objects.listed(f"{folder}/", _MOST_NOTES):
            # A store that is itself below a prefix may list with it or without.
            name = listed.path.rpartition("/")[2]
            path = f"{folder}/{name}"
            piece = self.objects.read(path, 0, _MAX_NOTE)
            note = None if piece is None else self._note_in(path, piece)
            if note is not None:
                found[name] = note
        return found

    def _note_in(self, path: str, piece: Piece) -> Mapping[str, Any] | None:
        try:
            if piece.size > _MAX_NOTE:
                raise Refused("it is larger than any note")
            statement, begin = statement_in(piece.content, path, self.keys)
            check_body(statement, piece.content[begin:])
            note = parse_json(piece.content[begin:])
            if not isinstance(note, dict):
                raise Refused("it is no note")
            return note
        except (Refused, OSError, ValueError, RecursionError) as refusal:
            self.refusals.keep(path, piece.version, piece.content, str(refusal))
            return None

    # -- leases --------------------------------------------------------------------------------

    def turn(self, key: str) -> HeldLease | None:
        """Wait until the graph is published, or until it is this process's turn to compile it.

        Returns:
            A lease to be released, or None: the graph is there, or is to be compiled without a lease.

        Raises:
            Unreachable: the store did not answer.
        """
        times, begun, waited = self.leases.times, time.monotonic(), False
        watch, refused = Watch(times.ttl_s), Counter[str | None]()
        try:
            # Whoever may write to the store could keep a lease alive for ever by what was signed once.
            while self.statement(key) is None and time.monotonic() - begun < times.longest_s + 3 * times.ttl_s:
                seen = self.leases.look(key)
                if not watch.alive(seen):
                    version, failures = (seen.version, seen.failures) if seen is not None else (None, 0)
                    if self.own_key.usable() is None or failures >= _TRIES_BY_OTHERS or refused[version] >= _TRIES:
                        return None
                    held = self.leases.take(key, seen, self.own_key)
                    if held is not None:
                        self.counters.count("takeovers", seen is not None and seen.state == HELD)
                        return held
                    refused[version] += 1  # of one version more than once: this store replaces nothing
                elif not waited and seen is not None:
                    waited = True
                    self.counters.count("waits")
                    log.info("OneDiff: %s compiles a graph that is wanted here; waiting for it", seen.owner)
                time.sleep(times.poll_s * random.uniform(0.5, 1.5))
            return None
        finally:
            if waited:
                self.counters.count("wait_seconds", time.monotonic() - begun)


def _graph_path(key: str) -> str:
    return f"v1/graphs/{key}"


def _whole(objects: Objects, path: str, first: Piece) -> bytes:
    content = bytearray(first.content)
    while len(content) < first.size:
        piece = objects.read(path, len(content), min(len(content) + _PIECE, first.size))
        if piece is None or piece.version != first.version or not piece.content:
            raise Unreachable(f"{path} was changed while it was read")
        content += piece.content
    return bytes(content)


def _about(manifest: Manifest) -> dict[str, str]:
    """Return what a puller chooses by."""
    environment = {name: manifest.environment[name] for name in _ABOUT if name in manifest.environment}
    facts = {"target": manifest.target, "engine": manifest.engine, "created": manifest.created, **environment}
    return {name: value[:200] for name, value in facts.items()}


def _graph_in(body: bytes, key: str) -> Artifact:
    """Return the one graph in a file's bytes, checked as any file is.

    Raises:
        Refused: it is damaged, or another graph.
    """
    try:
        artifacts = unpack(body)
        if [artifact.manifest.key for artifact in artifacts] != [key]:
            raise Refused("it holds another graph than its name says")
        artifacts[0].checked_parts()
    except ArtifactError as error:
        raise Refused(str(error)) from error
    return artifacts[0]
