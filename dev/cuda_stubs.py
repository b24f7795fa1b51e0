"""Empty stand-ins for CUDA libraries, so that builds for CUDA load on a machine that has none.

On x86-64 Linux the registry's PyTorch and OneFlow are built for CUDA. The loader wants 5 GB of libraries before
either can be imported, although on the CPU nothing in them is ever called. A stand-in has the library's name, its
symbol versions and its functions; each function returns the code for "no device".
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

_CUDA_NAME = re.compile(r"lib(cu|nv|nccl)[A-Za-z]*")
_OF_THE_DRIVER = "libcuda.so.1"  # only ever opened by name, and its absence is the answer
_NO_DEVICE = 100  # cudaErrorNoDevice; a failure in the other libraries' numbering too

# Symbols by version by library file name; the version is "" for a library that has none.
Wanted = dict[str, dict[str, set[str]]]


def make_stand_ins(libraries: Iterable[Path], folder: Path) -> list[str]:
    """Make in ``folder`` each CUDA library that ``libraries`` need and that is not among them.

    Args:
        libraries: shared objects, each of which needs some others.
        folder: where those libraries look for what they need.

    Returns:
        The names of the files made.

    Raises:
        RuntimeError: gcc, nm or readelf is missing.
        subprocess.CalledProcessError: one of them failed.
    """
    missing = [tool for tool in ("gcc", "nm", "readelf") if shutil.which(tool) is None]
    if missing:
        raise RuntimeError(f"{' and '.join(missing)} not found; install build-essential")
    wanted = _wanted(list(libraries))
    for name, versions in wanted.items():
        _make(folder / name, versions)
    return sorted(wanted)


def _wanted(libraries: list[Path]) -> Wanted:
    wanted: Wanted = {}
    owner: dict[str, str] = {}  # of a symbol version: the library that defines it
    undefined = set()
    for library in libraries:
        for name in re.findall(r"\(NEEDED\).*\[(.*)\]", _output("readelf", "-dW", str(library))):
            if _CUDA_NAME.match(name) and name != _OF_THE_DRIVER:
                wanted.setdefault(name, {})
        file = ""
        for line in _output("readelf", "-VW", str(library)).splitlines():
            if found := re.search(r"Version: \d+  File: (\S+)", line):
                file = found[1]
            elif found := re.search(r"Name: (\S+)  Flags", line):
                owner[found[1]] = file
        undefined |= {line.split()[-1] for line in _output("nm", "-D", "--undefined-only", str(library)).splitlines()}
    for library in libraries:
        wanted.pop(library.name, None)
    for symbol in undefined:
        name, _, version = symbol.partition("@")
        version = version.lstrip("@")
        file = owner.get(version, "") if version else _by_prefix(name, wanted)
        if file in wanted:
            wanted[file].setdefault(version, set()).add(name)
    return wanted


def _by_prefix(symbol: str, libraries: Iterable[str]) -> str:
    """The library whose name ``symbol`` starts with: ncclSend is in libnccl.so.2."""
    for library in sorted(libraries, key=len, reverse=True):
        if symbol.lower().startswith(library[len("lib") :].split(".")[0].lower()):
            return library
    return ""


def _make(path: Path, versions: Mapping[str, set[str]]) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        source, script = Path(temporary, "stub.c"), Path(temporary, "versions.map")
        symbols = sorted(symbol for names in versions.values() for symbol in names)
        source.write_text("\n".join(map(_function, symbols)) + "\n")
        command = ["gcc", "-shared", "-fPIC", "-w", "-fno-builtin", "-o", str(path), str(source)]
        command.append(f"-Wl,-soname,{path.name}")
        named = {version: names for version, names in versions.items() if version}
        if named:
            lines = (f"{version} {{ {'; '.join(sorted(names))}; }};" for version, names in named.items())
            script.write_text("\n".join(lines) + "\n")
            command.append(f"-Wl,--version-script={script}")
        subprocess.run(command, check=True, capture_output=True)


def _function(symbol: str) -> str:
    if symbol.endswith("String"):  # the words for an error code
        return f'const char *{symbol}(void) {{ return "no CUDA library here, a stand-in"; }}'
    return f"long {symbol}(void) {{ return {_NO_DEVICE}; }}"


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
