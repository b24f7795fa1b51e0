"""Which GPU architectures a OneFlow wheel has kernels for, read off its own library.

Nothing in its interface says. CUDA's compiler puts kernels into "fat binaries", one after another in a section of
the library: a header, then for each architecture a header and the code. Only headers are read. Their layout is that
of the CUDA toolkit's fatbinary_section.h and of what ``cuobjdump`` prints.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MAGIC = 0xBA55ED50
_PTX, _SASS = 1, 2
_SECTIONS = (b".nv_fatbin", b"__nv_relfatbin")


@dataclass(frozen=True, order=True)
class Kernels:
    """Code for one architecture: ``major * 10 + minor``, as machine code or as PTX, which newer drivers compile."""

    architecture: int
    ptx: bool = False

    def __str__(self) -> str:
        return f"{'compute' if self.ptx else 'sm'}_{self.architecture}"


RELEASE = "0.9.0"
"""The release that pip installs, the last that can be."""
OF_THE_RELEASE = frozenset(map(Kernels, (60, 61, 70, 75, 80, 86)))
"""What it holds; tests/oneflow reads it off the wheel. For saying so where OneFlow is not installed."""


def runs_on(kernels: Kernels, capability: tuple[int, int]) -> bool:
    """Whether a GPU of this compute capability runs them: machine code within its major version, PTX from then on."""
    major, minor = divmod(kernels.architecture, 10)
    return capability >= (major, minor) if kernels.ptx else capability[0] == major and capability[1] >= minor


def kernels_in(folder: Path) -> frozenset[Kernels]:
    """The architectures that the libraries of a package hold kernels for. It need not be imported."""
    libraries = [*folder.parent.glob("oneflow.libs/liboneflow*.so"), *folder.glob("*.so")]
    return frozenset(found for library in libraries for found in kernels_in_library(library))


def kernels_in_library(path: Path) -> set[Kernels]:
    """The architectures in one ELF shared object."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return {found for start, size in _sections(data) for found in _fat_binaries(data, start, start + size)}


def _sections(data: mmap.mmap) -> Iterator[tuple[int, int]]:
    """(offset, bytes) of the sections with kernels, by the ELF64 section headers."""
    if data[:5] != b"\x7fELF\x02":
        return
    (table,) = struct.unpack_from("<Q", data, 40)
    entry_size, count, names_index = struct.unpack_from("<HHH", data, 58)

    def header(index: int) -> tuple[int, int, int]:
        name, _type, _flags, _address, offset, size = struct.unpack_from("<IIQQQQ", data, table + index * entry_size)
        return name, offset, size

    _, names, _ = header(names_index)
    for index in range(count):
        name, offset, size = header(index)
        if data[names + name : data.find(b"\0", names + name)] in _SECTIONS:
            yield offset, size


def _fat_binaries(data: mmap.mmap, position: int, end: int) -> Iterator[Kernels]:
    while position + 16 <= end:
        magic, _version, header_size, size = struct.unpack_from("<IHHQ", data, position)
        if magic != _MAGIC:  # between two: padding
            position += 8
            continue
        entry, stop = position + header_size, position + header_size + size
        while entry + 32 <= stop:
            kind, _version, entry_header, code_size = struct.unpack_from("<HHIQ", data, entry)
            if kind in (_PTX, _SASS):
                yield Kernels(struct.unpack_from("<I", data, entry + 28)[0], kind == _PTX)
            entry += entry_header + code_size
        position = stop
