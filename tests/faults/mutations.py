"""Files of graphs that somebody changed, on purpose or by accident: the same one for the same number, in every process.

Each layer of the format is changed by itself, and what is around it is made to fit again, so that the change is met
where it was made: a manifest is sealed anew, offsets are moved along.
"""

from __future__ import annotations

import contextlib
import copy
import json
import random
import struct
from collections.abc import Callable
from typing import Any

HOSTILE: list[Any] = [
    None, True, False, 0, -1, 1 << 31, 1 << 63, 1 << 70, -(1 << 70), 10**400, 0.5, 1e308, float("nan"), float("inf"),
    "", "0", ".", "..", "../../escaped", "/tmp/escaped", "a\x00b", "\ud800", "\x1b]0;owned\x07\x1b[2J", "\u202eevil",
    "x" * 100_000, [], {}, [[]], [None], {"": 0}, {"../../escaped": ["x"]}, ["../../escaped"], [1, 2, 3, 4, 5],
    "9**9**9**9", "(" * 500 + "1" + ")" * 500, "-" * 4000 + "1", "'a'*10**10", "1/0", "s0 if s0 else s0",
    "__import__('os')", "max(s0, key=print)", "s0**8**8", "nobody", [["s0", "s0"]], [[0, "s0"]], [[1, "s9"]],
]  # fmt: skip
"""What stands in the place of anything in a file's JSON."""

NAMES = [
    "engine/kernels/../../../escaped.so", "/tmp/escaped.so", "engine/./artifact", "engine//artifact", "ENGINE/ARTIFACT",
    "engine/artifact/", "engine\\artifact", "\u0065\u0301", "engine/kernels/ab/./cab.so", "", ".", "..", "x" * 5000,
]  # fmt: skip
"""What a part may be called by whoever wants it to lead elsewhere, or to pass for another."""

Seal = Callable[[str], str]


def mutated(content: bytes, number: int, seal: Seal) -> bytes:
    """The file's bytes, changed in a way that the number says.

    Args:
        content: of a file with one graph.
        number: which change.
        seal: seals a manifest's text as the installation does that the file is for.
    """
    chance = random.Random(number)
    change = [_bytes, _header, _metadata, _manifest, _manifest, _parts, _nested][number % 7]
    changed = change(content, chance, seal)
    if chance.random() < 0.3:
        with contextlib.suppress(ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
            return chance.choice([_bytes, _header, _parts])(
                changed, chance, seal
            )  # if there is anything left to change
    return changed


def _split(content: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack_from("<Q", content)
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def _joined(header: Any, data: bytes) -> bytes:
    text = (header if isinstance(header, str) else json.dumps(header)).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(text)) + text + data


def _bytes(content: bytes, chance: random.Random, seal: Seal) -> bytes:
    changed = bytearray(content)
    place = chance.randrange(len(changed))
    kind = chance.randrange(6)
    if kind == 0:
        changed[place] ^= 1 << chance.randrange(8)
    elif kind == 1:
        del changed[place:]
    elif kind == 2:
        changed[place:place] = chance.randbytes(chance.randrange(1, 64))
    elif kind == 3:
        changed[place : place + 16] = bytes(16)
    elif kind == 4:
        changed[:8] = struct.pack("<Q", chance.choice([0, 1, len(changed), 1 << 31, (1 << 64) - 1, 100 << 20]))
    else:
        changed += changed[place:]
    return bytes(changed)


def _header(content: bytes, chance: random.Random, seal: Seal) -> bytes:
    """Where the parts are said to be, of what type, under what names."""
    header, data = _split(content)
    name = chance.choice([name for name in header if name != "__metadata__"] or ["__metadata__"])
    kind = chance.randrange(5)
    if kind == 0:
        header[name] = chance.choice(HOSTILE)
    elif kind == 1 and isinstance(header[name], dict):
        header[name][chance.choice(["dtype", "shape", "data_offsets"])] = chance.choice(
            [*HOSTILE, "F32", "I64", [1 << 62], [0, 1 << 62], [5, 1], [-1, 4], [0, 0]]
        )
    elif kind == 2:
        number = chance.choice(["00", "-1", "+0", "٠", "1", "0x0", "9" * 5000, "", " 0"])
        header[f"{number}/{name.partition('/')[2]}"] = header.pop(name)
    elif kind == 3:
        header[f"0/{chance.choice(NAMES)}"] = header.pop(name)
    else:
        text = json.dumps(header)
        return _joined(text[:-1] + "," + text[1:], data)  # every name twice
    return _joined(header, data)


def _metadata(content: bytes, chance: random.Random, seal: Seal) -> bytes:
    header, data = _split(content)
    metadata = header.get("__metadata__") or {}
    try:
        entries = json.loads(metadata["graphs"])
        entry = entries[0]
    except (KeyError, ValueError, TypeError, IndexError):
        return _joined(header, data)
    kind = chance.randrange(6)
    if kind == 0:
        metadata[chance.choice(["format", "graphs"])] = chance.choice(HOSTILE)
    elif kind == 1:
        entry[chance.choice(["manifest", "seal"])] = chance.choice(HOSTILE)
    elif kind == 2:
        entry["seal"] = chance.choice(["\ud800", "é" * 64, "A" * 64, "0" * 63, "\x1b[2J", "0" * 64])
    elif kind == 3:
        entries = chance.choice([[], {}, [entry] * 3, [[]], [None], entries * 1500])
    elif kind == 4:
        entry[chance.choice(["more", ""])] = chance.choice(HOSTILE)
    else:
        header["__metadata__"] = chance.choice(HOSTILE)
        return _joined(header, data)
    if kind not in (0,):
        metadata["graphs"] = json.dumps(entries)
    header["__metadata__"] = metadata
    return _joined(header, data)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        found += _places(inner, (*path, key))
    return found


def _manifest(content: bytes, chance: random.Random, seal: Seal) -> bytes:
    """Something anywhere in the manifest, which is sealed again: somebody trusted it."""
    header, data = _split(content)
    entries = json.loads(header["__metadata__"]["graphs"])
    fields = json.loads(entries[0]["manifest"])
    *path, last = chance.choice(_places(fields))
    holder = fields
    for step in path:
        holder = holder[step]
    kind = chance.randrange(4)
    value = copy.deepcopy(chance.choice(HOSTILE))
    if kind == 0 and isinstance(holder, dict):
        holder[chance.choice(["../../escaped", "\x1b[2J", "\ud800", "more", "x" * 10_000])] = holder.pop(last)
    elif kind == 1:
        del holder[last]
    else:
        holder[last] = value
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    if chance.random() < 0.1:
        text = text[:-1] + "," + text[1:]
    entries[0] = {"manifest": text, "seal": seal(text) if chance.random() < 0.8 else entries[0]["seal"]}
    header["__metadata__"]["graphs"] = json.dumps(entries)
    return _joined(header, data)


def _parts(content: bytes, chance: random.Random, seal: Seal) -> bytes:
    """A part more or less, or with other bytes."""
    header, data = _split(content)
    names = [name for name in header if name != "__metadata__"]
    kind = chance.randrange(3)
    if kind == 0:
        added = chance.randbytes(chance.randrange(1, 100))
        name = chance.choice([*NAMES, "engine/more", "more", chance.choice(names).partition("/")[2].upper()])
        header[f"0/{name}"] = {
            "dtype": "U8",
            "shape": [len(added)],
            "data_offsets": [len(data), len(data) + len(added)],
        }
        return _joined(header, data + added)
    if kind == 1:
        del header[chance.choice(names)]
        return _joined(header, data)
    changed = bytearray(data)
    if changed:
        changed[chance.randrange(len(changed))] ^= 255
    return _joined(header, bytes(changed))


def _nested(content: bytes, chance: random.Random, seal: Seal) -> bytes:
    """JSON that is deep or has very many values, at each of its three levels."""
    header, data = _split(content)
    depth = chance.choice([100, 2_000, 100_000])
    text = chance.choice(
        ['{"a":' * depth + "1" + "}" * depth, "[" * depth + "]" * depth, "[" * depth, "[" + "[]," * depth]
    )
    level = chance.randrange(3)
    if level == 0:
        return _joined(text, data)
    if level == 1:
        header["__metadata__"]["graphs"] = text
    else:
        header["__metadata__"]["graphs"] = json.dumps([{"manifest": text, "seal": seal(text)}])
    return _joined(header, data)
