"""The parts of the developer environment that need no network."""

from __future__ import annotations

import hashlib
import io
import re
import sys
import tarfile
from pathlib import Path

import pytest

from dev import environment, pythons
from dev.environment import SetupError


@pytest.fixture
def comfyui(tmp_path: Path) -> Path:
    (tmp_path / "requirements.txt").write_text("numpy\n")
    return tmp_path


def test_requirements_leave_out_torch_comments_and_the_editors_templates() -> None:
    text = """comfyui-frontend-package==1.0
comfyui-workflow-templates==0.1
torch
torchsde
torchvision
numpy>=1.25.0  # arrays

#non essential dependencies:
pydantic~=2.0
"""
    assert environment.comfyui_requirements(text) == [
        "comfyui-frontend-package==1.0",
        "torchsde",
        "numpy>=1.25.0",
        "pydantic~=2.0",
    ]


def test_the_digest_is_stable_and_ignores_what_is_not_installed(comfyui: Path) -> None:
    before = environment.pins_digest(comfyui)
    (comfyui / "requirements.txt").write_text("# a comment\nnumpy\ntorch\n")
    assert environment.pins_digest(comfyui) == before


@pytest.mark.parametrize(
    ("name", "value"), [("TORCH", "torch==0.0"), ("COMFYUI_SHA256", "0"), ("TORCH_COMPANIONS", ("torchvision==0.0",))]
)
def test_another_pin_is_another_digest(
    comfyui: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    before = environment.pins_digest(comfyui)
    monkeypatch.setattr(environment, name, value)
    assert environment.pins_digest(comfyui) != before


def test_another_requirement_of_comfyui_is_another_digest(comfyui: Path) -> None:
    before = environment.pins_digest(comfyui)
    (comfyui / "requirements.txt").write_text("numpy\nscipy\n")
    assert environment.pins_digest(comfyui) != before


def test_a_wrong_archive_is_deleted_and_named(tmp_path: Path) -> None:
    archive = tmp_path / "source.tar.gz"
    archive.write_bytes(b"not the archive")
    with pytest.raises(SetupError, match=r"source\.tar\.gz has sha256 .* deleted") as raised:
        environment.check_archive(archive, "0" * 64)
    assert "\n" not in str(raised.value)
    assert not archive.exists()


def test_the_right_archive_is_kept(tmp_path: Path) -> None:
    archive = tmp_path / "source.tar.gz"
    archive.write_bytes(b"the archive")
    environment.check_archive(archive, hashlib.sha256(b"the archive").hexdigest())
    assert archive.exists()


def test_only_the_wanted_folder_is_extracted(tmp_path: Path) -> None:
    archive = tmp_path / "source.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name in ("pack-1/setup.py", "pack-1/vendor/ComfyUI/main.py", "pack-1/vendor/ComfyUI/../../escaped.py"):
            member = tarfile.TarInfo(name)
            member.size = len(name)
            tar.addfile(member, io.BytesIO(name.encode()))
    (tmp_path / "ComfyUI").mkdir()
    environment.extract_folder(archive, "vendor/ComfyUI", tmp_path / "ComfyUI")
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {"source.tar.gz", "main.py"}


def test_comfyui_path_names_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMFYUI_PATH", str(tmp_path))
    with pytest.raises(SetupError, match=r"COMFYUI_PATH is .* no main\.py") as raised:
        environment.comfyui_path()
    assert "\n" not in str(raised.value)


def test_comfyui_path_is_used_when_it_is_comfyui(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "main.py").touch()
    monkeypatch.setenv("COMFYUI_PATH", str(tmp_path))
    assert environment.comfyui_path() == tmp_path


def test_without_comfyui_path_the_pinned_release_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COMFYUI_PATH", raising=False)
    assert environment.comfyui_path() == environment.repository() / ".cache" / "ComfyUI-0.30.0"


def test_each_python_that_is_promised_is_tested(root: Path) -> None:
    promised = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (root / "pyproject.toml").read_text())
    assert sorted(promised) == sorted({*pythons.RELEASES, "{}.{}".format(*sys.version_info)})
