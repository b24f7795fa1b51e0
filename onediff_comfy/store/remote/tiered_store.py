"""The local store with a fleet's tier above it: what is missing here is fetched, what is made here is published.

The local folder stays the one that graphs are loaded from. A graph that was fetched is checked, sealed with this
machine's own key and kept there; the seal says whose signature it had. Where the store does not answer, everything is
as without one: that is counted, and tried again.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any

from ...folders import GRAPHS
from ...settings import DISK_LIMIT_BYTES
from ..artifact import Artifact, ArtifactError
from ..notes import OPTIONS, Notes, path_in
from ..signing.key_ring import KeyRing
from ..signing.own_key import OwnKey
from ..store import GraphStore, Superseded
from ..trust import Trust, Untrusted, VerifiedArtifact
from .lease import HeldLease
from .objects import Unreachable, open_store
from .publisher import Published, Publisher
from .refusals import Refusals
from .tier import Tier
from .tier_counters import TierCounters

log = logging.getLogger(__name__)

ROLES = ("worker", "builder")
_ASK_AGAIN_S = 20.0
"""What the store had no answer to is not asked again for so long: a call that no graph serves is asked for often."""
_WAIT_FOR_UPLOAD_S = 5.0
"""For how long a picture waits until its graph is published; after that the upload goes on without it."""
_TRY_AGAIN_S = 60.0
"""Between tries to publish what the store did not answer to."""


class TieredNotes(Notes):
    """Local notes; what they do not know is brought in from the tier once.

    Args:
        folders: see ``Notes``.
        trust: see ``Notes``.
        tier: the fleet's.
    """

    def __init__(self, folders: Sequence[Path], trust: Trust, tier: Tier) -> None:
        super().__init__(folders, trust)
        self._tier = tier
        self._asked: dict[tuple[str, str], float] = {}

    def add_call(self, call_key: str, graph_key: str, shapes: Mapping[str, Any]) -> None:
        """See ``Notes.add_call``; a builder tells the fleet, if the fleet has the graph."""
        super().add_call(call_key, graph_key, shapes)
        with self._counted():
            if self._tier.own_key.usable() is not None and self._tier.statement(graph_key) is not None:
                self._tier.note_call(call_key, graph_key, shapes)

    def calls(self, call_key: str) -> list[tuple[str, Mapping[str, Any]]]:
        """See ``Notes.calls``."""
        known = super().calls(call_key)
        if not known and self._may_ask("calls", call_key):
            with self._counted():
                for graph_key, shapes in self._tier.calls(call_key):
                    super().add_call(call_key, graph_key, shapes)
                known = super().calls(call_key)
        return known

    def read(self, kind: str, name: str) -> Any | None:
        """See ``Notes.read``."""
        value = super().read(kind, name)
        if value is None and kind == OPTIONS and self._may_ask(kind, name):
            with self._counted():
                value = self._tier.options(name) or None
                if value is not None:
                    self.add_options(name, value)
        return value

    def _may_ask(self, kind: str, name: str) -> bool:
        now = time.monotonic()
        if now - self._asked.get((kind, name), -_ASK_AGAIN_S) < _ASK_AGAIN_S:
            return False
        self._asked[kind, name] = now
        return True

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        except Unreachable as error:
            _count_unreachable(self._tier, error)


class TieredStore(GraphStore):
    """See ``GraphStore``; every method does what it does there, and then asks or tells the fleet.

    Args:
        folder: read and written.
        trust: seals and judges what is in it.
        tier: the fleet's.
        read_only: see ``GraphStore``.
        limit: see ``GraphStore``.
    """

    def __init__(
        self, folder: Path, trust: Trust, tier: Tier, read_only: Sequence[Path] = (), limit: int = DISK_LIMIT_BYTES
    ) -> None:
        super().__init__(folder, trust, read_only, limit)
        self.tier, self.counters = tier, tier.counters
        self.notes = TieredNotes([folder, *read_only], trust, tier)
        self._sealed_with = trust
        self._publisher = Publisher(tier, self._made_here, self._fetched, _TRY_AGAIN_S)
        self._leased: set[str] = set()

    def find(self, key: str) -> VerifiedArtifact | None:
        """See ``GraphStore.find``; what is not here, or was signed with a key that is revoked now, is fetched."""
        found = super().find(key)
        return found if found is not None and not self._was_revoked(found) else self._fetched(key)

    def save(self, artifact: Artifact) -> Path:
        """See ``GraphStore.save``; a builder publishes it as well.

        Raises:
            Superseded: another machine's compilation of this graph was published first; it is in the store now.
            OSError: it could not be written; it may be published.
        """
        self.tier.counters.count("compiles" if artifact.manifest.key in self._leased else "alone")
        try:
            path = super().save(artifact)
        finally:
            upload = self._publisher.begin(artifact) if self.tier.own_key.usable() is not None else None
        done = upload is not None and wait([upload], _WAIT_FOR_UPLOAD_S).done
        if upload is not None and done and upload.exception() is None and upload.result() is Published.ANOTHER:
            raise Superseded(path)
        return path

    @contextlib.contextmanager
    def compiling(self, key: str) -> Iterator[None]:
        """See ``GraphStore.compiling``; waits for whoever compiles it anywhere in the fleet."""
        with super().compiling(key):
            # Another process of this machine may have made it while we waited.
            lease = None if self.has(key) else self._turn(key)
            if lease is None:
                yield
                return
            self._leased.add(key)
            try:
                yield
            finally:
                self._leased.discard(key)
                self._publisher.release(key, lease)

    def has(self, key: str) -> bool:
        """Return True if a graph lies on this machine, whether it may be loaded or not."""
        return path_in(self.folder, GRAPHS, key).exists()

    def is_made_here(self, artifact: Artifact) -> bool:
        """Return True if this installation compiled a graph, and did not fetch it from the fleet."""
        return self._sealed_with.sealed_by_us(artifact.manifest_text, artifact.seal)

    def _made_here(self, key: str) -> Artifact | None:
        found = super().find(key)
        return found if found is not None and self.is_made_here(found) else None

    def _turn(self, key: str) -> HeldLease | None:
        try:
            return self.tier.turn(key)
        except Unreachable as error:
            _count_unreachable(self.tier, error)
            return None

    def _was_revoked(self, found: Artifact) -> bool:
        """Return True, and remove the graph, if it came from a builder whose key is revoked."""
        try:
            signed_with = self._sealed_with.fetched_from(found)
            if signed_with is None or not self.tier.keys.is_revoked(signed_with):
                return False
        except OSError as error:
            log.warning("OneDiff: not using the fetched graph %.12s: %s", found.manifest.key, error)
            return True
        self.tier.counters.count("refusals")
        log.warning("OneDiff: %.12s is removed: it was signed with key %s, revoked", found.manifest.key, signed_with)
        self.remove(found.manifest.key, lambda there: self._sealed_with.fetched_from(there) == signed_with)
        return True

    def _fetched(self, key: str) -> VerifiedArtifact | None:
        """Return a graph of the tier, sealed and kept here in place of any other compilation; None if it has none."""
        try:
            fetched = self.tier.fetch(key)
        except Unreachable as error:
            _count_unreachable(self.tier, error)
            return None
        if fetched is None:
            return None
        text, data, source = fetched.artifact.manifest_text, fetched.artifact.data, path_in(self.folder, GRAPHS, key)
        try:
            sealed = Artifact(text, self._sealed_with.seal_fetched(text, fetched.key_id), data)
            verified = self.verified(sealed, source)
        except (ArtifactError, Untrusted, OSError) as error:
            log.warning("OneDiff: not using the graph %.12s of the store: %s", key, error)
            return None
        try:
            self.adopt(sealed, source)
        except OSError as error:  # a full disk: it serves all the same, and is fetched again
            log.warning("OneDiff: a fetched graph could not be kept in %s: %s", source.parent, error)
        # Its key may have been revoked since it was judged. Whoever revokes writes that down before they sweep: so
        # either their sweep finds this graph, or we find here what they wrote.
        return None if self._was_revoked(verified) else verified


def _count_unreachable(tier: Tier, error: Unreachable) -> None:
    tier.counters.count("unreachable")
    log.log(
        logging.DEBUG if error.known else logging.WARNING,
        "OneDiff: the store at %s does not answer (%s); this machine's own graphs serve, and it is asked again later",
        tier.objects.url,
        error,
    )


def open_tier(url: str, role: str, cache: Path, config: Path) -> Tier:
    """Return the tier at a URL; asks it nothing yet.

    Args:
        url: see ``Objects``.
        role: ``builder`` or ``worker``.
        cache: the cache folder: what is refused is kept aside in it.
        config: the folder of keys.

    Raises:
        ValueError: the URL or the role is none; says what to give.
        OSError: the builder's key is missing or damaged, or others can read it.
    """
    if role not in ROLES:
        raise ValueError(f"ONEDIFF_STORE_ROLE is {role}; give {' or '.join(ROLES)}")
    keys, counters = KeyRing(config), TierCounters()
    # One that is revoked is no reason not to fetch: it is asked for at each use.
    if role == "builder" and keys.signer() is None:
        raise FileNotFoundError(f"there is no builder's key {keys.private_file}; make one with store keygen")
    own_key = OwnKey(keys, role == "builder")
    return Tier(open_store(url), keys, own_key, Refusals(cache / "refused", counters), counters)
