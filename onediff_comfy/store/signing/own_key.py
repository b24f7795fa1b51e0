"""A builder's own key, as it is at each use: a process that runs for weeks signs with the one that stands there now."""

from __future__ import annotations

import logging

from .key_ring import KeyRing, Signer

log = logging.getLogger(__name__)


class OwnKey:
    """The key that this machine signs with.

    Args:
        keys: of this machine.
        builder: it signs; a worker does not, whatever key it has.
    """

    def __init__(self, keys: KeyRing, builder: bool) -> None:
        self._keys, self._builder = keys, builder
        self._said = ""

    def signer(self) -> Signer:
        """Return the key to sign with now.

        Raises:
            PermissionError: this machine is no builder, or its key is revoked here: nobody should believe it.
            OSError: the key is missing or damaged, or others can read it; or the list of keys cannot be read.
        """
        if not self._builder:
            raise PermissionError("this machine has no key to sign with")
        signer = self._keys.signer()
        if signer is None:
            raise FileNotFoundError(f"there is no builder's key {self._keys.private_file}; make one with store keygen")
        if self._keys.is_revoked(signer.key_id):
            raise PermissionError(
                f"this builder's key {signer.key_id} is revoked; make another with store keygen --rotate"
            )
        return signer

    def usable(self) -> Signer | None:
        """Return the key to sign with now, or None; why a builder has none is said once in the log."""
        if not self._builder:
            return None
        try:
            signer = self.signer()
        except OSError as error:
            if self._said != str(error):
                log.warning("OneDiff: nothing is published or leased by this builder for now: %s", error)
                self._said = str(error)
            return None
        self._said = ""
        return signer
