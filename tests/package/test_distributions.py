"""What is in the wheel, in the sdist, and in the archive that goes to ComfyUI's registry."""

from __future__ import annotations

import fnmatch
import re
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from dev.environment import repository

OUTER = ("__init__.py", "nodes/", "workflows/", "web/", "locales/")
"""The parts of the pack beside onediff_comfy."""


@pytest.fixture(scope="module")
def wheel(distributions: Path) -> zipfile.ZipFile:
    (path,) = distributions.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_has_the_whole_pack_and_nothing_else(wheel: zipfile.ZipFile, tracked: list[str]) -> None:
    core = {name for name in tracked if name.startswith("onediff_comfy/")}
    outer = {f"onediff_comfy/pack/{name}" for name in tracked if name.startswith(OUTER)}
    about = {f"onediff_comfy/pack/{name}" for name in ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE")}
    found = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert found == core | outer | about
    assert len(core) > 50 and len(outer) > 20


def test_the_wheel_asks_for_nothing(wheel: zipfile.ZipFile) -> None:
    """It goes where ComfyUI's torch and numpy are. Only the extra has requirements."""
    (metadata,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    about = Parser().parsestr(wheel.read(metadata).decode())
    required = [line for line in about.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert required == []
    assert about["Requires-Python"] == ">=3.10"
    assert "Apache" in wheel.read(metadata.replace("METADATA", "licenses/LICENSE")).decode()


def test_the_sdist_has_the_whole_repository(distributions: Path, tracked: list[str]) -> None:
    (path,) = distributions.glob("*.tar.gz")
    with tarfile.open(path) as tar:
        found = {member.name.split("/", 1)[1] for member in tar if member.isfile()}
    wanted = {name for name in tracked if not name.startswith((".ci/", ".github/"))}
    assert wanted - found == set()
    assert {name for name in found - wanted if ".egg-info/" not in name} == {"PKG-INFO", "setup.cfg"}


def registry_archive(tracked: list[str]) -> list[str]:
    """What ``comfy node pack`` puts into the archive: what git tracks, less ``.comfyignore``.

    comfy-cli is a third of a gigabyte and not in the developer environment; where somebody has it,
    ``test_registry_tool.py`` holds this against what it packs. ``.comfyignore`` has git's syntax, of which folders and
    names are used.
    """
    lines = (line.strip() for line in (repository() / ".comfyignore").read_text().splitlines())
    patterns = [line for line in lines if line and not line.startswith("#")]
    assert not [pattern for pattern in patterns if re.search(r"[*?!\[]", pattern)], "read here as plain names"
    return [
        name
        for name in tracked
        if not any(
            name.startswith(pattern) if pattern.endswith("/") else fnmatch.fnmatch(name, pattern)
            for pattern in patterns
        )
    ]


def test_the_registrys_archive_is_the_pack(tracked: list[str]) -> None:
    archive = registry_archive(tracked)
    parts = {name.split("/")[0] for name in archive}
    assert {"__init__.py", "nodes", "onediff_comfy", "workflows", "docs", "pyproject.toml", "README.md"} <= parts
    known = {
        "CHANGELOG.md",
        "LICENSE",
        "__init__.py",
        "deploy",
        "docs",
        "locales",
        "nodes",
        "onediff_comfy",
        "web",
        "workflows",
    }
    assert parts - known == {"pyproject.toml", "README.md", "README.zh.md"}
    assert {name for name in tracked if name.startswith((*OUTER, "onediff_comfy/"))} <= set(archive)


def test_the_registry_is_told_what_it_asks_for() -> None:
    """Its rules (docs.comfy.org/registry/specifications): the name, the version, who publishes, what is needed."""
    text = (repository() / "pyproject.toml").read_text()
    name = re.search(r'^name = "(.*)"$', text, re.MULTILINE)
    version = re.search(r'^version = "(.*)"$', text, re.MULTILINE)
    assert name and re.fullmatch(r"[a-z]+([-_.][a-z0-9]+)*", name[1]) and len(name[1]) < 100
    assert "comfyui" not in name[1]
    assert version and re.fullmatch(r"\d+\.\d+\.\d+", version[1])
    section = text.partition("[tool.comfy]")[2].partition("\n[")[0]
    fields = dict(re.findall(r'^(\S+) = "(.*)"$', section, re.MULTILINE))
    assert fields.keys() == {"PublisherId", "DisplayName", "Icon", "Banner", "requires-comfyui"}
    assert fields["PublisherId"] and fields["DisplayName"]
    assert re.fullmatch(r"(>=|==)\d+\.\d+\.\d+", fields["requires-comfyui"])
    assert (repository() / "CHANGELOG.md").read_text().startswith(f"# Changelog\n\n## {version[1]}")
