"""The artifact: one compiled graph, or several, in one file.

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

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import safetensors
import safetensors.torch
import torch

from ..messages import message

FORMAT = 2
"""Raised when an older reader could misunderstand a newer file."""

_MARK = "onediff-comfy compiled graphs"
_MAX_HEADER = 100 << 20  # safetensors' own limit


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
        options_read: which options the target reads, by target fingerprint.
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
        """Canonical text: what is sealed."""
        return json.dumps(asdict(self), sort_keys=True, ensure_ascii=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Read a manifest.

        Raises:
            ArtifactError: the text is no manifest, or one of a newer format.
        """
        try:
            fields = json.loads(text)
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
            fields["parts"] = {name: Part(**part) for name, part in fields["parts"].items()}
            return cls(**fields)
        except ArtifactError:
            raise
        except Exception as error:  # any shape of JSON may come in here
            raise ArtifactError(
                message("the manifest cannot be read ({kind}: {error})", kind=type(error).__name__, error=error)
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

    @property
    def manifest(self) -> Manifest:
        return Manifest.from_json(self.manifest_text)

    @property
    def digest(self) -> str:
        """sha256 of the manifest, and through it of every part: the artifact's identity."""
        return hashlib.sha256(self.manifest_text.encode()).hexdigest()

    def checked_parts(self) -> Mapping[str, bytes]:
        """The parts, after comparing each with its digest.

        Raises:
            ArtifactError: a part is missing or is not what the manifest says.
        """
        for name, part in self.manifest.parts.items():
            if name not in self.data:
                raise ArtifactError(message("part {name} is missing", name=name))
            if Part.of(self.data[name]) != part:
                raise ArtifactError(message("part {name} is damaged", name=name))
        return self.data


def pack(artifacts: Sequence[Artifact]) -> bytes:
    """The bytes of a file with these graphs."""
    tensors = {}
    entries = []
    for number, artifact in enumerate(artifacts):
        entries.append({"manifest": artifact.manifest_text, "seal": artifact.seal})
        for name, data in artifact.data.items():
            # frombuffer refuses an empty buffer
            tensors[f"{number}/{name}"] = (
                torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
            )
    return safetensors.torch.save(tensors, {"format": _MARK, "graphs": json.dumps(entries)})


def unpack(content: bytes) -> list[Artifact]:
    """The graphs in a file's bytes; reads, runs nothing.

    Raises:
        ArtifactError: this is no artifact, or it is damaged beyond reading.
    """
    try:
        (length,) = struct.unpack_from("<Q", content)
        if length > min(_MAX_HEADER, len(content)):
            raise ArtifactError(message("the file is cut short or is no artifact"))
        metadata = json.loads(content[8 : 8 + length]).get("__metadata__", {})
        if metadata.get("format") != _MARK:
            raise ArtifactError(message("the file is not a compiled graph of onediff-comfy"))
        entries = json.loads(metadata["graphs"])
        if not entries:
            raise ArtifactError(message("the file holds no graphs"))
        parts: list[dict[str, bytes]] = [{} for _ in entries]
        for name, tensor in safetensors.deserialize(content):
            number, _, part = name.partition("/")
            parts[int(number)][part] = bytes(tensor["data"])
        return [Artifact(str(e["manifest"]), str(e["seal"]), d) for e, d in zip(entries, parts, strict=True)]
    except ArtifactError:
        raise
    except Exception as error:  # damaged bytes can fail in any of the parsers above
        raise ArtifactError(
            message("the file is damaged ({kind}: {error})", kind=type(error).__name__, error=error)
        ) from error
