"""What the tier did in this process, as numbers for the report and for Prometheus."""

from __future__ import annotations

import threading
from collections import Counter

COUNTED = {
    "compiles": "graphs that this process compiled while it held their lease",
    "alone": "graphs that it compiled without a lease: it is a worker, the store was unreachable, or others had failed",
    "waits": "graphs that another machine was compiling when this one wanted them",
    "wait_seconds": "seconds spent waiting for other machines",
    "takeovers": "leases taken over from a machine that no longer renewed them",
    "fetched": "graphs fetched from the store, verified and kept here",
    "fetched_bytes": "their bytes",
    "fetched_seconds": "seconds spent fetching them",
    "published": "graphs put into the store",
    "published_bytes": "their bytes",
    "late": "own compilations that were dropped because another machine's was published first",
    "refusals": "objects refused: wrong signature, unknown or revoked key, another name, damage, too large",
    "unreachable": "times that the store was wanted and did not answer",
    "unpublished": "graphs that are kept here alone because the store did not answer; they are tried again",
}
"""Every counter and what it counts, in words for a help text. All only grow, but ``unpublished``."""


class TierCounters:
    """Counts by name. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def count(self, name: str, amount: float = 1) -> None:
        """Add to a counter, one of ``COUNTED``."""
        with self._lock:
            self._counts[name] += amount  # type: ignore[assignment]  # seconds are no integers

    def snapshot(self) -> dict[str, float]:
        """Return every counter so far."""
        with self._lock:
            return {name: round(self._counts[name], 3) for name in COUNTED}


def fleet_counters(counters: TierCounters | None) -> dict[str, float]:
    """Return what ``GraphStore.counters`` counted in this process, by the names of ``COUNTED``; empty of no tier."""
    return {} if counters is None else counters.snapshot()
