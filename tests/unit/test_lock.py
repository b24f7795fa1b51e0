"""The lock has what the set-up needs, all of it, for every Python; torch is none of it."""

from __future__ import annotations

import importlib.metadata
import re
import sys

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from dev.environment import SetupError, comfyui_path, comfyui_requirements, developer_requirements, lock_file
from dev.lock import LEFT_OUT

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
BESIDE_TORCH = {"jinja2", "networkx", "sympy", "mpmath", "setuptools"}
"""What comes with torch and need not be in the lock for its sake."""


def entries() -> list[tuple[Requirement, str]]:
    """(requirement, its hashes) of each entry of the lock."""
    text = re.sub(r"^#.*\n", "", lock_file().read_text(), flags=re.MULTILINE).replace("\\\n", "")
    lines = [line.partition("--hash=") for line in text.splitlines()]
    return [(Requirement(requirement), hashes) for requirement, _, hashes in lines]


def locked(python: str) -> dict[str, str]:
    """Name → version of what the lock installs with a Python of this version here."""
    environment = {**default_environment(), "python_version": python, "python_full_version": f"{python}.9"}
    found: dict[str, str] = {}
    for requirement, _ in entries():
        if requirement.marker is None or requirement.marker.evaluate(environment):
            name = canonicalize_name(requirement.name)
            assert name not in found, f"{name} twice"
            (specifier,) = requirement.specifier
            assert specifier.operator == "=="
            found[name] = specifier.version
    return found


def wanted(python: str) -> list[Requirement]:
    """What dev/requirements.txt and the pinned ComfyUI ask for with a Python of this version."""
    try:
        comfyui = (comfyui_path() / "requirements.txt").read_text()
    except (SetupError, OSError) as error:
        pytest.skip(f"no ComfyUI: {error}")
    lines = [*developer_requirements().read_text().splitlines(), *comfyui_requirements(comfyui)]
    requirements = [Requirement(line) for line in lines if not line.startswith("#")]
    environment = {"python_version": python, "python_full_version": f"{python}.9"}
    return [r for r in requirements if r.marker is None or r.marker.evaluate(environment)]


@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_has_everything_that_is_asked_for(python: str) -> None:
    """After a change of either side: ``python -m dev.lock``."""
    versions = locked(python)
    missing = [
        str(requirement)
        for requirement in wanted(python)
        if not requirement.specifier.contains(versions.get(canonicalize_name(requirement.name), "0"), prereleases=True)
    ]
    assert missing == []


def test_the_lock_has_what_its_packages_need() -> None:
    """It is installed without dependencies, so what it forgets would be missing."""
    versions = locked(".".join(map(str, sys.version_info[:2])))
    missing = set()
    for name in versions:
        for line in importlib.metadata.requires(name) or ():
            requirement = Requirement(line)
            needed = canonicalize_name(requirement.name)
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if applies and needed not in {*versions, *LEFT_OUT, *BESIDE_TORCH}:
                missing.add(f"{needed}, for {name}")
    assert missing == set()


def test_every_entry_has_its_hashes_and_torch_is_left_to_the_machine() -> None:
    assert all(
        re.fullmatch(r"sha256:[0-9a-f]{64}(\s+--hash=sha256:[0-9a-f]{64})*\s*", hashes) for _, hashes in entries()
    )
    assert not {canonicalize_name(requirement.name) for requirement, _ in entries()} & set(LEFT_OUT)
    assert len(entries()) > 50
