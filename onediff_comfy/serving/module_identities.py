"""What a module has been so far, and whether what it is now is worth another trace."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..capture.target.target import Target
from ..messages import Message, message
from ..settings import MOST_IDENTITIES

MOST_CHANGES = 4
"""Of a module in one run. Each costs a look at all of its code, which takes longer than most steps."""

_MOST_STATEFUL = 3  # a table that is filled once makes one


@dataclass
class Identities:
    """What a module has been.

    Attributes:
        known: fingerprints.
        stateful: those of them as which its forward changed what it keeps.
        at_last: the fingerprint at the last look, once some were stateful, or the module was restless.
        last_known: attributes, of an earlier identity.
        changing: what has changed since.
        restless: whether there were the most changes in one run.
    """

    known: set[str] = field(default_factory=set)
    stateful: set[str] = field(default_factory=set)
    at_last: str = ""
    last_known: dict[tuple[str, str], str] = field(default_factory=dict)
    changing: tuple[Target, Message] | None = None
    restless: bool = False

    def objection(self, target: Target, changes: int) -> Message | None:
        """Note that a module has this identity. Return why nothing that is captured of it could be relied on, if so.

        What a forward keeps, or somebody sets for each call, makes another identity of its module again and again, and
        each image would wait for another trace. After some of these only one is traced that the module still has at
        the next look.

        Args:
            changes: how often it has become another in this run.
        """
        if changes >= MOST_CHANGES:
            self.restless = True
            return self._what_changes(target)
        if changes == MOST_CHANGES - 1:
            self.last_known = target.attributes()
        if self.restless or len(self.stateful) >= _MOST_STATEFUL:
            lasts = target.fingerprint in self.known or target.fingerprint == self.at_last
            self.at_last = target.fingerprint
            if not lasts or target.fingerprint in self.stateful:
                return self.changing[1] if self.changing else message("the model's forward changes what it keeps")
        if target.fingerprint in self.known:
            return None
        if len(self.known) >= MOST_IDENTITIES:
            return self._what_changes(target)
        self.known.add(target.fingerprint)
        if len(self.known) == MOST_IDENTITIES:
            self.last_known = target.attributes()
        return None

    def _what_changes(self, target: Target) -> Message:
        """Say why a module that had the most identities, or changes, has another one again."""
        if self.changing is None or self.changing[0] is not target:
            before, now = self.last_known, target.attributes()
            changed = [place for place in now | before if now.get(place) != before.get(place)]
            reason = message("its code, layers or weights change again and again")
            if changed:
                layer, name = changed[0]
                reason = message("attribute {name} of layer {layer} changes again and again", name=name, layer=layer)
            self.changing = target, reason
        return self.changing[1]
