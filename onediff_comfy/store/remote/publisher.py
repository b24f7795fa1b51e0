"""Publishing, away from whoever waits for a picture: on threads, and again later where the store did not answer."""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from ..artifact import Artifact
from .lease import HeldLease
from .objects import Unreachable
from .tier import Tier

log = logging.getLogger(__name__)


class Published(enum.Enum):
    """What became of a graph that was to be published."""

    OURS = "the fleet's graph is this one"
    ANOTHER = "another machine's was there first"
    NOT_NOW = "the store did not answer; it is tried again"


class Publisher:
    """Publishes what this process compiled.

    Args:
        tier: of the fleet.
        kept: returns a graph of this machine by its key, or None.
        take_theirs: called with the key of a graph of which another compilation was published first.
        try_again_s: seconds between tries, while the store does not answer.
    """

    def __init__(
        self,
        tier: Tier,
        kept: Callable[[str], Artifact | None],
        take_theirs: Callable[[str], object],
        try_again_s: float,
    ) -> None:
        self._tier, self._kept, self._take_theirs = tier, kept, take_theirs
        self._try_again_s = try_again_s
        self._lock = threading.Lock()
        self._under_way: dict[str, Future[Published]] = {}
        self._waiting: set[str] = set()

    def begin(self, artifact: Artifact) -> Future[Published]:
        """Begin to publish a graph; what it returns tells how that ended."""
        key, outcome = artifact.manifest.key, Future[Published]()
        self._under_way[key] = outcome

        def work() -> None:
            try:
                outcome.set_result(self._published(artifact))
            except BaseException as error:
                log.warning("OneDiff: a graph could not be published: %s", error)
                outcome.set_exception(error)

        # No daemon: a process that only compiles ends at once, and its graph is to be published first.
        threading.Thread(target=work, name=f"onediff-publish-{key[:12]}").start()
        return outcome

    def release(self, key: str, lease: HeldLease) -> None:
        """Release the lease of a graph, once its upload is done if one is under way."""
        upload = self._under_way.pop(key, None)
        if upload is not None:
            upload.add_done_callback(lambda done: lease.release(published=_is_there(done)))
            return
        try:
            lease.release(published=self._tier.statement(key) is not None)
        except Unreachable:
            lease.release(published=False)

    def _published(self, artifact: Artifact) -> Published:
        key = artifact.manifest.key
        try:
            if self._tier.publish(artifact):
                return Published.OURS
        except Unreachable as error:
            log.warning("OneDiff: a compiled graph is kept on this machine alone for now: %s", error)
            self._again_later(key)
            return Published.NOT_NOW
        log.info("OneDiff: another machine's compilation of %.12s was published first, and is used", key)
        self._take_theirs(key)
        return Published.ANOTHER

    def _again_later(self, key: str) -> None:
        with self._lock:
            if key in self._waiting:
                return
            self._tier.counters.count("unpublished")
            self._waiting.add(key)
            if len(self._waiting) == 1:
                threading.Thread(target=self._try_again, name="onediff-publish-again", daemon=True).start()

    def _try_again(self) -> None:
        while True:
            time.sleep(self._try_again_s)
            for key in sorted(self._waiting):
                if not self._done_with(key):
                    break  # the others need not find out too
                with self._lock:
                    self._waiting.discard(key)
                    self._tier.counters.count("unpublished", -1)
                    if not self._waiting:
                        return

    def _done_with(self, key: str) -> bool:
        """Publish a graph that was not; return False if the store still does not answer."""
        artifact = self._kept(key)
        try:
            # None if it was removed meanwhile.
            return artifact is None or self._published(artifact) is not Published.NOT_NOW
        except Exception as error:
            log.warning("OneDiff: a graph could not be published: %s", error)
            return True


def _is_there(upload: Future[Published]) -> bool:
    return upload.exception() is None and upload.result() is not Published.NOT_NOW
