"""A signed object: three lines that say what it is and who says so, then the bytes.

    onediff-comfy signed 1
    {"about":{…},"key":KEY NAME,"name":PATH,"nonce":…,"sha256":…,"size":…}
    SIGNATURE OF THE TWO LINES ABOVE, BASE64
    the bytes

The statement names the path, so an object means nothing under another one. It comes first and is short: what nobody
believed signed, or is too large, is refused before it is downloaded.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..artifact import parse_json
from .key_ring import KeyRing, NotBelieved, Signer

START_BYTES = 8192
"""The three lines fit into so many bytes of an object."""
_MARK = b"onediff-comfy signed 1\n"
_HEX = re.compile(r"[0-9a-f]{16,64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FIELDS = {"about", "key", "name", "nonce", "sha256", "size"}


class Refused(Exception):
    """An object of the store may not be used; says why, in a line."""


@dataclass(frozen=True)
class Statement:
    """What a signer says of an object.

    Attributes:
        name: its path in the store.
        size: of the bytes.
        sha256: of the bytes.
        nonce: chosen anew by each writer: whose object it is.
        key: name of the key that signed.
        about: facts for choosing objects without downloading them.
    """

    name: str
    size: int
    sha256: str
    nonce: str
    key: str
    about: Mapping[str, str]


def signed(name: str, body: bytes, about: Mapping[str, str], signer: Signer) -> tuple[bytes, Statement]:
    """Return an object for the path ``name``, and its statement.

    Raises:
        ValueError: it says so much about itself that no reader would take it.
    """
    digest = hashlib.sha256(body).hexdigest()
    statement = Statement(name, len(body), digest, secrets.token_hex(16), signer.key_id, dict(about))
    text = json.dumps(asdict(statement), sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    lines = _MARK + text.encode() + b"\n"
    start = lines + base64.b64encode(signer.sign(lines)) + b"\n"
    if len(start) > START_BYTES:
        raise ValueError(f"{name} says more about itself than an object can")
    return start + body, statement


def statement_in(start: bytes, name: str, keys: KeyRing) -> tuple[Statement, int]:
    """Return what a believed signer says of the object at ``name``, and where its bytes begin.

    Args:
        start: the object's first ``START_BYTES``, or all of it.
        name: the path that it was read from.
        keys: whom this machine believes.

    Raises:
        Refused: nobody believed says so, or it is about another object.
        OSError: the list of keys is damaged.
    """
    mark, _, rest = start[:START_BYTES].partition(b"\n")
    text, _, rest = rest.partition(b"\n")
    signature, end, _ = rest.partition(b"\n")
    if mark + b"\n" != _MARK or not end:
        raise Refused("it is no signed object, or is cut short")
    try:
        fields = parse_json(text)
        wrong = _wrong_fields(fields)
        sealed = base64.b64decode(signature, validate=True)
    except (ValueError, RecursionError, binascii.Error):
        raise Refused("what it says of itself cannot be read") from None
    if wrong:
        raise Refused("what it says of itself cannot be read")
    try:
        keys.check(fields["key"], sealed, _MARK + text + b"\n")
    except NotBelieved as error:
        raise Refused(str(error)) from error
    statement = Statement(**fields)
    if statement.name != name:
        raise Refused(f"it was signed for {statement.name} and lies under another name")
    return statement, len(mark) + len(text) + len(signature) + 3


def check_body(statement: Statement, body: bytes) -> None:
    """Refuse bytes that are not those that the statement is of.

    Raises:
        Refused: says so.
    """
    if len(body) != statement.size or hashlib.sha256(body).hexdigest() != statement.sha256:
        raise Refused("its bytes are not those that were signed")


def _wrong_fields(fields: Any) -> bool:
    if not isinstance(fields, dict) or set(fields) != _FIELDS:
        return True
    about, size = fields["about"], fields["size"]
    texts = all(isinstance(fields[name], str) for name in ("name", "nonce", "key", "sha256"))
    return (
        not texts
        or not _HEX.fullmatch(fields["nonce"])
        or not _HEX.fullmatch(fields["key"])
        or not _SHA256.fullmatch(fields["sha256"])
        or type(size) is not int
        or size < 0
        or not isinstance(about, dict)
        or not all(isinstance(value, str) for value in about.values())
    )
