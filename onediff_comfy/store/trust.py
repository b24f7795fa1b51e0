"""Whom we believe. A compiled graph is executable code: loading one runs it.

Every install makes a key of its own at first use and seals with it (HMAC-SHA256) what it writes.
What carries our seal loads silently. Anything else is refused until a person trusts that artifact,
by its digest, once. See docs/trust.md for the threat model.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import secrets
import threading
from pathlib import Path

import filelock

from ..files import write_atomically
from ..messages import message
from .artifact import Artifact

log = logging.getLogger(__name__)

_KEY_FILE = "signing.key"
_TRUSTED_FILE = "trusted.json"
_KEY_BYTES = 32


class Untrusted(Exception):
    """An artifact is neither sealed by this install nor trusted by its user; says how to trust it."""


class Trust:
    """Seals what we write and judges what we read.

    Where the key can be neither read nor written there is one for this process only.

    Args:
        folder: holds the key and the list of trusted digests. Made at first use.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key: bytes | None = None
        self._lock = threading.Lock()
        self._only_here = False

    @property
    def outlives_process(self) -> bool:
        """Whether other processes of this install, and later ones, believe what this one seals."""
        try:
            self._install_key()
        except OSError:
            return False
        return not self._only_here

    def seal(self, text: str) -> str:
        """The seal of this install over ``text``.

        Raises:
            OSError: the key is damaged.
        """
        return hmac.new(self._install_key(), text.encode(), hashlib.sha256).hexdigest()

    def sealed_by_us(self, text: str, seal: str) -> bool:
        """Whether ``seal`` is this install's over ``text``.

        Raises:
            OSError: the key is damaged.
        """
        return hmac.compare_digest(self.seal(text).encode(), seal.encode())

    def check(self, artifact: Artifact, source: Path) -> None:
        """Refuse an artifact that nobody we believe vouches for.

        Raises:
            Untrusted: with the words that explain how to trust it.
            OSError: the key is damaged.
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
        with self._lock:
            if self._key is None:
                self._key = self._found_key()
            return self._key

    def _found_key(self) -> bytes:
        path = self._folder / _KEY_FILE
        try:
            try:
                key = path.read_bytes()
            except FileNotFoundError:
                _make_key(path)
                key = path.read_bytes()
        except (OSError, NotImplementedError) as error:
            self._only_here = True
            log.warning(
                "OneDiff: the signing key %s can be neither read nor made (%s). Graphs are used until ComfyUI ends and "
                "compiled again at the next start, never in the background; to keep them, set ONEDIFF_CONFIG_DIR to a "
                "folder that can be written to",
                path,
                error,
            )
            return secrets.token_bytes(_KEY_BYTES)
        if len(key) != _KEY_BYTES:
            raise OSError(
                message("the signing key {path} is damaged; delete it, and graphs will be compiled anew", path=path)
            )
        return key


def _make_key(path: Path) -> None:
    """Write a new key to ``path``, whole; if another process was first, its key stays.

    Raises:
        OSError: it cannot be written.
        NotImplementedError: the file system has neither hard links nor locks.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    own = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(own, path)
        except FileExistsError:
            pass  # another process was first; its key is everybody's
        except OSError:  # no hard links here, and a rename would take the place of the key of whoever was first
            with filelock.FileLock(f"{path}.lock"):
                if not path.exists():
                    os.replace(own, path)
    finally:
        own.unlink(missing_ok=True)
