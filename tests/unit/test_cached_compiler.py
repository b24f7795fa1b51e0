"""dev/cached-g++: the tests' compiler, which compiles nothing twice and nothing wrong."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ here")


def compiled(root: Path, cache: Path, folder: Path, source: str, *flags: str) -> tuple[bytes, int]:
    """A library made of ``source`` in ``folder``, and how many are kept afterwards."""
    folder.mkdir(exist_ok=True)
    (folder / "kernel.cpp").write_text(source)
    output = folder / "kernel.so"
    command = [root / "dev" / "cached-g++", folder / "kernel.cpp", "-shared", "-fPIC", *flags, "-o", output]
    subprocess.run(command, env={**os.environ, "CACHED_CXX_DIR": str(cache)}, check=True)
    return output.read_bytes(), len(list(cache.iterdir()))


def test_the_same_source_is_compiled_once_wherever_it_lies(root: Path, tmp_path: Path) -> None:
    cache, one = tmp_path / "cache", "int one() { return 1; }"
    first, kept = compiled(root, cache, tmp_path / "a", one)
    assert kept == 1
    kept_file = next(cache.iterdir())
    kept_file.write_bytes(first + b"seen")
    assert compiled(root, cache, tmp_path / "b", one) == (first + b"seen", 1)


def test_another_source_flag_or_folder_of_headers_is_compiled_anew(root: Path, tmp_path: Path) -> None:
    cache, headers, source = (
        tmp_path / "cache",
        tmp_path / "headers",
        '#include "number.h"\nint it() { return NUMBER; }',
    )
    headers.mkdir()
    (headers / "number.h").write_text("#define NUMBER 1")
    _, kept = compiled(root, cache, tmp_path / "a", source, f"-I{headers}")
    assert kept == 1
    assert compiled(root, cache, tmp_path / "a", source + "\n", f"-I{headers}")[1] == 2
    assert compiled(root, cache, tmp_path / "a", source, f"-I{headers}", "-O1")[1] == 3
    os.utime(headers, (1, 1))  # as if others had been installed there
    assert compiled(root, cache, tmp_path / "a", source, f"-I{headers}")[1] == 4


def test_what_does_not_compile_fails_and_is_not_kept(root: Path, tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        compiled(root, tmp_path / "cache", tmp_path / "a", "this is no C++")
    assert not (tmp_path / "cache").exists()
