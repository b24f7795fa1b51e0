"""The lease of a graph: exactly one machine of a fleet compiles it while the others wait.

A lease is an object that its holder writes anew every third of ``ttl_s``. No clocks are compared: who waits calls it
dead when its version has not changed for ``ttl_s`` on the waiter's own clock, and takes it over by replacing exactly
that version, which one of several waiters can. A holder that was frozen meanwhile finds another's lease when it
wakes. What it compiled is kept out by put-if-absent of the graph, not by the lease: the lease saves work, it decides
nothing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import secrets
import threading
import time
from dataclasses import dataclass

from ..artifact import parse_json
from ..signing.key_ring import KeyRing
from ..signing.own_key import OwnKey
from ..signing.signed import START_BYTES, Refused, check_body, signed, statement_in
from .objects import Objects, Unreachable

log = logging.getLogger(__name__)

HELD, DONE, FAILED = "held", "done", "failed"
_MAX_LEASE = START_BYTES + (1 << 12)


@dataclass(frozen=True)
class LeaseTimes:
    """Seconds that leases go by.

    Attributes:
        ttl_s: after so long without a renewal a holder is dead.
        poll_s: who waits looks about so often.
        longest_s: a holder renews no longer than this: a compiler that hangs must not hold everybody.
    """

    ttl_s: float = 30.0
    poll_s: float = 2.0
    longest_s: float = 3600.0


@dataclass(frozen=True)
class SeenLease:
    """A lease as it was found.

    Attributes:
        version: of the object.
        owner: process and machine, for people.
        nonce: of the holder.
        state: ``HELD``; ``DONE``, the graph was published; ``FAILED``, it was not.
        failures: how many holders in a row published nothing.
    """

    version: str
    owner: str
    nonce: str
    state: str
    failures: int


class Leases:
    """Looks at leases and takes them.

    Args:
        objects: the store.
        keys: whose leases count; what nobody believed signed is no lease, and is taken over.
        times: see ``LeaseTimes``.
    """

    def __init__(self, objects: Objects, keys: KeyRing, times: LeaseTimes) -> None:
        self._objects, self._keys, self.times = objects, keys, times

    def look(self, key: str) -> SeenLease | None:
        """Return the lease of a graph; None if there never was one.

        Raises:
            Unreachable: the store did not answer.
        """
        path = _path(key)
        piece = self._objects.read(path, 0, _MAX_LEASE)
        if piece is None:
            return None
        try:
            statement, begin = statement_in(piece.content, path, self._keys)
            body = piece.content[begin:]
            check_body(statement, body)
            fields = parse_json(body)
            return SeenLease(piece.version, fields["owner"], fields["nonce"], fields["state"], int(fields["failures"]))
        except (Refused, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            log.debug("no lease at %s: %s", path, error)
            return SeenLease(piece.version, "", "", FAILED, 0)

    def take(self, key: str, seen: SeenLease | None, own_key: OwnKey) -> HeldLease | None:
        """Take a lease that nobody holds, or that is dead; return None if another was quicker.

        Args:
            key: of the graph.
            seen: the lease as it was found; exactly this one is taken over.
            own_key: of this builder.

        Raises:
            Unreachable: the store did not answer.
        """
        held = HeldLease(self, key, own_key, failures=seen.failures if seen else 0)
        return held if held.begin(seen.version if seen else None) else None

    def write(self, key: str, content: bytes, version: str | None) -> str | None:
        """Write a lease: anew, or over one of this version. Return its version; None if another stands there.

        Raises:
            Unreachable: the store did not answer.
        """
        if version is None:
            return self._objects.create(_path(key), content)
        return self._objects.replace(_path(key), content, version)


class HeldLease:
    """A lease of this process, renewed by a thread of its own until it is released.

    Args:
        leases: where it stands.
        key: of the graph.
        own_key: of this builder, asked at each renewal: it may be another by then.
        failures: how many holders before it published nothing.
    """

    def __init__(self, leases: Leases, key: str, own_key: OwnKey, failures: int) -> None:
        self._leases, self._key, self._own_key = leases, key, own_key
        self._failures = failures
        self._nonce = secrets.token_hex(16)
        self._version: str | None = None
        self._writing = threading.Lock()
        self._ended = threading.Event()

    def begin(self, over: str | None) -> bool:
        """Write the lease, over a version or where there is none, and renew it from now on.

        Returns:
            False if another has it, or if this builder has no key to sign with now.

        Raises:
            Unreachable: the store did not answer.
        """
        content = self._content(HELD)
        if content is None:
            return False
        self._version = self._leases.write(self._key, content, over)
        if self._version is None and not self._is_ours_after_all():
            return False
        threading.Thread(target=self._renew, name=f"onediff-lease-{self._key[:12]}", daemon=True).start()
        return True

    def release(self, published: bool) -> None:
        """Give the lease back. Where the store does not answer, it dies by itself."""
        self._ended.set()
        self._failures = 0 if published else self._failures + 1
        with contextlib.suppress(Unreachable):
            self._rewrite(DONE if published else FAILED)

    def _renew(self) -> None:
        times = self._leases.times
        last = time.monotonic() + times.longest_s
        while not self._ended.wait(times.ttl_s / 3) and time.monotonic() < last:
            with contextlib.suppress(Unreachable):  # tried again soon; if it stays so, another takes over
                if not self._rewrite(HELD):
                    log.info("OneDiff: the lease of %.12s is no longer this process's", self._key)
                    return

    def _rewrite(self, state: str) -> bool:
        """Write the lease over the version of before. Return False if it is another's by now, or nobody's to sign."""
        with self._writing:
            if state == HELD and self._ended.is_set():
                return True
            for _ in range(2):
                assert self._version is not None
                content = self._content(state)
                if content is None:
                    return False
                version = self._leases.write(self._key, content, self._version)
                if version is not None:
                    self._version = version
                    return True
                if not self._is_ours_after_all():
                    return False
            return False

    def _is_ours_after_all(self) -> bool:
        """Return True if what stands there is ours: the answer to a write that succeeded may get lost."""
        seen = self._leases.look(self._key)
        if seen is None or seen.nonce != self._nonce:
            return False
        self._version = seen.version
        return True

    def _content(self, state: str) -> bytes | None:
        signer = self._own_key.usable()
        if signer is None:
            return None
        body = {
            "owner": f"{os.getpid()}@{platform.node()}",
            "nonce": self._nonce,
            "state": state,
            "failures": self._failures,
        }
        # Signed with a nonce of its own each time, so that no two renewals are one version.
        return signed(_path(self._key), json.dumps(body).encode(), {}, signer)[0]


class Watch:
    """Tells a waiter whether a lease is alive, by the waiter's own clock.

    What stopped the waiter, a machine that slept or had no memory left, may have stopped the holder too. So time counts
    while the waiter looks, and not when it has not looked for half of ``ttl_s``.

    Args:
        ttl_s: a lease whose version has not changed for so long is dead.
    """

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._version = ""
        self._since = self._looked = 0.0

    def alive(self, seen: SeenLease | None) -> bool:
        """Return True if somebody holds this lease, as far as can be told yet."""
        if seen is None or seen.state != HELD:
            return False
        now = time.monotonic()
        if seen.version != self._version or now - self._looked > self._ttl_s / 2:
            self._version, self._since = seen.version, now
        self._looked = now
        return now - self._since < self._ttl_s


def _path(key: str) -> str:
    return f"v1/leases/{key}"
