"""Whom we believe. A compiled graph is executable code: loading one runs it.

Every install makes a key of its own at first use and seals with it (HMAC-SHA256) what it writes.
What carries our seal loads silently. Anything else is refused until a person trusts that artifact,
by its digest, once. See docs/trust.md for the threat model.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
from pathlib import Path

from ..files import write_atomically
from ..messages import message
from .artifact import Artifact

_KEY_FILE = "signing.key"
_TRUSTED_FILE = "trusted.json"
_KEY_BYTES = 32


class Untrusted(Exception):
    """An artifact is neither sealed by this install nor trusted by its user; says how to trust it."""


class Trust:
    """Seals what we write and judges what we read.

    Args:
        folder: holds the key and the list of trusted digests. Made at first use.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key: bytes | None = None

    def seal(self, text: str) -> str:
        """The seal of this install over ``text``."""
        return hmac.new(self._install_key(), text.encode(), hashlib.sha256).hexdigest()

    def sealed_by_us(self, text: str, seal: str) -> bool:
        """Whether ``seal`` is this install's over ``text``."""
        return hmac.compare_digest(self.seal(text).encode(), seal.encode())

    def check(self, artifact: Artifact, source: Path) -> None:
        """Refuse an artifact that nobody we believe vouches for.

        Raises:
            Untrusted: with the words that explain how to trust it.
        """
        if self.sealed_by_us(artifact.manifest_text, artifact.seal):
            return
        if artifact.digest in self._trusted():
            return
        raise Untrusted(
            message(
                "the graph in {source} was not compiled by this installation, and a compiled graph is code that runs "
                "on your machine. If you trust where it came from: "
                "python -m onediff_comfy graphs import --trust {path}",
                source=source,
                path=json.dumps(str(source)),
            )
        )

    def trust(self, artifact: Artifact) -> None:
        """Believe this artifact, exactly as it is, from now on."""
        digests = sorted({*self._trusted(), artifact.digest})
        write_atomically(self._folder / _TRUSTED_FILE, json.dumps(digests, indent=1).encode())

    def _trusted(self) -> set[str]:
        try:
            return set(json.loads((self._folder / _TRUSTED_FILE).read_text()))
        except (OSError, ValueError):
            return set()

    def _install_key(self) -> bytes:
        if self._key is None:
            path = self._folder / _KEY_FILE
            if not path.exists():
                self._make_key(path)
            self._key = path.read_bytes()
            if len(self._key) != _KEY_BYTES:
                raise OSError(
                    message("the signing key {path} is damaged; delete it, and graphs will be compiled anew", path=path)
                )
        return self._key

    def _make_key(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        own = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        descriptor = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(secrets.token_bytes(_KEY_BYTES))
                file.flush()
                os.fsync(file.fileno())
            # link() fails if another process was first; then its key is everybody's.
            os.link(own, path)
        except FileExistsError:
            pass
        finally:
            own.unlink()
