"""What could not be captured or compiled in this process, so that nobody waits for the same failure again."""

from __future__ import annotations

from collections import defaultdict

_SIZES_TRIED = 2
"""So many sizes of a kind of call must have failed before the others are not tried any more."""


class Failures:
    """Reasons, by the keys of calls. A new node for the same model asks here before it tries."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}
        self._of_family: defaultdict[str, dict[str, str]] = defaultdict(dict)

    def add(self, family: str, key: str, reason: str) -> None:
        """No graph could be made for the calls named ``key``.

        Args:
            family: names calls like these of all sizes, but of the same widths; ``key`` itself if all were wanted.
        """
        self._reasons[key] = reason
        if key != family:
            self._of_family[family][key] = reason

    def reason(self, family: str, key: str) -> str | None:
        """Why no graph can be made for such calls, as far as that is known."""
        others = self._of_family.get(family, {}) if key != family else {}
        if key not in self._reasons and len(others) >= _SIZES_TRIED:
            return next(reversed(others.values()))
        return self._reasons.get(key)
