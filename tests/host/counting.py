"""What metrics counted between two looks at them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def answered(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return how many calls graphs answered, and how many they did not, by the reason, between two snapshots."""
    fell = {reason: count - before["fallbacks"].get(reason, 0) for reason, count in after["fallbacks"].items()}
    return {
        "served": after["served"] - before["served"],
        "eager": {reason: count for reason, count in fell.items() if count},
    }
