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
import re
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType

import filelock

from ..files import OTHERS_ANYTHING, OTHERS_WRITE, NotPrivate, private_lock, read_regular, write_atomically
from ..messages import message
from ..terminal import own_command, quoted
from .artifact import Artifact, parse_json

log = logging.getLogger(__name__)

_KEY_FILE = "signing.key"
_TRUSTED_FILE = "trusted.json"
_KEY_BYTES = 32
_KEY_ID_DIGITS = 16
_MAX_KEY_FILE = 1 << 10
_MAX_TRUSTED_FILE = 16 << 20
_LOCK_TIMEOUT_S = 10
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Untrusted(Exception):
    """An artifact is neither sealed by this install nor trusted by its user; says how to trust it."""


class VerifiedArtifact(Artifact):
    """An artifact that may be loaded. There is one way to make one, and it checks everything.

    First who vouches for the manifest, then what the manifest says, then that the parts are exactly the manifest's.

    Args:
        artifact: as it stands in a file.
        trust: whom we believe.
        source: the file, for messages.

    Raises:
        Untrusted: nobody whom we believe vouches for it.
        ArtifactError: the manifest cannot be read, or the parts are not exactly those that it names.
        OSError: the key, or the list of trusted graphs, is damaged.
    """

    def __init__(self, artifact: Artifact, trust: Trust, source: Path) -> None:
        trust.check(artifact, source)
        parts = MappingProxyType(artifact.checked_parts())
        super().__init__(artifact.manifest_text, artifact.seal, parts)


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
        self._only_here: str | None = None

    @property
    def outlives_process(self) -> bool:
        """Return True if other processes of this install, and later ones, believe what this one seals."""
        try:
            self._install_key()
        except OSError:
            return False
        return self._only_here is None

    def seal(self, text: str) -> str:
        """Return the seal of this install over ``text``.

        Raises:
            OSError: the key is damaged, or others can read it.
        """
        return hmac.new(self._install_key(), text.encode(), hashlib.sha256).hexdigest()

    def sealed_by_us(self, text: str, seal: str) -> bool:
        """Return True if ``seal`` is this install's over ``text``.

        Raises:
            OSError: the key is damaged.
        """
        return seal.isascii() and hmac.compare_digest(self.seal(text), seal)

    def seal_fetched(self, text: str, key_id: str) -> str:
        """Return the seal over a manifest that somebody else signed: it says who did, and none of ours is like it.

        Args:
            text: the manifest.
            key_id: name of the key that signed it, 16 hexadecimal digits.

        Raises:
            OSError: see ``seal``.
        """
        return key_id + self.seal(f"fetched {key_id}\n{text}")[len(key_id) :]

    def fetched_from(self, artifact: Artifact) -> str | None:
        """Return the name of the key that signed an artifact which this install fetched; None of all others.

        Raises:
            OSError: the key is damaged.
        """
        if not artifact.seal.isascii():
            return None
        key_id = artifact.seal[:_KEY_ID_DIGITS]
        sealed = self.seal_fetched(artifact.manifest_text, key_id)
        return key_id if hmac.compare_digest(sealed, artifact.seal) else None

    def check(self, artifact: Artifact, source: Path) -> None:
        """Refuse an artifact that nobody we believe vouches for.

        Raises:
            Untrusted: with the words that explain how to trust it.
            OSError: the key is damaged.
        """
        if self.sealed_by_us(artifact.manifest_text, artifact.seal) or self.fetched_from(artifact) is not None:
            return
        if artifact.digest in self._trusted():
            return
        if self._only_here is not None:  # it may be our own: nobody is to be asked to trust it
            raise Untrusted(
                message(
                    "nobody can tell who compiled the graph in {source}, for the signing key {path} can be neither "
                    "read nor made ({error}); let this user read it, or set ONEDIFF_CONFIG_DIR to its folder",
                    source=source,
                    path=self._folder / _KEY_FILE,
                    error=self._only_here,
                )
            )
        raise Untrusted(
            message(
                "the graph in {source} was not compiled by this installation, and a compiled graph is code that runs "
                "on your machine. If you trust where it came from: "
                "{command} graphs import --trust {path}",
                source=source,
                command=own_command(),
                path=quoted(source.absolute()),
            )
        )

    def trust(self, artifact: Artifact) -> None:
        """Believe this artifact, exactly as it is, from now on.

        Raises:
            OSError: the list of trusted graphs is damaged, or cannot be written.
        """
        self._change(lambda digests: digests | {artifact.digest})

    def distrust(self, artifact: Artifact) -> None:
        """Take back ``trust``.

        Raises:
            OSError: the list of trusted graphs is damaged, or cannot be written.
        """
        self._change(lambda digests: digests - {artifact.digest})

    def _change(self, change: Callable[[set[str]], set[str]]) -> None:
        path = self._folder / _TRUSTED_FILE
        with private_lock(path.with_suffix(".lock"), _LOCK_TIMEOUT_S):  # another process may trust another at once
            write_atomically(path, json.dumps(sorted(change(self._trusted())), indent=1).encode())

    def _trusted(self) -> set[str]:
        path = self._folder / _TRUSTED_FILE
        try:
            content = read_regular(path, _MAX_TRUSTED_FILE, forbidden=OTHERS_WRITE)
        except FileNotFoundError:
            return set()
        try:
            digests = parse_json(content)
        except (ValueError, RecursionError):
            digests = None
        if not isinstance(digests, list) or not all(isinstance(d, str) and _DIGEST.fullmatch(d) for d in digests):
            raise OSError(
                message(
                    "the list of trusted graphs {path} is damaged; delete it, and import again with --trust what you "
                    "trust",
                    path=path,
                )
            )
        return set(digests)

    def _install_key(self) -> bytes:
        with self._lock:
            if self._key is None:
                self._key = self._found_key()
            return self._key

    def _found_key(self) -> bytes:
        path = self._folder / _KEY_FILE
        try:
            try:
                key = read_regular(path, _MAX_KEY_FILE, forbidden=OTHERS_ANYTHING)
            except FileNotFoundError:
                _make_key(path)
                key = read_regular(path, _MAX_KEY_FILE, forbidden=OTHERS_ANYTHING)
        except NotPrivate:
            raise  # others may have read it: what it seals is worth nothing
        except (OSError, NotImplementedError) as error:
            self._only_here = str(error)
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
