"""A file of graphs: how artifacts lie in it, and how they are read without running or believing anything."""

from __future__ import annotations

import contextlib
import json
import operator
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import safetensors.torch
import torch

from ..files import open_regular
from ..messages import message
from .artifact import Artifact, ArtifactError, Manifest, in_short, is_part_name, parse_json

_MARK = "onediff-comfy compiled graphs"
MAX_FILE = 4 << 30
"""Bytes that a file of graphs may have; the largest graph that was seen has some 100 MB."""
_MAX_HEADER = 32 << 20
_MAX_GRAPHS = 1000
_SEAL = re.compile(r"([0-9a-f]{64})?")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,3}")


def pack(artifacts: Sequence[Artifact]) -> bytes:
    """Return the bytes of a file with these graphs."""
    tensors = {}
    entries = []
    for number, artifact in enumerate(artifacts):
        entries.append({"manifest": artifact.manifest_text, "seal": artifact.seal})
        for name, data in artifact.data.items():
            # frombuffer refuses an empty buffer
            tensors[f"{number}/{name}"] = (
                torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
            )
    content = safetensors.torch.save(tensors, {"format": _MARK, "graphs": json.dumps(entries)})
    _header(content, len(content))  # what could not be read again is not written
    return content


def unpack(content: bytes) -> list[Artifact]:
    """Return the graphs in a file's bytes; reads, runs nothing.

    Raises:
        ArtifactError: this is no artifact, or it is damaged beyond reading.
    """
    with _damage_named():
        header = _header(content, len(content))
        entries, spans = _graphs(header, len(content))
        return [
            Artifact(entry["manifest"], entry["seal"], {name: content[slice(*span)] for name, span in of.items()})
            for entry, of in zip(entries, spans, strict=True)
        ]


@contextlib.contextmanager
def open_graphs(path: Path) -> Iterator[list[Artifact]]:
    """Yield the graphs in a file. Inside, a part is read from the file that was opened when somebody asks for it.

    So a file takes memory only for graphs that somebody vouches for, which their manifests decide.

    Raises:
        ArtifactError: this is no artifact, or it is damaged beyond reading.
        OSError: it is missing, no file, or too large.
    """
    with open_regular(path, MAX_FILE) as (file, size):
        with _damage_named():
            entries, spans = _graphs(_header_of(file, size), size)
        yield [
            Artifact(entry["manifest"], entry["seal"], _PartsOfFile(file, of))
            for entry, of in zip(entries, spans, strict=True)
        ]


def manifests_in(path: Path) -> list[Manifest]:
    """Return what a file's header says of its graphs, whatever is behind it; nobody has vouched for it yet.

    Raises:
        ArtifactError: this is no artifact, or its header is damaged.
        OSError: it is missing, no file, or too large.
    """
    with open_regular(path, MAX_FILE) as (file, size), _damage_named():
        entries = _entries(parse_json(_header_of(file, size)).get("__metadata__", {}))
        return [Manifest.from_json(entry["manifest"]) for entry in entries]


class _PartsOfFile(Mapping[str, bytes]):
    """Byte strings in an open file, by name.

    Args:
        file: as long as it is open, they can be read.
        spans: where each begins and ends.
    """

    def __init__(self, file: BinaryIO, spans: Mapping[str, tuple[int, int]]) -> None:
        self._file, self._spans = file, spans

    def __getitem__(self, name: str) -> bytes:
        begin, end = self._spans[name]
        self._file.seek(begin)
        try:
            return self._file.read(end - begin)
        except MemoryError as error:
            needed = (end - begin) >> 20
            raise OSError(
                message("there is too little memory for part {name}, {size} MB", name=name, size=needed)
            ) from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._spans)

    def __len__(self) -> int:
        return len(self._spans)


@contextlib.contextmanager
def _damage_named() -> Iterator[None]:
    """Raise an ``ArtifactError`` for whatever damaged bytes make a parser raise."""
    try:
        yield
    except (ArtifactError, OSError, MemoryError):
        raise
    except Exception as error:
        raise ArtifactError(
            message("the file is damaged ({kind}: {error})", kind=type(error).__name__, error=in_short(error))
        ) from error


def _header_of(file: BinaryIO, size: int) -> bytes:
    start = file.read(8)
    (length,) = struct.unpack("<Q", start)
    return _header(start + file.read(min(_MAX_HEADER, length)), size)


def _header(content: bytes, size: int) -> bytes:
    """Return the header of a file of ``size`` bytes that begins with ``content``, as JSON."""
    (length,) = struct.unpack_from("<Q", content)
    if length > min(_MAX_HEADER, size - 8):
        raise ArtifactError(message("the file is cut short, or is not a compiled graph"))
    return content[8 : 8 + length]


def _graphs(header: bytes, size: int) -> tuple[list[dict[str, str]], list[dict[str, tuple[int, int]]]]:
    """Return manifest and seal of each graph in a file of ``size`` bytes, and where its parts begin and end."""
    fields = parse_json(header)
    entries = _entries(fields.pop("__metadata__", {}))
    return entries, _spans(fields, len(entries), 8 + len(header), size)


def _spans(
    parts: Mapping[str, Mapping[str, Any]], graphs: int, first: int, size: int
) -> list[dict[str, tuple[int, int]]]:
    """Return where each part of each graph begins and ends: one behind the other, from ``first`` to the file's end."""
    found: list[dict[str, tuple[int, int]]] = [{} for _ in range(graphs)]
    end = first
    for name, part in sorted(parts.items(), key=lambda item: item[1]["data_offsets"]):
        begin, next_begin = (first + operator.index(offset) for offset in part["data_offsets"])
        if part["dtype"] != "U8" or part["shape"] != [next_begin - begin] or begin != end or next_begin < begin:
            raise ArtifactError(message("part {name} is damaged", name=name))
        number, own_name = _place(name, graphs)
        found[number][own_name] = (begin, next_begin)
        end = next_begin
    if end != size:
        raise ArtifactError(message("the file is cut short, or is not a compiled graph"))
    return found


def _entries(metadata: Mapping[str, str]) -> list[dict[str, str]]:
    """Return manifest and seal of each graph in a file, as they are written."""
    if metadata.get("format") != _MARK:
        raise ArtifactError(message("the file is not a compiled graph of onediff-comfy"))
    entries = parse_json(metadata["graphs"])
    if not entries:
        raise ArtifactError(message("the file holds no graphs"))
    if not isinstance(entries, list) or len(entries) > _MAX_GRAPHS:
        raise ValueError("no list of graphs")
    for entry in entries:
        if set(entry) != {"manifest", "seal"} or not all(isinstance(text, str) for text in entry.values()):
            raise ValueError("a graph has other fields than a manifest and a seal")
        if not entry["manifest"].isascii() or not _SEAL.fullmatch(entry["seal"]):
            raise ValueError("a manifest or seal has characters that none has")
    return entries


def _place(name: str, graphs: int) -> tuple[int, str]:
    """Return the graph that a part belongs to, and the part's name. No part has two spellings."""
    number, _, part = name.partition("/")
    if not _NUMBER.fullmatch(number) or int(number) >= graphs or not is_part_name(part):
        raise ValueError("a part has a name that none has")
    return int(number), part
