"""Putting the pack among ComfyUI's custom nodes, from a checkout; tests/package does it with a wheel."""

from __future__ import annotations

import errno
import multiprocessing
import shutil
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from onediff_comfy import installation
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


def _install_at_once(comfyui: Path, together: Barrier) -> None:
    together.wait()
    installation.install(comfyui)


def test_several_installs_at_once_leave_one_whole_pack(
    comfyui: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = tmp_path_factory.mktemp("small") / "onediff_comfy"
    for number in range(100):
        (small / str(number)).mkdir(parents=True)
        (small / str(number) / "module.py").touch()
    monkeypatch.setattr(installation, "_CORE", small)
    context, pack = multiprocessing.get_context("fork"), comfyui / "custom_nodes" / "onediff-comfy"
    for _ in range(20):
        together = context.Barrier(3)
        processes = [context.Process(target=_install_at_once, args=(comfyui, together)) for _ in range(3)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
            assert process.exitcode == 0
        assert list(pack.parent.iterdir()) == [pack]
        assert len(list(pack.rglob("module.py"))) == 100 and (pack / ".installed-by-onediff-comfy").is_file()


def test_an_install_goes_on_where_what_was_quicker_is_gone_again(
    comfyui: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three installs: the second comes before the first, and the third has put that aside by the time it is seen."""
    pack, rename, failed = comfyui / "custom_nodes" / "onediff-comfy", Path.rename, list[int]()

    def after_another(path: Path, target: Path) -> Path:
        if target == pack and not failed:
            failed.append(1)
            raise OSError(errno.ENOTEMPTY, "Directory not empty")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", after_another)
    for _ in range(2):
        failed.clear()
        assert installation.install(comfyui) == pack
        assert list(pack.parent.iterdir()) == [pack] and (pack / "__init__.py").is_file()


def test_an_install_into_an_empty_folder_comes_in_place_of_one_that_was_quicker(
    comfyui: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack, rename, others = comfyui / "custom_nodes" / "onediff-comfy", Path.rename, list[int]()

    def after_another(path: Path, target: Path) -> Path:
        if target == pack and not others:
            others.append(1)
            pack.mkdir()
            (pack / ".installed-by-onediff-comfy").touch()
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", after_another)
    assert installation.install(comfyui) == pack
    assert others and (pack / "onediff_comfy").is_dir() and list(pack.parent.iterdir()) == [pack]


def test_an_install_that_fails_leaves_what_was_there(comfyui: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = installation.install(comfyui)
    rename = Path.rename

    def rename_all_but_the_new_one(path: Path, target: Path) -> Path:
        if target == pack and not (path / "of before").exists():
            raise PermissionError("in use")
        return rename(path, target)

    (pack / "of before").touch()
    monkeypatch.setattr(Path, "rename", rename_all_but_the_new_one)
    with pytest.raises(PermissionError):
        installation.install(comfyui)
    assert (pack / "of before").is_file() and (pack / "__init__.py").is_file()
    assert list(pack.parent.iterdir()) == [pack]


@pytest.mark.parametrize("command", ["install", "uninstall"])
@pytest.mark.parametrize("kind", ["checkout", "link"])
def test_what_a_person_puts_there_after_it_was_judged_is_left_alone(
    comfyui: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, command: str, kind: str
) -> None:
    pack, work, rename = installation.install(comfyui), comfyui / "work", Path.rename
    work.mkdir()
    (work / "mine.py").write_text("mine")

    def after_a_person(path: Path, target: Path) -> Path:
        if path == pack and work.is_dir() and not (pack / "mine.py").exists():
            shutil.rmtree(pack)
            if kind == "checkout":
                shutil.copytree(work, pack)
            else:
                pack.symlink_to(work)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", after_a_person)
    assert run(command, comfyui) == 1
    assert "was not put there by this command; remove it yourself" in capsys.readouterr().err
    assert (pack / "mine.py").read_text() == "mine" and pack.is_symlink() is (kind == "link")
    assert list(pack.parent.iterdir()) == [pack]


@pytest.mark.parametrize("command", [installation.install, installation.uninstall])
def test_a_persons_pack_that_cannot_be_put_back_is_kept_and_named(
    comfyui: Path, monkeypatch: pytest.MonkeyPatch, command: Callable[[Path], Path]
) -> None:
    """It was moved, and another install came into the place before it could be put back."""
    pack, rename, moves = installation.install(comfyui), Path.rename, list[int]()

    def between_others(path: Path, target: Path) -> Path:
        if path != pack or moves:
            return rename(path, target)
        moves.append(1)
        shutil.rmtree(pack)
        pack.mkdir()
        (pack / "mine.py").write_text("mine")
        moved = rename(path, target)
        pack.mkdir()
        (pack / ".installed-by-onediff-comfy").touch()
        return moved

    monkeypatch.setattr(Path, "rename", between_others)
    with pytest.raises(FileExistsError, match="another is there now") as raised:
        command(comfyui)
    (kept,) = (path for path in pack.parent.iterdir() if path != pack)
    assert str(kept) in str(raised.value) and (kept / "mine.py").read_text() == "mine"
    assert (pack / ".installed-by-onediff-comfy").is_file()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("which", ["the old one is moved", "the new one is moved"])
def test_an_install_that_is_interrupted_leaves_a_whole_pack(
    comfyui: Path, monkeypatch: pytest.MonkeyPatch, when: str, which: str
) -> None:
    pack, rename, interrupted = installation.install(comfyui), Path.rename, list[int]()

    def with_ctrl_c(path: Path, target: Path) -> Path:
        if interrupted or (path == pack) is not (which == "the old one is moved"):
            return rename(path, target)
        interrupted.append(1)
        if when == "after":
            rename(path, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", with_ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        installation.install(comfyui)
    assert list(pack.parent.iterdir()) == [pack]
    assert (pack / "__init__.py").is_file() and (pack / "nodes").is_dir()


def test_an_uninstall_that_is_interrupted_as_it_begins_leaves_the_pack(
    comfyui: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack, rename = installation.install(comfyui), Path.rename

    def with_ctrl_c(path: Path, target: Path) -> Path:
        moved = rename(path, target)
        if path == pack:
            raise KeyboardInterrupt
        return moved

    monkeypatch.setattr(Path, "rename", with_ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        installation.uninstall(comfyui)
    assert list(pack.parent.iterdir()) == [pack] and (pack / "__init__.py").is_file()


def test_there_may_be_nothing_to_remove(comfyui: Path, capsys: pytest.CaptureFixture) -> None:
    assert run("uninstall", comfyui) == 1
    assert "nothing was removed" in capsys.readouterr().err
