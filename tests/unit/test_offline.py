"""What is carried to a machine without a network is whole, and in folders of limited size."""

from __future__ import annotations

import re
import tarfile
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dev.environment import lock_file
from dev.offline import in_parts, locked, unpack


class File:
    """Stands for a file of some bytes."""

    def __init__(self, size: int) -> None:
        self.st_size = size

    def stat(self) -> File:
        return self

    def __lt__(self, other: File) -> bool:
        return id(self) < id(other)


@given(st.lists(st.integers(0, 150), max_size=20))
def test_each_file_is_in_one_part_and_none_is_too_large_but_for_a_file_that_is(sizes: list[int]) -> None:
    files = list(map(File, sizes))
    parts = in_parts(files, 100)  # type: ignore[arg-type]
    assert sorted(file for part in parts for file in part) == sorted(files)  # type: ignore[type-var]
    for part in parts:
        assert len(part) == 1 or sum(file.stat().st_size for file in part) <= 100


@pytest.mark.parametrize("python", ["3.10", "3.12", "3.13"])
def test_of_each_package_that_is_locked_one_version_is_carried_with_its_hashes(python: str) -> None:
    found = locked(lock_file().read_text(), python)
    names = [requirement.partition("==")[0] for requirement in found]
    assert len(set(names)) == len(names) and {"comfy-aimdo", "pydantic", "obstore", "pytest"} <= set(names)
    assert "colorama" not in names  # for Windows
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}", requirement) for requirement in found)
    # pip reads a marker as of the Python that runs it, and downloads nothing where it is not for that.
    assert not any(";" in requirement for requirement in found)


def test_wheels_and_archives_are_unpacked(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text("the host")
    with zipfile.ZipFile(tmp_path / "a-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("a/__init__.py", "a package")
    with tarfile.open(tmp_path / "comfyui.tar.xz", "w:xz") as archive:
        archive.add(tmp_path / "main.py", "ComfyUI/main.py")
    unpack(tmp_path, tmp_path / "packages", tmp_path / "hosts")
    assert (tmp_path / "packages" / "a" / "__init__.py").read_text() == "a package"
    assert (tmp_path / "hosts" / "ComfyUI" / "main.py").read_text() == "the host"
