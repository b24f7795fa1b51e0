"""files.py: what is read is a file, of bounded size, and what is private is ours alone."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from onediff_comfy.files import (
    TEMPORARY_SUFFIX,
    NotPrivate,
    check_name,
    file_version,
    of_version,
    ours_alone,
    private_folder,
    read_regular,
    remove_judged,
    write_atomically,
)
from onediff_comfy.store.store import GraphStore
from onediff_comfy.store.trust import Trust

pytestmark = pytest.mark.skipif(os.name != "posix", reason="pipes, devices and modes are of POSIX")

LIMIT = 1000


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["pipe", "link to a pipe", "/dev/zero", "folder", "large", "/proc/self/mem", "NUL"])
def test_what_is_no_file_of_bounded_size_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "it"
    if "pipe" in kind:
        os.mkfifo(tmp_path / "pipe")
        path.symlink_to("pipe")
        path = path if "link" in kind else tmp_path / "pipe"
    elif kind.startswith("/"):
        path.symlink_to(kind)
    elif kind == "folder":
        path.mkdir()
    elif kind == "large":
        with path.open("wb") as file:
            file.truncate(1 << 40)  # of nothing: no room is taken
    else:
        path = tmp_path / "a\0b"
    with pytest.raises(OSError, match=r"regular|larger|no file can|written to|Input/output"):
        read_regular(path, LIMIT)


def test_a_file_and_a_link_to_one_are_read(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_bytes(b"x" * LIMIT)
    link.symlink_to(path)
    assert read_regular(path, LIMIT) == read_regular(link, LIMIT) == b"x" * LIMIT


def test_what_is_written_is_private_whatever_the_umask(tmp_path: Path, no_umask: None) -> None:
    write_atomically(tmp_path / "folder" / "file", b"content")
    assert stat.S_IMODE((tmp_path / "folder" / "file").stat().st_mode) == 0o600


@pytest.mark.parametrize("newer", [False, True])
@pytest.mark.parametrize("links", [True, False])
def test_a_file_that_has_taken_the_name_of_the_one_to_go_stays(
    tmp_path: Path, newer: bool, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, asked = tmp_path / "file", list[Path]()

    def no_link(*_: Path) -> None:
        raise PermissionError

    if not links:
        monkeypatch.setattr(os, "link", no_link)
    write_atomically(path, b"judged")

    def judged(file: Path) -> bool:
        asked.append(file)
        found = file.read_bytes() == b"judged"
        if len(asked) == 1:
            write_atomically(path, b"written since")
        elif newer:
            write_atomically(path, b"newer still")
        return found

    assert not remove_judged(path, judged)
    assert path.read_bytes() == (b"newer still" if newer else b"written since")
    assert asked[0] == path and asked[1].name.endswith(TEMPORARY_SUFFIX), "a crash may leave it, and it is cleared away"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_judged_keeps_its_name(tmp_path: Path) -> None:
    path, answers = tmp_path / "file", iter([True])
    write_atomically(path, b"content")
    with pytest.raises(StopIteration):
        remove_judged(path, lambda _file: next(answers))
    assert path.read_bytes() == b"content" and list(tmp_path.iterdir()) == [path]
    assert remove_judged(path, of_version(file_version(path)))
    assert list(tmp_path.iterdir()) == []


def test_graphs_notes_and_the_list_of_trusted_ones_are_private(tmp_path: Path, no_umask: None) -> None:
    from test_trust_docs import artifact_of

    store = GraphStore(tmp_path / "cache", Trust(tmp_path / "config"))
    store.trust(artifact_of("Net"))
    store.save(artifact_of("Net"))
    store.notes.add_call("a" * 64, "5" * 64, {})
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    names = {path.name for path in written}
    assert {"signing.key", "trusted.json", f"{'5' * 64}.graph", f"{'a' * 64}.json"} <= names
    assert {stat.S_IMODE(path.stat().st_mode) for path in written} == {0o600}


def test_a_private_folder_is_made_and_found_again(tmp_path: Path, no_umask: None) -> None:
    made = private_folder(tmp_path / "a" / "b")
    assert made == private_folder(tmp_path / "a" / "b")
    assert {stat.S_IMODE(path.stat().st_mode) for path in (made, made.parent)} <= {0o700, 0o777}
    assert stat.S_IMODE(made.stat().st_mode) == 0o700


def test_a_folder_that_others_made_or_can_change_is_not_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("elsewhere")
    with pytest.raises(OSError, match="not a folder"):
        private_folder(tmp_path / "link")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(NotPrivate, match=r"access to .*open \(mode 777\).*chmod"):
        private_folder(tmp_path / "open")
    with pytest.raises(NotPrivate, match=r"access to .*open"):  # there it can be renamed, and another made
        private_folder(tmp_path / "open" / "ours")
    assert not ours_alone(tmp_path / "open" / "ours")
    (tmp_path / "open").chmod(0o1777)  # as the temporary folder is: only its owner renames a file
    assert private_folder(tmp_path / "open" / "ours")
    assert (
        ours_alone(tmp_path / "elsewhere") and not ours_alone(tmp_path / "link") and not ours_alone(tmp_path / "open")
    )
    status_of = Path.lstat

    def of_another(path: Path) -> os.stat_result:
        status = status_of(path)
        owner = 12345 if path.name == "ours" else status.st_uid
        return os.stat_result((*status[:4], owner, *status[5:]))

    monkeypatch.setattr(Path, "lstat", of_another)
    with pytest.raises(NotPrivate, match="another user"):
        private_folder(tmp_path / "open" / "ours")


def test_a_link_on_the_way_to_a_private_folder_is_followed_once(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "home").symlink_to("real")
    assert private_folder(tmp_path / "home" / "code") == tmp_path.resolve() / "real" / "code"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660, 0o666])
def test_a_key_that_others_can_read_is_refused_with_the_remedy(tmp_path: Path, mode: int) -> None:
    seal = Trust(tmp_path).seal("text")
    (tmp_path / "signing.key").chmod(mode)
    trust = Trust(tmp_path)
    for _ in range(2):
        with pytest.raises(OSError, match=rf"access to .*signing\.key \(mode {mode:o}\); run: chmod go-rwx"):
            trust.sealed_by_us("text", seal)
    assert not trust.outlives_process
    (tmp_path / "signing.key").chmod(0o600)
    assert Trust(tmp_path).sealed_by_us("text", seal)


def test_the_remedy_for_what_is_open_to_others_is_what_a_shell_takes(tmp_path: Path) -> None:
    folder = tmp_path / "my config; true"
    Trust(folder).seal("text")
    (folder / "signing.key").chmod(0o644)
    with pytest.raises(NotPrivate) as refused:
        Trust(folder).seal("text")
    subprocess.run(str(refused.value).partition("run: ")[2], shell=True, check=True)
    assert (folder / "signing.key").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "a\nb", "\u202egpj", "x" * 300, "图" * 100, f"folder/{'x' * 300}"])
def test_a_name_that_no_file_has_is_refused_in_a_sentence(name: str) -> None:
    with pytest.raises(ValueError, match="characters") as raised:
        check_name(name)
    assert str(raised.value).isprintable()


@pytest.mark.parametrize("name", ["flux 1024x1024", "größer/图", "x" * 200])
def test_names_that_files_have_are_taken(name: str) -> None:
    check_name(name)
