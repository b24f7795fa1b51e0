"""store/trust.py: one key for all processes of an install; where there can be none, graphs serve all the same."""

from __future__ import annotations

import errno
import json
import logging
import multiprocessing
import os
import stat
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_trust_docs import artifact_of

from onediff_comfy.files import write_atomically
from onediff_comfy.store.artifact import Artifact
from onediff_comfy.store.store import GraphStore
from onediff_comfy.store.trust import Trust, Untrusted

KEY = "5" * 64


@pytest.fixture
def unwritable(tmp_path: Path) -> Path:
    """A folder that nobody can make, root included: a file is in its way."""
    (tmp_path / "file").write_text("")
    return tmp_path / "file" / "config"


@pytest.fixture
def no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_args: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "link", link)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_where_no_key_can_be_kept_there_is_one_for_this_process(
    unwritable: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trust = Trust(unwritable)
    assert trust.sealed_by_us("text", trust.seal("text"))
    assert not trust.outlives_process
    (warning,) = warnings(caplog)
    assert "compiled again at the next start" in warning and "ONEDIFF_CONFIG_DIR" in warning
    later = Trust(unwritable)
    assert not later.sealed_by_us("text", trust.seal("text"))


@pytest.mark.parametrize("key", ["a folder", "a pipe", "a link to nowhere", "larger than any"])
def test_where_the_key_cannot_be_read_nobody_is_asked_to_trust_what_may_be_their_own(tmp_path: Path, key: str) -> None:
    text, path = artifact_of("Net").manifest_text, tmp_path / "signing.key"
    own = Artifact(text, Trust(tmp_path).seal(text), {})
    kept = path.read_bytes()
    path.unlink()
    if key == "a folder":
        path.mkdir()
    elif key == "a pipe":
        os.mkfifo(path, 0o600)
    elif key == "a link to nowhere":
        path.symlink_to(tmp_path / "nowhere" / "key")
    else:
        path.write_bytes(kept * 100)
        path.chmod(0o600)
    with pytest.raises(Untrusted, match="nobody can tell who compiled") as refused:
        Trust(tmp_path).check(own, tmp_path / "own.graph")
    assert str(path) in str(refused.value) and "--trust" not in str(refused.value)


def test_threads_share_the_key_of_their_process(unwritable: Path, caplog: pytest.LogCaptureFixture) -> None:
    trust, seals, together = Trust(unwritable), set(), threading.Barrier(8)

    def work() -> None:
        together.wait()
        seals.add(trust.seal("text"))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seals) == len(warnings(caplog)) == 1


def test_a_key_that_is_there_needs_no_folder_to_write_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seal = Trust(tmp_path).seal("text")

    opened = os.open

    def read_only(path: str, flags: int, *mode: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise PermissionError("read-only")
        return opened(path, flags, *mode)

    monkeypatch.setattr(os, "open", read_only)
    assert Trust(tmp_path).seal("text") == seal
    assert Trust(tmp_path).outlives_process
    assert warnings(caplog) == []


def test_without_hard_links_the_key_is_kept_too(
    tmp_path: Path, no_links: None, caplog: pytest.LogCaptureFixture
) -> None:
    seals = {Trust(tmp_path).seal("text") for _ in range(3)}
    assert len(seals) == 1
    assert Trust(tmp_path).outlives_process
    assert stat.S_IMODE((tmp_path / "signing.key").stat().st_mode) == 0o600
    assert {path.name for path in tmp_path.iterdir()} <= {"signing.key", "signing.key.lock"}
    assert warnings(caplog) == []


def _seal(folder: Path, together: threading.Barrier, seals: multiprocessing.Queue[str]) -> None:
    together.wait()
    seals.put(Trust(folder).seal("text"))


@pytest.mark.skipif(os.name != "posix", reason="forks")
@pytest.mark.parametrize("links", [True, False])
def test_of_processes_that_make_the_key_at_once_one_wins(
    tmp_path: Path, links: bool, request: pytest.FixtureRequest
) -> None:
    if not links:
        request.getfixturevalue("no_links")
    fork = multiprocessing.get_context("fork")
    for attempt in range(10):
        together, seals = fork.Barrier(6), fork.Queue()
        processes = [fork.Process(target=_seal, args=(tmp_path / str(attempt), together, seals)) for _ in range(6)]
        for process in processes:
            process.start()
        found = {seals.get(timeout=30) for _ in processes}
        for process in processes:
            process.join()
        assert found == {Trust(tmp_path / str(attempt)).seal("text")}


def test_a_damaged_key_is_refused_each_time(tmp_path: Path) -> None:
    write_atomically(tmp_path / "signing.key", b"short")
    trust = Trust(tmp_path)
    for _ in range(3):
        with pytest.raises(OSError, match="damaged; delete it"):
            trust.seal("text")
    assert not trust.outlives_process


def test_a_damaged_key_costs_the_notes_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    write_atomically(tmp_path / "config" / "signing.key", b"short")
    store = GraphStore(tmp_path / "cache", Trust(tmp_path / "config"))
    store.notes.add_call("call", KEY, {})
    assert store.notes.calls("call") == []


def test_a_seal_says_whose_signature_what_was_fetched_had(tmp_path: Path) -> None:
    trust, text = Trust(tmp_path), artifact_of("Net").manifest_text
    key_id, other = "0123456789abcdef", "f" * 16
    fetched = Artifact(text, trust.seal_fetched(text, key_id), {})
    assert len(fetched.seal) == len(trust.seal(text)) and Trust(tmp_path).fetched_from(fetched) == key_id
    trust.check(fetched, tmp_path)
    assert not trust.sealed_by_us(text, fetched.seal)
    for seal in ("", trust.seal(text), other + fetched.seal[16:], fetched.seal[:-1] + "x", "é" * 64, "\ud800" * 64):
        assert trust.fetched_from(Artifact(text, seal, {})) is None
    with pytest.raises(Untrusted):
        Trust(tmp_path / "another").check(fetched, tmp_path)


def test_two_that_trust_at_once_lose_nothing(tmp_path: Path) -> None:
    together, digests = threading.Barrier(2), [[f"{half}{number:063x}" for number in range(40)] for half in "ab"]

    def work(half: list[str]) -> None:
        together.wait()
        for digest in half:
            Trust(tmp_path).trust(SimpleNamespace(digest=digest))  # type: ignore[arg-type]

    threads = [threading.Thread(target=work, args=(half,)) for half in digests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert json.loads((tmp_path / "trusted.json").read_text()) == sorted([*digests[0], *digests[1]])
