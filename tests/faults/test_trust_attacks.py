"""Whoever can write to the cache folder, or send a file, gets nothing run and nothing written elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_store import KEY, SHAPES, GraphStore, Trust, assert_whole, make_artifact

from onediff_comfy.__main__ import main
from onediff_comfy.cache.serialization import from_artifact
from onediff_comfy.capture.call import TensorSpec
from onediff_comfy.capture.export import Binding
from onediff_comfy.capture.shape_range import ShapeRange
from onediff_comfy.engines.base import CompiledGraph
from onediff_comfy.engines.eager import EagerEngine
from onediff_comfy.files import write_atomically
from onediff_comfy.store.artifact import Artifact, ArtifactError, Manifest, Part, parse_json
from onediff_comfy.store.graph_file import pack, unpack
from onediff_comfy.store.trust import Untrusted, VerifiedArtifact

OTHER = "6" * 64
Command = Callable[..., tuple[int, str]]


@pytest.fixture
def store(tmp_path: Path) -> GraphStore:
    return GraphStore(tmp_path / "cache", Trust(tmp_path / "config"))


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs ``graphs …`` with the folders of ``store``; exit status, and everything printed."""
    monkeypatch.setenv("ONEDIFF_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("ONEDIFF_CONFIG_DIR", str(tmp_path / "config"))

    def run(*arguments: str) -> tuple[int, str]:
        status = main(["graphs", *arguments])
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    return run


def added(content: bytes, parts: Mapping[str, bytes], first: bool = False) -> bytes:
    """A file's bytes with more tensors in it: what anybody can do who has the file, and no key."""
    (length,) = struct.unpack_from("<Q", content)
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    metadata, tensors = {"__metadata__": header.pop("__metadata__")}, dict(header)
    new = {}
    for name, code in parts.items():
        new[name] = {"dtype": "U8", "shape": [len(code)], "data_offsets": [len(data), len(data) + len(code)]}
        data += code
    order = {**new, **tensors} if first else {**tensors, **new}
    text = json.dumps({**metadata, **order}).encode()
    return struct.pack("<Q", len(text)) + text + data


def changed(artifact: Artifact, change: Callable[[dict[str, Any]], None]) -> Artifact:
    fields = json.loads(artifact.manifest_text)
    change(fields)
    return Artifact(json.dumps(fields, sort_keys=True, separators=(",", ":")), "", artifact.data)


# -- parts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "0/engine/kernels/../../../escaped.so",
        "0/engine/kernels//tmp/escaped.so",
        "0/engine/k/./a.so",
        "0/engine/k/b.so",
        "0/ENGINE/ARTIFACT",
        "00/engine/artifact",
        "-1/engine/artifact",
        "+0/engine/artifact",
        "٠/engine/artifact",
        "1/engine/artifact",
    ],
)
def test_a_file_with_a_part_that_its_manifest_does_not_name_is_refused(
    store: GraphStore, command: Command, name: str, first: bool
) -> None:
    artifact = make_artifact()
    path = store.save(artifact)
    path.write_bytes(added(path.read_bytes(), {name: b"evil"}, first))
    assert store.find(KEY) is None
    status, printed = command("verify")
    assert (status, "0 of 1 graph is whole and trusted" in printed) == (1, True)
    for arguments in (["import", str(path)], ["import", "--trust", str(path)], ["export", KEY, str(path) + "x"]):
        assert command(*arguments)[0] == 1
    store.save(artifact)
    assert_whole(store.find(KEY), artifact)


def test_checked_parts_are_those_of_the_manifest_and_no_others() -> None:
    artifact = make_artifact()
    assert artifact.checked_parts() == dict(artifact.data)
    more = replace(artifact, data={**artifact.data, "engine/more": b""})
    with pytest.raises(ArtifactError, match="engine/more is not in the manifest"):
        more.checked_parts()
    less = replace(artifact, data={"constants": b""})
    with pytest.raises(ArtifactError, match="is missing"):
        less.checked_parts()


def test_what_was_compared_is_what_is_used_though_the_file_changes_in_between(store: GraphStore) -> None:
    class Changing(dict[str, bytes]):
        """Gives other bytes from the second reading on, as a file does that another process writes to."""

        def __getitem__(self, name: str) -> bytes:
            content = super().__getitem__(name)
            self[name] = content[::-1] + b"!"
            return content

    artifact = make_artifact()
    checked = replace(artifact, data=Changing(artifact.data)).checked_parts()
    assert checked == dict(artifact.data)


def test_there_is_no_verified_artifact_without_verification(store: GraphStore, tmp_path: Path) -> None:
    artifact = make_artifact()
    with pytest.raises(Untrusted):
        VerifiedArtifact(artifact, Trust(tmp_path / "config"), tmp_path)
    store.trust(artifact)
    verified = store.verified(artifact, tmp_path)
    with pytest.raises(TypeError):
        verified.data["engine/more"] = b""  # type: ignore[index]
    with pytest.raises(TypeError):
        replace(verified, data={})
    assert isinstance(store.adopt(artifact), Path) and isinstance(store.find(KEY), VerifiedArtifact)


class Seeing(EagerEngine):
    """Notes what reaches an engine."""

    def __init__(self) -> None:
        self.seen: list[set[str]] = []

    def from_parts(self, binding: Binding, shapes: ShapeRange, parts: Mapping[str, bytes]) -> CompiledGraph:
        self.seen.append(set(parts))
        raise NotImplementedError


def test_an_engine_sees_what_was_verified_and_nothing_else(store: GraphStore) -> None:
    constants = b"\x02\x00\x00\x00\x00\x00\x00\x00{}"
    artifact = make_artifact()
    data = {**artifact.data, "constants": constants}
    parts = {name: Part.of(content) for name, content in data.items()}
    output = '[1, {"type": null, "context": null, "children_spec": []}]'
    binding = {"inputs": [], "output": output, "folds": []}
    manifest = replace(artifact.manifest, parts=parts, binding=binding)
    path = store.save(Artifact(manifest.to_json(), "", data))
    engine = Seeing()
    found = store.find(KEY)
    assert found is not None
    with pytest.raises(NotImplementedError):
        from_artifact(found, engine, torch.device("cpu"))
    assert engine.seen == [{"artifact", "k/a.so"}]
    path.write_bytes(added(path.read_bytes(), {"0/engine/more": b"evil"}))
    assert store.find(KEY) is None


def test_nothing_is_deserialised_before_it_is_verified(store: GraphStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Constants, code and the tree of outputs: all of it is looked at after seal and digests, not before."""
    path = store.save(make_artifact())
    (artifact,) = unpack(path.read_bytes())

    def never(*_args: object, **_options: object) -> None:
        raise AssertionError("deserialised")

    for name in ("torch.load", "pickle.loads", "pickle.load", "safetensors.torch.load"):
        monkeypatch.setattr(name, never)
    monkeypatch.setattr("torch.utils._pytree.treespec_loads", never)
    assert store.verified(artifact, path) is not None
    with pytest.raises(Untrusted):
        store.verified(replace(artifact, seal="0" * 64), path)


# -- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["key", "calls", "options_read"])
@pytest.mark.parametrize("name", ["../../escaped", "/tmp/escaped", "A" * 64, "a" * 63, "a\0", ""])
def test_a_trusted_manifest_names_no_file_outside_the_store(
    store: GraphStore, tmp_path: Path, field: str, name: str
) -> None:
    value: Any = {"key": name, "calls": [name], "options_read": {name: ["sigmas"]}}[field]
    hostile = changed(make_artifact(), lambda fields: fields.update({field: value}))
    store.trust(hostile)
    with pytest.raises(ArtifactError, match=field):
        store.adopt(hostile)
    assert {path.name for path in tmp_path.iterdir()} == {"config"}


@pytest.mark.parametrize("name", ["../escaped", "a/b", "..", "a.b", "", "a\n", "x" * 200])
def test_the_store_makes_no_path_of_another_name(store: GraphStore, name: str) -> None:
    for use in (store.find, store.remove, lambda name: store.notes.write("calls", name, 1)):
        with pytest.raises(ValueError, match="name no file"):
            use(name)
    assert store.notes.read("calls", name) is None


def test_a_graph_under_another_graphs_name_is_not_whole(store: GraphStore, command: Command) -> None:
    path = store.save(make_artifact())
    path.rename(path.with_name(f"{OTHER}.graph"))
    status, printed = command("verify")
    assert status == 1 and "another graph than its name says" in printed
    assert "0 of 1 graph is whole and trusted" in printed


# -- what JSON and manifests may be ----------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ['{"a": 1, "a": 2}', "NaN", "[Infinity]", "[" * 100_000, "[" + "0," * 3_000_000 + "0]", "1" * 5000, b"\xff"]
)
def test_json_that_readers_could_disagree_on_is_refused(text: str | bytes) -> None:
    with pytest.raises((ValueError, RecursionError)):
        parse_json(text)
    with pytest.raises(ValueError, match=r"codec"):
        parse_json('{"a": 1}'.encode("utf-16"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("parts", {"engine/artifact": {"size": -1, "sha256": "0" * 64}}),
        ("parts", {"../engine/artifact": {"size": 1, "sha256": "0" * 64}}),
        ("parts", {f"part{number}": {"size": 1, "sha256": "0" * 64} for number in range(60_000)}),
        ("engine", "../inductor"),
        ("compile_seconds", True),
        ("environment", {"torch": 1}),
        ("shapes", {"axes": [[1 << 70]], "limits": {}, "conditions": []}),
        ("shapes", {"axes": [], "limits": {}, "conditions": [" " * 21_000 + "1"]}),
        ("binding", {"inputs": [["weight", "x"]], "output": "", "folds": []}),
        ("signature", ["\ud800"]),
        ("created", "x" * 100),
    ],
)
def test_a_manifest_that_is_not_what_it_should_be_names_the_field(field: str, value: Any) -> None:
    hostile = changed(make_artifact(), lambda fields: fields.update({field: value}))
    with pytest.raises(ArtifactError, match=field) as raised:
        Manifest.from_json(hostile.manifest_text)
    assert str(raised.value).isprintable() and len(str(raised.value)) < 500


def test_what_a_later_version_added_is_passed_over(store: GraphStore) -> None:
    def add(fields: dict[str, Any]) -> None:
        fields.update(more=[1])
        fields["binding"].update(more={"a": 1})

    added_to = changed(make_artifact(), add)
    store.save(added_to)
    found = store.find(KEY)
    assert found is not None and found.manifest_text == added_to.manifest_text
    assert replace(found.manifest, binding=make_artifact().manifest.binding) == make_artifact().manifest


def test_a_cache_folder_that_was_deleted_is_made_again(store: GraphStore) -> None:
    store.save(make_artifact())
    shutil.rmtree(store.folder)
    assert store.find(KEY) is None and store.entries() == []
    store.save(make_artifact())
    assert_whole(store.find(KEY), make_artifact())


def test_whoever_has_the_key_speaks_for_the_installation(store: GraphStore, tmp_path: Path) -> None:
    Trust(tmp_path / "config").seal("")
    write_atomically(tmp_path / "theirs" / "signing.key", (tmp_path / "config" / "signing.key").read_bytes())
    theirs = GraphStore(tmp_path / "their cache", Trust(tmp_path / "theirs"))
    theirs.save(make_artifact())
    fleet = GraphStore(tmp_path / "cache", Trust(tmp_path / "config"), [theirs.folder])
    assert_whole(fleet.find(KEY), make_artifact())


def test_without_pydantic_the_message_says_what_is_missing(
    store: GraphStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import sys

    store.save(make_artifact())
    monkeypatch.delitem(sys.modules, "onediff_comfy.store.schema")
    monkeypatch.delattr("onediff_comfy.store.schema")
    monkeypatch.setitem(sys.modules, "pydantic", None)  # Python's own way to say that there is none
    assert store.find(KEY) is None
    assert "pydantic" in caplog.text and "install it" in caplog.text


@pytest.mark.parametrize(
    "conditions",
    [["9**9"], ["s0**8**8"], ["(s0**8)**8"], ["'a'*10**8"], ["(" * 500 + "s0" + ")" * 500], ["-" * 4000 + "s0"],
     ["s0+" * 150 + "s0"], ["nobody > 1"], ["1e999 > s0"], ["1" * 4000 + "> s0"]],
)  # fmt: skip
@pytest.mark.timeout(20)
def test_hostile_conditions_are_shown_as_unreadable(store: GraphStore, command: Command, conditions: list[str]) -> None:
    hostile = changed(make_artifact(), lambda fields: fields["shapes"].update(conditions=conditions))
    store.save(hostile)
    status, printed = command("show", KEY)
    assert status == 0 and "cannot be read" in printed


def test_a_condition_that_divides_by_nothing_or_compares_no_numbers_holds_for_no_size() -> None:
    four, three = (TensorSpec((size, 4), torch.float32, torch.device("cpu")) for size in (4, 3))
    shapes = ShapeRange.from_json({**SHAPES, "conditions": ["s0 % (s0 - 3) == 0"]})
    assert shapes.values([four]) == {"s0": 4}
    assert shapes.values([three]) is None
    for text in ("max > 1", "max(s0) > 1", "min() > 1"):
        assert ShapeRange.from_json({**SHAPES, "conditions": [text]}).values([four]) is None


# -- one bad file ----------------------------------------------------------------------------------


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["rubbish", "pipe", "zeroes", "folder", "dangling", "two", "escapes", "newer"])
def test_one_bad_file_is_one_bad_row(store: GraphStore, command: Command, tmp_path: Path, kind: str) -> None:
    good = store.save(make_artifact())
    bad = good.with_name(f"{OTHER}.graph")
    if kind == "rubbish":
        bad.write_bytes(b"rubbish" * 100)
    elif kind == "pipe":
        os.mkfifo(bad)
    elif kind == "zeroes":
        bad.symlink_to("/dev/zero")
    elif kind == "folder":
        bad.mkdir()
    elif kind == "dangling":
        bad.symlink_to("nowhere")
    elif kind == "two":
        bad.write_bytes(pack([make_artifact(OTHER), make_artifact(KEY)]))
    elif kind == "escapes":
        named = changed(make_artifact(OTHER), lambda fields: fields.update(target="\x1b]0;owned\x07\u202e"))
        bad.write_bytes(pack([named]))
    else:
        bad.write_bytes(pack([make_artifact(OTHER, format=3)]))
    for arguments in (["list"], ["verify"], ["list", "--json"], ["verify", "--json"]):
        status, printed = command(*arguments)
        assert status == (1 if arguments[0] == "verify" else 0)
        assert OTHER[:12] in printed
        assert printed.replace("\n", "").isprintable()
    rows = {row["key"]: row["problem"] for row in json.loads(command("list", "--json")[1])}
    assert rows[KEY] is None and rows[OTHER]
    assert "1 of 2 graphs are whole and trusted" in command("verify")[1]
    assert command("show", KEY)[0] == command("export", KEY, str(tmp_path / "out.graph"))[0] == 0
    status, printed = command("show", OTHER)
    assert (status == 0) == (kind == "escapes") and printed.replace("\n", "").isprintable()
    assert store.find(OTHER) is None and store.find(KEY) is not None


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["pipe", "zeroes", "deep", "surrogate", "number"])
def test_a_note_that_is_none_is_as_good_as_none(store: GraphStore, kind: str) -> None:
    store.notes.write("calls", KEY, [1])
    path = store.folder / "calls" / f"{KEY}.json"
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "zeroes":
        path.symlink_to("/dev/zero")
    else:
        path.write_text(
            {"deep": "[" * 50_000, "surrogate": '{"text": "\\ud800", "seal": "\\ud800"}', "number": "5"}[kind]
        )
    assert store.notes.read("calls", KEY) is None
    store.notes.write("calls", KEY, [2])
    assert store.notes.read("calls", KEY) == [2]


@pytest.mark.parametrize("content", ["5", "[[1]]", '{"a": 1}', '["x"]', "null", "[", "[" * 50_000, "\ud800"])
def test_a_list_of_trusted_graphs_that_is_none_is_said_and_trusts_nothing(
    store: GraphStore, tmp_path: Path, command: Command, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    foreign = make_artifact()
    ours = store.save(make_artifact(OTHER))
    store.trust(foreign)
    (tmp_path / "foreign.graph").write_bytes(pack([foreign]))
    (tmp_path / "config" / "trusted.json").write_bytes(content.encode("utf-8", "surrogatepass"))
    for arguments in (
        ["import", str(tmp_path / "foreign.graph")],
        ["import", "--trust", str(tmp_path / "foreign.graph")],
    ):
        status, printed = command(*arguments)
        assert status == 1 and "trusted.json is damaged; delete it" in printed
    assert ours.exists() and store.find(OTHER) is not None


def test_a_list_of_trusted_graphs_that_others_can_write_to_is_refused(store: GraphStore, tmp_path: Path) -> None:
    store.trust(make_artifact())
    (tmp_path / "config" / "trusted.json").chmod(0o666)
    with pytest.raises(OSError, match=r"access to .*trusted\.json"):
        store.adopt(make_artifact())
