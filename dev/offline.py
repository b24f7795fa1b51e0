"""Carry what tests and benchmarks need to a Linux machine that has PyTorch and no network, in folders of limited size.

    python -m dev.offline pack FOLDER --python 3.12 --present FILE     here: FOLDER/0, FOLDER/1, ...
    python3 dev/offline.py unpack FOLDER DESTINATION                   there, once for each of them

``pack`` downloads the locked wheels for that Python and archives the pinned ComfyUI. ``unpack`` puts wheels where the
interpreter that runs it looks for packages, and ComfyUI into DESTINATION. It needs no package, and no other file of
this repository, so the folders can travel one by one, before the repository does.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

_SYSTEMS = ("_2_34", "_2_31", "_2_28", "_2_27", "_2_24", "_2_17", "2014", "1")  # of manylinux, the newest first
_NOT_CARRIED = {"playwright", "ruff", "mypy", "ast-serialize", "librt", "matplotlib"}
"""For a browser, linters and pictures of results. A server does not start without ComfyUI's frontend."""


def main(arguments: Sequence[str]) -> int:
    """The command line. Return 0, or 1 after one line that says why not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    packing = commands.add_parser("pack")
    packing.add_argument("folder", type=Path)
    packing.add_argument("--python", default="{}.{}".format(*sys.version_info), help="of the other machine")
    packing.add_argument("--present", type=Path, help="a file with the names of packages that are there, one a line")
    packing.add_argument("--mib", type=int, default=56, help="at most, for each folder")
    unpacking = commands.add_parser("unpack")
    unpacking.add_argument("folder", type=Path)
    unpacking.add_argument("destination", type=Path)
    options = parser.parse_args(arguments)
    if options.command == "unpack":
        unpack(options.folder, Path(sysconfig.get_path("purelib")), options.destination)
        return 0
    if options.folder.exists():
        parser.error(f"{options.folder} is there already; remove it, or name another")
    present = set(map(_normal, options.present.read_text().split())) if options.present else set[str]()
    with tempfile.TemporaryDirectory() as folder:
        missing = _download(options.python, present, Path(folder))
        _archive_comfyui(Path(folder, "comfyui.tar.xz"))
        for number, files in enumerate(in_parts(Path(folder).iterdir(), options.mib << 20)):
            part = options.folder / str(number)
            part.mkdir(parents=True)
            for file in files:
                shutil.move(file, part / file.name)  # perhaps to another file system
            print(f"{part}: {', '.join(sorted(file.name for file in files))}")
    if missing:
        print(f"no wheel for Python {options.python} on Linux: {', '.join(missing)}", file=sys.stderr)
    return int(bool(missing))


def in_parts(files: Iterable[Path], limit: int) -> list[list[Path]]:
    """Return files in groups of at most ``limit`` bytes each; a larger file is alone."""
    parts: list[tuple[int, list[Path]]] = []
    for size, file in sorted(((file.stat().st_size, file) for file in files), reverse=True):
        index = next((index for index, (taken, _) in enumerate(parts) if taken + size <= limit), len(parts))
        taken, group = parts[index] if index < len(parts) else (0, [])
        parts[index : index + 1] = [(taken + size, [*group, file])]
    return [group for _, group in parts]


def unpack(folder: Path, packages: Path, destination: Path) -> None:
    """Put what the wheels of a folder hold into ``packages``, and what its archive holds into ``destination``."""
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(packages)
    for file in folder.glob("*.tar.xz"):
        with tarfile.open(file) as archive:
            archive.extractall(destination, filter="data")


def _download(python: str, present: set[str], folder: Path) -> list[str]:
    """Download the locked packages that are not present; return the names of those that have no wheel."""
    from .environment import lock_file

    missing = []
    options = ["--no-deps", "--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    options += [f"--platform=manylinux{system}_x86_64" for system in _SYSTEMS] + ["--quiet", "--dest", str(folder)]
    for requirement in locked(lock_file().read_text(), python):
        name = _normal(re.split("[=;[ ]", requirement)[0])
        if name in present or name in _NOT_CARRIED:
            continue
        command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", *options]
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write(requirement)
            file.flush()
            if subprocess.run([*command, "--require-hashes", "--requirement", file.name]).returncode:
                missing.append(name)
    return missing


def locked(text: str, python: str) -> list[str]:
    """Return the requirements of a lock that are for Linux and this Python, each with its hashes.

    None says any more for what it is: pip would ask that of the Python that runs it, and pass by what is not for that.
    """
    from packaging.markers import Marker

    environment = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
    found = []
    for requirement in re.findall(r"^[\w.-]+==[^\\\n]*(?:\\\n[^\\\n]*)*", text, re.MULTILINE):
        line, rest = requirement.partition("\\")[::2]
        name, marker = line.partition(";")[::2]
        if not marker.strip() or Marker(marker).evaluate(environment):
            found.append(f"{name.strip()} \\{rest}")
    return found


def _archive_comfyui(file: Path) -> None:
    from .environment import comfyui_path

    left_out = re.compile(r"(\.git|models|output|input|user|temp|__pycache__)")
    source = comfyui_path()
    with tarfile.open(file, "w:xz") as archive:
        for each in sorted(source.iterdir()):
            if not left_out.fullmatch(each.name):
                archive.add(each, f"{source.name}/{each.name}", filter=_without_byte_code)


def _without_byte_code(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if "__pycache__" in member.name else member


def _normal(name: str) -> str:
    return re.sub("[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
