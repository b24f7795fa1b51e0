"""The artifact: one compiled graph as it stands in a file (see ``graph_file``).

The file is a safetensors container, a format that can be read without running anything: a JSON
header, then bytes. Each graph has

* a *manifest* in the header's metadata: plain JSON that says what the graph is, for people and for
  checking, with the sha256 of every part;
* a *seal* beside it: who vouches for the manifest (see ``trust``);
* *parts*: byte strings whose meaning the engine knows. They may be code. Nobody interprets them
  before the manifest's seal and the parts' digests were checked.

Weights are never in an artifact.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn

from ..messages import message, printable

FORMAT = 2
"""Raised when an older reader could misunderstand a newer file."""
LONGEST_OPTION, MOST_OPTIONS = 2_000, 1_000
"""Characters of the name of what is read, and names for one reader: a manifest with more is refused."""

# Of arrays, objects and their members: a header of nothing but empty arrays takes twenty times its size in memory.
_MAX_VALUES = 2_000_000

_PART_NAME = re.compile(r"(?!.*(?:^|/)\.{1,2}(?:/|$))[A-Za-z0-9_.+-]+(?:/[A-Za-z0-9_.+-]+)*", re.ASCII)
_LONGEST_NAME = 250


class ArtifactError(Exception):
    """A file is no artifact, is damaged, or is of a format this version cannot read."""


@dataclass(frozen=True)
class Part:
    """Size (in bytes) and sha256 of one byte string."""

    size: int
    sha256: str

    @classmethod
    def of(cls, data: bytes) -> Part:
        return cls(len(data), hashlib.sha256(data).hexdigest())


@dataclass(frozen=True)
class Manifest:
    """What a compiled graph is.

    Attributes:
        key: its graph key.
        capture: digest of the capture it was compiled from.
        target: class of the module, for people.
        engine: which engine made it and can load it.
        options: the engine's options.
        environment: versions, hardware and numeric settings it was compiled under.
        signature: the call it was captured for, one fact a line.
        shapes: the sizes of a call's tensors that it serves (``ShapeRange`` as JSON).
        binding: how to call it: ``inputs`` as [kind, name, index] and ``output`` as a tree
            specification; ``constants`` are parts named ``constant/<name>``, with shape and dtype here.
        calls: keys of the calls it is known to serve.
        options_read: what the call reads, by who reads it: its target, or that with functions that nodes put into it.
        parts: of its payload.
        compile_seconds: what compiling took.
        created: when, ISO 8601 in UTC.
        format: of this manifest.
    """

    key: str
    capture: str
    target: str
    engine: str
    options: Mapping[str, str]
    environment: Mapping[str, str]
    signature: Sequence[str]
    shapes: Mapping[str, Any]
    binding: Mapping[str, Any]
    calls: Sequence[str]
    options_read: Mapping[str, Sequence[str]]
    parts: Mapping[str, Part]
    compile_seconds: float
    created: str
    format: int = FORMAT

    def to_json(self) -> str:
        """Return the canonical text, which is what is sealed."""
        return json.dumps(asdict(self), sort_keys=True, ensure_ascii=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Read a manifest.

        Raises:
            ArtifactError: the text is no manifest, or one of a newer format.
        """
        try:
            from . import schema
        except ImportError as error:
            raise ArtifactError(
                message("compiled graphs cannot be read without pydantic, one of ComfyUI's requirements; install it")
            ) from error
        try:
            fields = parse_json(text)
            if fields["format"] != FORMAT:
                remedy = message("update the pack") if fields["format"] > FORMAT else message("compile it again")
                raise ArtifactError(
                    message(
                        "the graph is of format {theirs} and this onediff-comfy reads {ours}; {remedy}",
                        theirs=fields["format"],
                        ours=FORMAT,
                        remedy=remedy,
                    )
                )
            schema.check(fields)
            known = {name: fields[name] for name in cls.__dataclass_fields__}
            return cls(**known | {"parts": {name: Part(**part) for name, part in fields["parts"].items()}})
        except ArtifactError:
            raise
        except Exception as error:  # any shape of JSON may come in here
            raise ArtifactError(
                message(
                    "the manifest cannot be read ({kind}: {error})", kind=type(error).__name__, error=in_short(error)
                )
            ) from error


@dataclass(frozen=True)
class Artifact:
    """One graph as it stands in a file.

    Attributes:
        manifest_text: exactly as written, for the seal.
        seal: who vouches for the manifest; see ``trust``.
        data: the parts by name. Unchecked until ``checked_parts``.
    """

    manifest_text: str
    seal: str
    data: Mapping[str, bytes] = field(repr=False)

    @functools.cached_property
    def manifest(self) -> Manifest:
        """Return what the graph is, as its text says.

        Raises:
            ArtifactError: see ``Manifest.from_json``.
        """
        return Manifest.from_json(self.manifest_text)

    @property
    def digest(self) -> str:
        """Return the sha256 of the manifest, and through it of every part: the artifact's identity."""
        return hashlib.sha256(self.manifest_text.encode()).hexdigest()

    def checked_parts(self) -> dict[str, bytes]:
        """Return the parts, after comparing each with its digest: those that the manifest names and no others.

        Each is read once, and what was compared is what is returned: another process may be writing to the file.

        Raises:
            ArtifactError: a part is missing, is not what the manifest says, or is one that the manifest does not name.
        """
        declared = self.manifest.parts
        for name in self.data:
            if name not in declared:
                raise ArtifactError(message("part {name} is not in the manifest", name=name))
        checked = {}
        for name, part in declared.items():
            if name not in self.data:
                raise ArtifactError(message("part {name} is missing", name=name))
            checked[name] = self.data[name]
            if Part.of(checked[name]) != part:
                raise ArtifactError(message("part {name} is damaged", name=name))
        return checked


def parse_json(text: str | bytes) -> Any:
    """Read JSON of which each reader makes the same: UTF-8, no key twice, no number that is none.

    Raises:
        ValueError, RecursionError: it is something else.
    """
    text = text.decode("utf-8") if isinstance(text, bytes) else text  # of bytes, Python would guess the encoding
    if text.count("[") + text.count("{") + text.count(",") > _MAX_VALUES:
        raise ValueError("more values than any graph has")
    return json.loads(text, object_pairs_hook=_once_each, parse_constant=_no_number)


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name occurs twice")
    return fields


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def is_part_name(name: str) -> bool:
    """Return True if a part can have this name: it is a path that leads nowhere but down, and has one spelling."""
    return len(name) <= _LONGEST_NAME and _PART_NAME.fullmatch(name) is not None


def in_short(error: Exception) -> str:
    """Return what a parser said, which may quote what it read: in one short line that a terminal can show."""
    return printable(str(error).partition("\n")[0])[:200]
