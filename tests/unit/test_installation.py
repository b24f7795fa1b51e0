"""Putting the pack among ComfyUI's custom nodes, from a checkout; tests/package does it with a wheel."""

from __future__ import annotations

from pathlib import Path

import pytest

from onediff_comfy.__main__ import main

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def comfyui(tmp_path: Path) -> Path:
    (tmp_path / "custom_nodes").mkdir()
    return tmp_path


def run(command: str, comfyui: Path) -> int:
    return main([command, "--comfyui", str(comfyui)])


def test_a_checkouts_pack_is_copied_and_removed(comfyui: Path) -> None:
    pack = comfyui / "custom_nodes" / "onediff-comfy"
    assert run("install", comfyui) == 0
    for part in ("__init__.py", "nodes", "onediff_comfy", "workflows"):
        copied = sorted(p.relative_to(pack) for p in (pack / part).rglob("*") if p.is_file())
        there = sorted(
            p.relative_to(REPOSITORY)
            for p in (REPOSITORY / part).rglob("*")
            if p.is_file() and "__pycache__" not in p.parts
        )
        assert copied == there
    assert run("uninstall", comfyui) == 0
    assert list((comfyui / "custom_nodes").iterdir()) == []


@pytest.mark.parametrize("command", ["install", "uninstall"])
def test_a_pack_of_another_origin_is_left_alone(comfyui: Path, command: str, capsys: pytest.CaptureFixture) -> None:
    clone = comfyui / "custom_nodes" / "onediff-comfy"
    clone.mkdir()
    (clone / "__init__.py").write_text("mine")
    assert run(command, comfyui) == 1
    assert "was not put there by this command; remove it yourself" in capsys.readouterr().err
    assert (clone / "__init__.py").read_text() == "mine"


@pytest.mark.parametrize("command", ["install", "uninstall"])
def test_a_link_to_a_checkout_is_left_alone(
    comfyui: Path, tmp_path_factory: pytest.TempPathFactory, command: str, capsys: pytest.CaptureFixture
) -> None:
    """Though what it leads to was made by this command: only the link is ComfyUI's."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "custom_nodes").mkdir()
    assert run("install", elsewhere) == 0
    link = comfyui / "custom_nodes" / "onediff-comfy"
    link.symlink_to(elsewhere / "custom_nodes" / "onediff-comfy")
    assert run(command, comfyui) == 1
    assert "was not put there by this command" in capsys.readouterr().err
    assert link.is_symlink() and (link / "__init__.py").is_file()


@pytest.mark.parametrize("command", ["install", "uninstall"])
def test_a_folder_that_is_not_comfyuis_is_named(tmp_path: Path, command: str, capsys: pytest.CaptureFixture) -> None:
    assert run(command, tmp_path) == 1
    assert capsys.readouterr().err == (
        f"onediff-comfy: {tmp_path} has no folder custom_nodes; give --comfyui the folder of ComfyUI\n"
    )


def test_there_may_be_nothing_to_remove(comfyui: Path, capsys: pytest.CaptureFixture) -> None:
    assert run("uninstall", comfyui) == 1
    assert "nothing was removed" in capsys.readouterr().err
