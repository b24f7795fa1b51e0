"""Who may speak for a fleet: builders sign with a private key, every machine holds the public ones that it believes.

    <config>/store_builder.key    a builder's private key, Ed25519 in PKCS8 PEM, mode 0600
    <config>/store_keys.json      the public keys that this machine believes, and those that it never will again

Several keys are believed at a time, so that they can be changed without a pause. A key has a name, its first 16
hexadecimal digits of sha256.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from ...files import OTHERS_ANYTHING, OTHERS_WRITE, private_lock, read_regular, write_atomically
from ..artifact import parse_json

_PRIVATE = "store_builder.key"
_PUBLIC = "store_keys.json"
_MAX_PRIVATE, _MAX_PUBLIC = 1 << 12, 1 << 20
_LOCK_TIMEOUT_S = 10
_PREFIX = "onediff-ed25519:"
_KEY_ID = re.compile(r"[0-9a-f]{16}")
_RAW_BYTES = 32
# Points of order 1, 2, 4 and 8, without the bit of the sign, in every spelling that is decoded. As a key, each verifies
# what nobody signed: RFC 8032 and OpenSSL let it, libsodium refuses the same list.
_OF_LOW_ORDER = frozenset(
    bytes.fromhex(point)
    for point in (
        "00" * 32,
        "01" + "00" * 31,
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        "ec" + "ff" * 30 + "7f",
        "ed" + "ff" * 30 + "7f",
        "ee" + "ff" * 30 + "7f",
    )
)


class NotBelieved(Exception):
    """A signature is not by a key that this machine believes, or not over these bytes; says which."""


@dataclass(frozen=True)
class KnownKey:
    """A public key as it stands in the list.

    Attributes:
        key_id: its name.
        public: its text, as ``store keygen`` prints it; empty of one that was only revoked.
        label: what a person called it.
        since: when it was put there, ISO 8601 in UTC.
        revoked: it is never believed again.
    """

    key_id: str
    public: str
    label: str
    since: str
    revoked: bool


class Signer:
    """A builder's private key."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public = _text_of(key.public_key())
        self.key_id = key_id_of(self.public)

    def sign(self, message: bytes) -> bytes:
        """Return the signature, 64 bytes."""
        return self._key.sign(message)

    def pem(self) -> bytes:
        """Return the private key as a file has it."""
        return self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


class KeyRing:
    """The keys of this machine, read anew at each question: what is revoked is so at once, in every process.

    Args:
        folder: of the configuration.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def private_file(self) -> Path:
        """Return where the private key is, or would be."""
        return self._folder / _PRIVATE

    def signer(self) -> Signer | None:
        """Return this builder's key; None if there is none.

        Raises:
            OSError: it is damaged, or others can read it.
        """
        try:
            content = read_regular(self.private_file, _MAX_PRIVATE, forbidden=OTHERS_ANYTHING)
        except FileNotFoundError:
            return None
        try:
            key = load_pem_private_key(content, password=None)
        except (ValueError, TypeError) as error:
            raise OSError(f"{self.private_file} is no private key in PEM; make one with store keygen") from error
        if not isinstance(key, Ed25519PrivateKey):
            raise OSError(f"{self.private_file} is not an Ed25519 key; make one with store keygen")
        return Signer(key)

    def make(self, label: str, rotate: bool = False) -> Signer:
        """Make a private key for this builder, and believe it here.

        Args:
            label: what people call it.
            rotate: take the place of the key that there is; what that one signed stays believed.

        Raises:
            FileExistsError: there is one.
            OSError: it cannot be written.
        """
        with self._locked():
            if self.private_file.exists() and not rotate:
                raise FileExistsError(f"{self.private_file} is there; --rotate makes another in its place")
            signer, lists = Signer(Ed25519PrivateKey.generate()), self._lists()
            lists["trusted"][signer.key_id] = _entry(signer.public, label)
            self._write(lists)
            write_atomically(self.private_file, signer.pem())
        return signer

    def trust(self, public: str, label: str) -> str:
        """Believe a public key from now on; return its name.

        Raises:
            ValueError: the text is no public key, or one that was revoked.
            OSError: the list is damaged, or cannot be written.
        """
        key_id = key_id_of(public)
        with self._locked():
            lists = self._lists()
            if key_id in lists["revoked"]:
                raise ValueError(f"key {key_id} was revoked and is not believed again; make another with store keygen")
            lists["trusted"][key_id] = _entry(public.strip(), label)
            self._write(lists)
        return key_id

    def revoke(self, key_id: str, label: str = "") -> None:
        """Never believe a key again, known or not.

        Raises:
            ValueError: no key has such a name.
            OSError: the list is damaged, or cannot be written.
        """
        if not _KEY_ID.fullmatch(key_id):
            raise ValueError(f"{key_id} is not the name of a key, which is 16 hexadecimal digits; see store status")
        with self._locked():
            lists = self._lists()
            known = lists["trusted"].pop(key_id, _entry("", label))
            lists["revoked"][key_id] = {**known, "since": _now()}
            self._write(lists)

    def known(self) -> list[KnownKey]:
        """Return every key in the list, those that are believed first.

        Raises:
            OSError: the list is damaged, or others can write to it.
        """
        lists = self._lists()
        return [
            KnownKey(key_id, entry["key"], entry["label"], entry["since"], kind == "revoked")
            for kind in ("trusted", "revoked")
            for key_id, entry in sorted(lists[kind].items())
        ]

    def is_revoked(self, key_id: str) -> bool:
        """Return True if a key is never to be believed again.

        Raises:
            OSError: the list is damaged, or others can write to it.
        """
        return key_id in self._lists()["revoked"]

    def check_that_anybody_is_believed(self) -> None:
        """Refuse to judge what others signed where nobody is believed, as in a folder that was named wrongly.

        Raises:
            OSError: the list has no key, is damaged, or others can write to it.
        """
        if not self._lists()["trusted"]:
            raise OSError(f"no key is believed here, by {self._folder / _PUBLIC}; see store trust")

    def check(self, key_id: str, signature: bytes, message: bytes) -> None:
        """Refuse a signature that is not by a believed key over exactly this message.

        Raises:
            NotBelieved: says why.
            OSError: the list of keys is damaged, or others can write to it.
        """
        lists = self._lists()
        if key_id in lists["revoked"]:
            raise NotBelieved(f"it is signed with key {key_id}, which was revoked")
        entry = lists["trusted"].get(key_id)
        if entry is None:
            raise NotBelieved(f"it is signed with key {key_id}, which this machine does not know; see store trust")
        try:
            Ed25519PublicKey.from_public_bytes(_raw(entry["key"])).verify(signature, message)
        except InvalidSignature:
            raise NotBelieved(f"its signature is not by key {key_id}, as it says") from None

    def _lists(self) -> dict[str, dict[str, dict[str, str]]]:
        path = self._folder / _PUBLIC
        try:
            lists = parse_json(read_regular(path, _MAX_PUBLIC, forbidden=OTHERS_WRITE))
        except FileNotFoundError:
            return {"trusted": {}, "revoked": {}}
        except (ValueError, RecursionError):
            lists = None
        if not _is_lists(lists):
            raise OSError(f"the list of keys {path} is damaged; delete it, and trust again the keys that you trust")
        return lists

    def _locked(self) -> AbstractContextManager[object]:
        """Keep other processes from changing the keys: what is read is what is changed, and nothing is lost."""
        return private_lock((self._folder / _PUBLIC).with_suffix(".lock"), _LOCK_TIMEOUT_S)

    def _write(self, lists: Mapping[str, Any]) -> None:
        write_atomically(self._folder / _PUBLIC, json.dumps(lists, indent=1, sort_keys=True).encode())


def key_id_of(public: str) -> str:
    """Return the name of a public key.

    Raises:
        ValueError: the text is no public key.
    """
    return hashlib.sha256(_raw(public)).hexdigest()[:16]


def _raw(public: str) -> bytes:
    text = public.strip()
    try:
        raw = base64.b64decode(text.removeprefix(_PREFIX), validate=True)
    except ValueError:
        raw = b""
    if not text.startswith(_PREFIX) or len(raw) != _RAW_BYTES:
        raise ValueError(f"this is no public key; give the line {_PREFIX}… that store keygen printed, or its file")
    if raw[:-1] + bytes([raw[-1] & 0x7F]) in _OF_LOW_ORDER:
        raise ValueError(f"{text} is a key by which anything counts as signed; give the line that store keygen printed")
    return raw


def _text_of(key: Ed25519PublicKey) -> str:
    return _PREFIX + base64.b64encode(key.public_bytes(Encoding.Raw, PublicFormat.Raw)).decode()


def _is_lists(lists: Any) -> bool:
    if not isinstance(lists, dict) or set(lists) != {"trusted", "revoked"}:
        return False
    entries = [(name, entry) for kind in lists.values() if isinstance(kind, dict) for name, entry in kind.items()]
    return (
        all(isinstance(kind, dict) for kind in lists.values())
        and all(
            _KEY_ID.fullmatch(name)
            and isinstance(entry, dict)
            and {"key", "label", "since"} <= set(entry)
            and all(isinstance(value, str) for value in entry.values())
            for name, entry in entries
        )
        and all(_names_itself(name, entry) for name, entry in lists["trusted"].items())
    )


def _names_itself(key_id: str, entry: Mapping[str, str]) -> bool:
    try:
        return key_id_of(entry["key"]) == key_id
    except ValueError:
        return False


def _entry(public: str, label: str) -> dict[str, str]:
    return {"key": public, "label": label, "since": _now()}


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def default_label() -> str:
    """Return what a key is called if nobody says: the machine's name."""
    return os.uname().nodename if hasattr(os, "uname") else os.environ.get("COMPUTERNAME", "")
