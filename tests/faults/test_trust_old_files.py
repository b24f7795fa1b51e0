"""Graphs that were kept before manifests were checked so closely are found, with their notes.

``format2`` was written by commit 10b457b: ``make_artifact()`` of ``test_store`` in a store with the key below, and the
manifest of a graph that Inductor compiled there.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from test_store import KEY, SHAPES, GraphStore, Trust, assert_whole, make_artifact

from onediff_comfy.files import write_atomically
from onediff_comfy.store.artifact import FORMAT, Manifest
from onediff_comfy.store.graph_file import unpack

OLD = Path(__file__).with_name("format2")
SIGNING_KEY = bytes.fromhex("1e862a4287849a0ff3c46766d658858721d702e1ab8ed8d9dc3fc8d42bc608d3")


@pytest.fixture
def store(tmp_path: Path) -> GraphStore:
    write_atomically(tmp_path / "config" / "signing.key", SIGNING_KEY)
    for name, place in [
        ("kept.graph", f"graphs/{KEY}.graph"),
        ("call.json", f"calls/{'a' * 64}.json"),
        ("proved.json", f"proved/{KEY}.json"),
    ]:
        (tmp_path / "cache" / place).parent.mkdir(parents=True)
        shutil.copy(OLD / name, tmp_path / "cache" / place)
        (tmp_path / "cache" / place).chmod(0o644)  # as they were
    return GraphStore(tmp_path / "cache", Trust(tmp_path / "config"))


def test_an_old_graph_is_found_with_what_is_known_of_it(store: GraphStore) -> None:
    assert_whole(store.find(KEY), make_artifact())
    assert store.notes.calls("a" * 64) == [(KEY, SHAPES)]
    assert store.notes.read("proved", KEY) == [[2]]
    assert [entry.problem for entry in store.entries()] == [None]


def test_what_is_written_today_is_what_was_written_then(store: GraphStore) -> None:
    path = store.folder / "graphs" / f"{KEY}.graph"
    then = unpack(path.read_bytes())
    path.unlink()
    assert unpack(store.save(make_artifact()).read_bytes()) == then


def test_the_manifest_of_a_compiled_graph_is_read_as_it_was(store: GraphStore) -> None:
    text = (OLD / "manifest.json").read_text()
    assert Manifest.from_json(text).to_json() == text
    assert Manifest.from_json(text).format == FORMAT == 2
    assert unpack((OLD / "kept.graph").read_bytes())[0].manifest.format == FORMAT
