"""What lies in the store is used if a believed builder signed exactly that for exactly this place, and else never."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from machines import CALL, FINGERPRINT, KEY, Machine, StoreFleet, graph, until
from stand_in import Bucket, client_of

from onediff_comfy.store.artifact import Artifact
from onediff_comfy.store.graph_file import pack
from onediff_comfy.store.remote import upkeep
from onediff_comfy.store.remote.objects import Unreachable
from onediff_comfy.store.remote.tier import MAX_GRAPH
from onediff_comfy.store.signing.key_ring import KeyRing, Signer
from onediff_comfy.store.signing.signed import signed
from onediff_comfy.store.store import GraphStore, Superseded
from onediff_comfy.store.trust import Trust

GRAPH = f"v1/graphs/{KEY}"
OTHER = "6" * 64


def content_at(machine: Machine, path: str) -> bytes:
    piece = machine.tier().objects.read(path, 0, 1 << 30)
    assert piece is not None
    return piece.content


def put(machine: Machine, path: str, content: bytes) -> None:
    objects = machine.tier().objects
    objects.delete(path)
    assert objects.create(path, content) is not None


@pytest.fixture
def builder(store_fleet: StoreFleet) -> Machine:
    """A builder that has published one graph."""
    machine = store_fleet.machine()
    assert machine.tier().publish(graph())
    return machine


@pytest.fixture
def worker(store_fleet: StoreFleet, builder: Machine) -> Machine:
    return store_fleet.machine(builder=False)


def stranger(tmp_path: Path) -> Signer:
    """A key that nobody believes."""
    return KeyRing(tmp_path / "stranger").make("a stranger's")


def test_what_a_believed_builder_signed_is_fetched_and_is_this_machines_afterwards(
    worker: Machine, builder: Machine
) -> None:
    store = worker.store()
    found = store.find(KEY)
    assert found is not None and found.digest == graph().digest
    assert store.tier.counters.snapshot()["fetched"] == 1
    builder.tier().objects.delete(GRAPH)
    again = worker.store().find(KEY)
    assert again is not None and dict(again.data) == dict(graph().data)


def test_what_serves_a_call_and_which_options_are_read_is_known_without_a_graph(worker: Machine) -> None:
    store = worker.store()
    assert store.notes.calls(CALL) == [(KEY, graph().manifest.shapes)]
    assert store.notes.read("options", FINGERPRINT) == ["sigmas"]
    assert store.tier.counters.snapshot()["fetched"] == 0


def flipped(content: bytes, place: int) -> bytes:
    changed = bytearray(content)
    changed[place] ^= 1
    return bytes(changed)


def with_another_digit(content: bytes) -> bytes:
    place = content.index(b'"sha256":"') + 10
    return content[:place] + (b"1" if content[place : place + 1] == b"0" else b"0") + content[place + 1 :]


def without_signature(content: bytes) -> bytes:
    mark, statement, _, body = content.split(b"\n", 3)
    return b"\n".join([mark, statement, b"", body])


def with_other_size(content: bytes) -> bytes:
    mark, statement, signature, body = content.split(b"\n", 3)
    fields = json.loads(statement)
    text = json.dumps(fields | {"size": MAX_GRAPH + 1}, sort_keys=True, separators=(",", ":")).encode()
    return b"\n".join([mark, text, signature, body])


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda content: b"", "cut short"),
    "cut in its first lines": (lambda content: content[:100], "cut short"),
    "cut in its bytes": (lambda content: content[:-1], "another size"),
    "longer": (lambda content: content + b"x", "another size"),
    "another byte in the graph": (lambda content: flipped(content, len(content) - 5), "not those that were signed"),
    "another digit in the statement": (with_another_digit, "signature"),
    "another size in the statement": (with_other_size, "signature"),
    "no signature": (without_signature, "signature"),
    "no signed object at all": (lambda content: pack([graph()]), "cut short"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_tampered_graph_is_refused_kept_aside_and_counted(damage: str, worker: Machine, builder: Machine) -> None:
    change, reason = DAMAGES[damage]
    put(builder, GRAPH, change(content_at(builder, GRAPH)))
    store = worker.store()
    for _ in range(2):
        assert store.find(KEY) is None
        assert store.tier.statement(KEY) is None
    counts = store.tier.counters.snapshot()
    assert counts["refusals"] == 1, "each object is counted once"
    assert counts["fetched"] == 0
    (about,) = (json.loads(path.read_text()) for path in store.tier.refusals.folder.glob("*.json"))
    assert about["path"] == GRAPH and reason in about["reason"]
    assert len(list(store.tier.refusals.folder.glob("*.object"))) == 1


def test_what_nobody_believed_signed_is_not_downloaded(
    worker: Machine, builder: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, _ = signed(GRAPH, pack([graph(size=1 << 20)]), {}, stranger(tmp_path))
    put(builder, GRAPH, content)
    store = worker.store()
    read = store.tier.objects.read
    wanted: list[int] = []
    monkeypatch.setattr(
        store.tier.objects, "read", lambda path, start, end: wanted.append(end - start) or read(path, start, end)
    )
    assert store.find(KEY) is None
    assert store.tier.counters.snapshot()["refusals"] == 1
    assert wanted and sum(wanted) < 1 << 14


def test_a_graph_larger_than_any_is_not_downloaded(
    store_fleet: StoreFleet, worker: Machine, builder: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onediff_comfy.store.remote.tier.MAX_GRAPH", 1000)
    store = worker.store()
    assert store.find(KEY) is None
    assert store.tier.counters.snapshot()["refusals"] == 1
    assert store.tier.counters.snapshot()["fetched_bytes"] == 0


def test_a_graph_under_another_name_is_refused(worker: Machine, builder: Machine) -> None:
    """Replayed: whole, and signed by a believed builder, for another place."""
    put(builder, f"v1/graphs/{OTHER}", content_at(builder, GRAPH))
    store = worker.store()
    assert store.find(OTHER) is None
    assert store.tier.counters.snapshot()["refusals"] == 1
    assert store.find(KEY) is not None


def test_a_graph_that_was_signed_for_another_key_is_refused(
    store_fleet: StoreFleet, worker: Machine, builder: Machine
) -> None:
    """Mis-keyed: signed for this place, and it holds another graph."""
    content, _ = signed(GRAPH, pack([graph(OTHER)]), {}, store_fleet.signer)
    put(builder, GRAPH, content)
    store = worker.store()
    assert store.find(KEY) is None
    assert store.tier.counters.snapshot()["refusals"] == 1


def test_a_signed_graph_with_a_part_that_is_not_its_manifests_is_refused(
    store_fleet: StoreFleet, worker: Machine, builder: Machine
) -> None:
    """What is checked of any file is checked of these."""
    artifact = graph()
    data = {**artifact.data, "engine/artifact": b"other code"}
    content, _ = signed(GRAPH, pack([type(artifact)(artifact.manifest_text, "", data)]), {}, store_fleet.signer)
    put(builder, GRAPH, content)
    store = worker.store()
    assert store.find(KEY) is None
    assert store.tier.counters.snapshot()["refusals"] == 1


def test_a_note_under_another_call_is_refused(worker: Machine, builder: Machine) -> None:
    put(builder, f"v1/calls/{'b' * 64}/{KEY}", content_at(builder, f"v1/calls/{CALL}/{KEY}"))
    store = worker.store()
    assert store.notes.calls("b" * 64) == []
    assert store.tier.counters.snapshot()["refusals"] == 1


def test_a_note_by_a_stranger_is_refused(worker: Machine, builder: Machine, tmp_path: Path) -> None:
    path = f"v1/calls/{CALL}/{OTHER}"
    put(builder, path, signed(path, b'{"shapes":{}}', {}, stranger(tmp_path))[0])
    assert worker.store().notes.calls(CALL) == [(KEY, graph().manifest.shapes)]


NAMES = ("a b", "%2e%2e", "#1", "x" * 500, "\N{SNOWMAN}", "*", "?")


def test_names_that_no_object_of_ours_has_are_no_errors(s3: Bucket, tmp_path: Path, monkeypatch: Any) -> None:
    """Somebody else's objects, or a stranger's, where ours are listed."""
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    folder = uuid.uuid4().hex
    client = client_of(s3)
    for kind in ("graphs", f"calls/{CALL}", f"options/{FINGERPRINT}", "leases"):
        for name in NAMES:
            client.put_object(Bucket=s3.name, Key=f"{folder}/v1/{kind}/{name}", Body=b"x")
    fleet = StoreFleet(f"s3://{s3.name}/{folder}", tmp_path, s3.environment)
    builder = fleet.machine()
    assert builder.tier().publish(graph())
    store = fleet.machine(builder=False).store()
    assert store.notes.calls(CALL) == [(KEY, graph().manifest.shapes)]
    assert store.notes.read("options", FINGERPRINT) == ["sigmas"]
    assert store.find(KEY) is not None
    assert store.tier.counters.snapshot()["unreachable"] == 0
    assert upkeep.status(store.tier)["graphs"] >= 1
    assert len(upkeep.prune(builder.tier(), None, 0, True)) >= 1

    # These cannot even be listed: as if the store did not answer, which is counted and no error.
    client.put_object(Bucket=s3.name, Key=f"{folder}/v1/calls/{CALL}/..", Body=b"x")
    store = fleet.machine(builder=False).store()
    assert store.notes.calls(CALL) == []
    assert store.tier.counters.snapshot()["unreachable"] == 1


# -- keys ------------------------------------------------------------------------------------------


def test_a_key_that_is_revoked_takes_its_graphs_along_those_that_were_fetched_too(
    store_fleet: StoreFleet, worker: Machine
) -> None:
    store = worker.store()
    assert store.find(KEY) is not None
    worker.keys.revoke(store_fleet.signer.key_id)
    assert store.find(KEY) is None, "in the process that runs"
    assert worker.store().find(KEY) is None
    assert not list((worker.folder / "cache" / "graphs").glob("*.graph"))
    assert store.tier.counters.snapshot()["refusals"] == 2, "the one that was here, and the one in the store"


def test_what_is_compiled_here_while_a_fetched_one_is_judged_stays(
    store_fleet: StoreFleet, worker: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process has put its own in the place of what was signed with the key that is revoked."""
    store, here = worker.store(), GraphStore(worker.folder / "cache", Trust(worker.folder / "config"))
    assert store.find(KEY) is not None
    worker.keys.revoke(store_fleet.signer.key_id)
    is_revoked, own = store.tier.keys.is_revoked, graph(mark=b"made here")

    def asked(key_id: str) -> bool:
        here.save(own)
        return is_revoked(key_id)

    with monkeypatch.context() as patch:
        patch.setattr(store.tier.keys, "is_revoked", asked)
        assert store.find(KEY) is None, "what is there now is found the next time"
    found = store.find(KEY)
    assert found is not None and found.digest == own.digest


def test_what_another_builder_signed_never_counts_as_made_here(
    store_fleet: StoreFleet, builder: Machine, tmp_path: Path
) -> None:
    """Whatever is lost beside it: nobody publishes it as their own, and it goes with the key that signed it."""
    own = store_fleet.machine()
    new = own.keys.make("its own", rotate=True)
    assert own.store().find(KEY) is not None
    for path in (own.folder / "cache").iterdir():
        if path.name != "graphs":
            shutil.rmtree(path)
    builder.tier().objects.delete(GRAPH)
    store = own.store()
    assert upkeep.push(store, store.entries()) == {"published": [], "there": [], "left": [KEY]}
    own.keys.revoke(store_fleet.signer.key_id)
    assert upkeep.signed_by(store.folder, Trust(own.folder / "config"), store_fleet.signer.key_id) == [KEY]
    assert upkeep.signed_by(store.folder, Trust(own.folder / "config"), new.key_id) == []
    assert own.store().find(KEY) is None
    assert not list((store.folder / "graphs").glob("*.graph"))


def test_what_was_to_be_published_again_is_not_what_was_fetched_meanwhile(
    store_fleet: StoreFleet, builder: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = store_fleet.machine()
    own.keys.make("its own", rotate=True)
    monkeypatch.setattr("onediff_comfy.store.remote.tiered_store._TRY_AGAIN_S", 0.1)
    store = own.store()
    publish, published = store.tier.publish, threading.Event()

    def unreachable(artifact: Artifact) -> bool:
        raise Unreachable("not now")

    def publish_again(artifact: Artifact) -> bool:
        published.set()
        return publish(artifact)

    monkeypatch.setattr(store.tier, "publish", unreachable)
    with contextlib.suppress(Superseded):
        store.save(graph(mark=b"of its own"))
    store.remove(KEY)
    assert store.find(KEY) is not None, "fetched"
    builder.tier().objects.delete(GRAPH)
    monkeypatch.setattr(store.tier, "publish", publish_again)
    until(lambda: store.tier.counters.snapshot()["unpublished"] == 0, "given up")
    assert not published.is_set()


def test_a_revoked_key_is_not_believed_again(store_fleet: StoreFleet, worker: Machine) -> None:
    worker.keys.revoke(store_fleet.signer.key_id)
    with pytest.raises(ValueError, match="revoked"):
        worker.keys.trust(store_fleet.signer.public, "again")


def test_a_key_that_stands_in_both_lists_is_not_believed(store_fleet: StoreFleet, worker: Machine) -> None:
    """As when an older list is copied over what was revoked here, and both are kept."""
    path = worker.folder / "config" / "store_keys.json"
    lists = json.loads(path.read_text())
    lists["revoked"] = lists["trusted"]
    path.write_text(json.dumps(lists))
    assert worker.store().find(KEY) is None


def test_a_machines_own_graphs_stay_when_a_key_is_revoked(store_fleet: StoreFleet) -> None:
    machine = store_fleet.machine()
    machine.store().save(graph())
    machine.keys.revoke(store_fleet.signer.key_id)
    assert machine.store().find(KEY) is not None


def test_keys_are_changed_without_a_pause(store_fleet: StoreFleet, worker: Machine, builder: Machine) -> None:
    new = builder.keys.make("the next", rotate=True)
    assert builder.tier().publish(graph(OTHER))
    assert worker.store().find(OTHER) is None, "its key is not believed yet"
    worker.keys.trust(new.public, "the next")
    store = worker.store()
    assert store.find(OTHER) is not None and store.find(KEY) is not None
    worker.keys.revoke(store_fleet.signer.key_id)
    assert store.find(OTHER) is not None and store.find(KEY) is None


def test_what_lies_there_and_cannot_be_used_is_replaced_by_a_builder(
    store_fleet: StoreFleet, worker: Machine, builder: Machine
) -> None:
    for content in (b"", content_at(builder, GRAPH)[:-1], flipped(content_at(builder, GRAPH), -5)):
        put(builder, GRAPH, content)
        tier = builder.tier()
        assert tier.fetch(KEY) is None
        assert tier.publish(graph())
        assert worker.tier().fetch(KEY) is not None


def test_a_worker_cannot_publish(worker: Machine) -> None:
    with pytest.raises(PermissionError):
        worker.tier().publish(graph())


def test_a_private_key_that_others_can_read_is_refused(builder: Machine) -> None:
    builder.keys.private_file.chmod(0o644)
    with pytest.raises(OSError, match="chmod go-rwx"):
        builder.tier()


def test_a_list_of_keys_that_others_can_write_to_believes_nobody(worker: Machine) -> None:
    (worker.folder / "config" / "store_keys.json").chmod(0o666)
    store = worker.store()
    assert store.find(KEY) is None
    assert store.tier.counters.snapshot()["refusals"] == 1
