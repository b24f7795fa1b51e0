"""The pieces: a lost answer is no defeat, a dead store is asked seldom, a slow upload holds nobody."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import obstore
import pytest
from machines import CALL, KEY, SHAPES, TIMES, Machine, StoreFleet, graph, until
from obstore.exceptions import PreconditionError
from stand_in import Bucket
from stores import on_one_store

from onediff_comfy.store.remote import tiered_store
from onediff_comfy.store.remote.lease import DONE, FAILED, HELD, Leases, SeenLease, Watch
from onediff_comfy.store.remote.objects import Objects, Unreachable, open_store
from onediff_comfy.store.remote.upkeep import probe
from onediff_comfy.store.store import GraphStore, Superseded, default_store

OTHER = "6" * 64


def leases(machine: Machine) -> Leases:
    tier = machine.tier()
    return Leases(tier.objects, tier.keys, TIMES)


def test_an_object_is_created_once_and_replaced_if_it_is_still_the_same(store_fleet: StoreFleet) -> None:
    objects = store_fleet.machine().tier().objects
    first = objects.create("v1/x", b"1")
    assert first is not None and objects.create("v1/x", b"2") is None
    second = objects.replace("v1/x", b"2", first)
    assert second not in (None, first)
    assert objects.replace("v1/x", b"3", first) is None and objects.replace("v1/none", b"3", first) is None
    piece = objects.read("v1/x", 0, 100)
    assert piece is not None and (piece.content, piece.size, piece.version) == (b"2", 1, second)
    objects.delete("v1/x")
    objects.delete("v1/x")
    assert objects.read("v1/x", 0, 100) is None


class LosesAnswers:
    """A store whose every write succeeds and whose answer is lost: the client asks once more by itself."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objects, name)

    def create(self, path: str, content: bytes) -> str | None:
        self._objects.create(path, content)
        return self._objects.create(path, content)

    def replace(self, path: str, content: bytes, version: str) -> str | None:
        self._objects.replace(path, content, version)
        return self._objects.replace(path, content, version)


def test_an_answer_that_got_lost_is_no_defeat(store_fleet: StoreFleet) -> None:
    machine = store_fleet.machine()
    tier = machine.tier()
    tier.objects = LosesAnswers(tier.objects)  # type: ignore[assignment]
    assert tier.publish(graph())
    assert tier.counters.snapshot()["published"] == 1

    lossy = Leases(tier.objects, tier.keys, TIMES)
    held = lossy.take(OTHER, None, store_fleet.own_key)
    assert held is not None
    seen = lossy.look(OTHER)
    assert seen is not None and seen.state == HELD
    until(lambda: lossy.look(OTHER).version != seen.version, "it is renewed")  # type: ignore[union-attr]
    held.release(published=True)
    assert lossy.look(OTHER).state == DONE  # type: ignore[union-attr]


class ReplacesNothing(LosesAnswers):
    """A store that knows no conditions but put-if-absent."""

    def create(self, path: str, content: bytes) -> str | None:
        return self._objects.create(path, content)

    def replace(self, path: str, content: bytes, version: str) -> str | None:
        return None


def test_a_store_that_replaces_nothing_holds_nobody(folder_fleet: StoreFleet) -> None:
    """Its leases cannot be renewed, so they seem dead, and cannot be taken over either."""
    hasty = type(TIMES)(ttl_s=0.3, poll_s=0.05)
    tiers = [folder_fleet.machine().tier(hasty) for _ in range(2)]
    for tier in tiers:
        tier.objects = ReplacesNothing(tier.objects)  # type: ignore[assignment]
        tier.leases = Leases(tier.objects, tier.keys, hasty)
    assert tiers[0].turn(KEY) is not None
    begun = time.monotonic()
    assert tiers[1].turn(KEY) is None, "it compiles without a lease"
    assert time.monotonic() - begun < 5
    failed = [each.name for each in probe(tiers[0].objects) if not each.ok]
    assert failed == ["replace", "one of many replacers at once wins"]


def test_a_lease_that_is_renewed_for_ever_is_not_waited_for_for_ever(folder_fleet: StoreFleet) -> None:
    """Whoever writes to the store can put what a builder once signed there again and again."""
    holder, waiter = (folder_fleet.machine().tier(type(TIMES)(1.5, 0.05, longest_s)) for longest_s in (60.0, 0.1))
    held = holder.turn(KEY)
    assert held is not None
    begun = time.monotonic()
    assert waiter.turn(KEY) is None
    assert 4.5 <= time.monotonic() - begun < 10
    held.release(published=True)


def test_a_server_that_takes_etags_without_quotes_only_is_understood(
    s3: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ceph's radosgw 16, as it is in Debian 12."""
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    put = obstore.put

    def radosgw(store: Any, path: str, content: bytes, *, mode: Any, **options: Any) -> Any:
        if isinstance(mode, dict):
            if '"' in mode["e_tag"]:
                raise PreconditionError("412")
            mode = {"e_tag": f'"{mode["e_tag"]}"'}
        return put(store, path, content, mode=mode, **options)

    monkeypatch.setattr(obstore, "put", radosgw)
    objects = open_store(f"s3://{s3.name}/unquoted")
    first = objects.create("v1/x", b"1")
    assert first is not None
    second = objects.replace("v1/x", b"2", first)
    assert second not in (None, first)
    assert objects.replace("v1/x", b"3", first) is None and objects.replace("v1/none", b"3", first) is None


@pytest.mark.parametrize("times", [1, 10])
def test_a_write_that_another_was_in_the_way_of_is_tried_again(
    times: int, folder_fleet: StoreFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3 may answer 409 to each of two uploads at once: nothing is there then, and obstore says that something is."""
    tier = folder_fleet.machine().tier()
    create, answers = tier.objects.create, [None] * times
    monkeypatch.setattr(tier.objects, "create", lambda *a: answers.pop() if answers else create(*a))
    if times == 1:
        assert tier.publish(graph())
    else:
        with pytest.raises(Unreachable):
            tier.publish(graph())
    assert (tier.statement(KEY) is not None) is (times == 1)
    assert tier.counters.snapshot()["late"] == 0


def test_a_lease_is_taken_by_one_and_released(store_fleet: StoreFleet) -> None:
    mine, theirs = leases(store_fleet.machine()), leases(store_fleet.machine())
    held = mine.take(KEY, None, store_fleet.own_key)
    assert held is not None and theirs.take(KEY, None, store_fleet.own_key) is None
    held.release(published=False)
    seen = theirs.look(KEY)
    assert seen is not None and (seen.state, seen.failures) == (FAILED, 1)
    again = theirs.take(KEY, seen, store_fleet.own_key)
    assert again is not None and mine.take(KEY, seen, store_fleet.own_key) is None
    again.release(published=True)


def test_what_nobody_believed_signed_is_no_lease(store_fleet: StoreFleet) -> None:
    tier = store_fleet.machine().tier()
    tier.objects.create(f"v1/leases/{KEY}", b'{"state":"held"}')
    held = tier.turn(KEY)
    assert held is not None
    held.release(published=True)


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, SeenLease | None], bool]:
    """Says whether a lease of ten seconds is alive, at a time by the waiter's clock."""
    watch, now = Watch(10), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def at(seconds: float, seen: SeenLease | None) -> bool:
        now[0] = seconds
        return watch.alive(seen)

    return at


def test_a_waiter_goes_by_its_own_clock(alive: Callable[[float, SeenLease | None], bool]) -> None:
    one, two = (SeenLease(version, "", "", HELD, 0) for version in ("1", "2"))
    assert alive(0, one) and alive(5, one) and alive(9, one)
    assert alive(9, two) and alive(14, two) and alive(18, two)
    assert not alive(19, two)
    assert not alive(19, SeenLease("3", "", "", DONE, 0)) and not alive(19, None)


def test_a_waiter_that_was_stopped_gives_the_holder_its_time_again(
    alive: Callable[[float, SeenLease | None], bool],
) -> None:
    lease = SeenLease("1", "", "", HELD, 0)
    assert alive(0, lease) and alive(5, lease) and alive(9, lease)
    assert alive(25, lease) and alive(30, lease) and alive(34, lease)
    assert not alive(35, lease)


def test_after_two_that_failed_nobody_waits_for_a_third(store_fleet: StoreFleet) -> None:
    tier = store_fleet.machine().tier()
    for _ in range(2):
        held = tier.turn(KEY)
        assert held is not None
        held.release(published=False)
    assert tier.turn(KEY) is None


@on_one_store
def test_a_compiler_that_hangs_does_not_hold_everybody(store_fleet: StoreFleet) -> None:
    hung, waiter = (store_fleet.machine().tier(type(TIMES)(0.3, 0.05, longest_s)) for longest_s in (0.5, 60.0))
    assert hung.turn(KEY) is not None  # and never released
    held = waiter.turn(KEY)
    assert held is not None
    held.release(published=True)


# -- a store that does not answer ------------------------------------------------------------------


@pytest.fixture
def dead_url(monkeypatch: pytest.MonkeyPatch) -> str:
    """Of a store that refuses connections."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.setenv(name, "x")
    return "s3://fleet/prefix"


def test_a_store_that_does_not_answer_is_not_asked_at_every_question(
    dead_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    get = obstore.get
    monkeypatch.setattr(obstore, "get", lambda store, path, **more: asked.append(path) or get(store, path, **more))
    objects = open_store(dead_url, pause_s=3600.0)
    begun = time.monotonic()
    with pytest.raises(Unreachable):
        objects.read("v1/x", 0, 1)
    first = time.monotonic() - begun
    assert first < 6
    for _ in range(100):
        with pytest.raises(Unreachable):
            objects.read("v1/x", 0, 1)
    assert asked == ["v1/x"]


def test_that_a_store_does_not_answer_is_said_once(
    dead_url: str, folder_fleet: StoreFleet, caplog: pytest.LogCaptureFixture
) -> None:
    machine = folder_fleet.machine(url=dead_url)
    store = machine.store(machine.tier(pause_s=3600.0))
    for _ in range(5):
        assert store.find(KEY) is None
    assert caplog.text.count("does not answer") == 1
    assert store.tier.counters.snapshot()["unreachable"] == 5


@on_one_store
def test_a_graph_that_could_not_be_published_is_published_later(
    store_fleet: StoreFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiered_store, "_TRY_AGAIN_S", 0.2)
    machine = store_fleet.machine()
    tier = machine.tier()
    store, create = machine.store(tier), tier.objects.create

    def down(path: str, content: bytes) -> str | None:
        raise Unreachable("down")

    monkeypatch.setattr(tier.objects, "create", down)
    store.save(graph())
    assert tier.counters.snapshot()["unpublished"] == 1
    monkeypatch.setattr(tier.objects, "create", create)
    until(lambda: tier.counters.snapshot()["published"] == 1, "it is published")
    until(lambda: tier.counters.snapshot()["unpublished"] == 0, "nothing is left to publish")
    assert store_fleet.machine().tier().fetch(KEY) is not None


@on_one_store
def test_a_slow_upload_holds_no_picture_and_the_lease_until_it_is_done(
    store_fleet: StoreFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiered_store, "_WAIT_FOR_UPLOAD_S", 0.2)
    machine = store_fleet.machine()
    tier = machine.tier()
    store, create, go = machine.store(tier), tier.objects.create, threading.Event()

    def slow(path: str, content: bytes) -> str | None:
        if "graphs" in path:
            assert go.wait(60)
        return create(path, content)

    monkeypatch.setattr(tier.objects, "create", slow)
    with store.compiling(KEY):
        store.save(graph())
    seen = leases(machine).look(KEY)
    assert seen is not None and seen.state == HELD
    go.set()
    until(lambda: leases(machine).look(KEY).state == DONE, "it is released")  # type: ignore[union-attr]
    assert tier.statement(KEY) is not None


def test_a_full_disk_serves_by_what_was_fetched(store_fleet: StoreFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    store_fleet.machine().tier().publish(graph())
    store = store_fleet.machine(builder=False).store()

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("onediff_comfy.store.store.write_atomically", full)
    found = store.find(KEY)
    assert found is not None and found.digest == graph().digest


def test_who_is_second_has_the_published_one_on_disk(store_fleet: StoreFleet) -> None:
    store_fleet.machine().tier().publish(graph(mark=b"first"))
    store = store_fleet.machine().store()
    with pytest.raises(Superseded):
        store.save(graph(mark=b"second"))
    found = store.find(KEY)
    assert found is not None and found.digest == graph(mark=b"first").digest


def test_a_pipe_in_a_shared_folder_holds_nobody(folder_fleet: StoreFleet) -> None:
    folder = folder_fleet.folder / "shared store" / "v1" / "graphs"
    folder.mkdir(parents=True)
    os.mkfifo(folder / KEY)
    assert stat.S_ISFIFO((folder / KEY).stat().st_mode)
    assert folder_fleet.machine().store().find(KEY) is None


def test_a_call_that_is_learned_later_is_told_to_the_fleet(store_fleet: StoreFleet) -> None:
    store = store_fleet.machine().store()
    store.save(graph())
    store.notes.add_call("b" * 64, KEY, SHAPES)
    assert store_fleet.machine(builder=False).store().notes.calls("b" * 64) == [(KEY, SHAPES)]


def test_what_the_store_does_not_know_is_not_asked_for_at_every_call(
    store_fleet: StoreFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_fleet.machine().store()
    asked: list[str] = []
    listed = store.tier.objects.listed
    monkeypatch.setattr(store.tier.objects, "listed", lambda *a: asked.append(a[0]) or listed(*a))
    for _ in range(5):
        assert store.notes.calls(CALL) == []
    assert len(asked) == 1


# -- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["memory:///", "http://host/x", "file://host/x", "ftp://x", "/folder", "s3:"])
def test_what_several_machines_could_not_share_is_no_store(url: str) -> None:
    with pytest.raises(ValueError, match=r"s3://bucket/prefix|cannot be opened"):
        open_store(url)


def test_a_folder_that_cannot_be_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be opened"):
        open_store((tmp_path / "file" / "folder").as_uri())


def test_a_secret_in_a_url_is_not_shown() -> None:
    with pytest.raises(ValueError, match="ftp://host/x") as raised:
        open_store("ftp://user:secret@host/x?token=secret")
    assert "secret" not in str(raised.value)


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDIFF_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("ONEDIFF_CONFIG_DIR", str(tmp_path / "config"))


@pytest.mark.usefixtures("folders")
def test_what_keeps_the_tier_from_being_used_is_said_and_graphs_are_kept_here(
    store_fleet: StoreFleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ONEDIFF_STORE_URL", store_fleet.url)
    assert type(default_store()) is tiered_store.TieredStore
    for name, value, says in (
        ("ONEDIFF_STORE_URL", "memory:///", "is no store that machines can share"),
        ("ONEDIFF_STORE_ROLE", "boss", "give worker or builder"),
        ("ONEDIFF_STORE_ROLE", "builder", "store keygen"),
    ):
        caplog.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(name, value)
            assert type(default_store()) is GraphStore
        assert says in caplog.text and "this machine alone" in caplog.text
