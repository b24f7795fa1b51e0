"""What the editor's sidebar is made of: files described by their headers, memory set free."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_trust_docs import artifact_of

from onediff_comfy.cache.memory import GraphCache
from onediff_comfy.store.artifact import ArtifactError
from onediff_comfy.store.descriptions import described
from onediff_comfy.store.graph_file import manifests_in, pack
from onediff_comfy.store.store import GraphStore
from onediff_comfy.store.trust import Trust


@pytest.fixture
def store(tmp_path: Path) -> GraphStore:
    kept = GraphStore(tmp_path / "cache", Trust(tmp_path / "config"))
    kept.save(artifact_of("UNetModel all sizes"))
    return kept


def test_a_file_is_described_without_reading_its_parts(store: GraphStore) -> None:
    (entry,) = store.entries()
    content = entry.path.read_bytes()
    entry.path.write_bytes(content[: content.index(b"code")])  # the parts are cut off
    (found,) = described(store)
    assert (found.manifest.target, found.removable) == ("UNetModel all sizes", True)
    assert found.nbytes == entry.path.stat().st_size


@pytest.mark.timeout(20)
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes with names are of POSIX")
def test_a_pipe_among_the_graphs_holds_nobody(store: GraphStore) -> None:
    os.mkfifo(store.folder / "graphs" / f"{'6' * 64}.graph")
    assert len(described(store)) == 1


@pytest.mark.parametrize("content", [b"", b"rubbish!", b"\xff" * 64, b"\x10" + b"\0" * 7 + b"{}"])
def test_what_is_no_graph_file_is_left_out(store: GraphStore, content: bytes) -> None:
    path = store.folder / "graphs" / f"{'6' * 64}.graph"
    path.write_bytes(content)
    with pytest.raises(ArtifactError):
        manifests_in(path)
    assert len(described(store)) == 1


def test_what_a_shared_folder_holds_is_described_as_not_removable(store: GraphStore, tmp_path: Path) -> None:
    other = GraphStore(tmp_path / "own", Trust(tmp_path / "config"), [store.folder])
    assert [each.removable for each in described(other)] == [False]


def test_a_file_of_several_graphs_says_each(tmp_path: Path) -> None:
    (tmp_path / "two.graph").write_bytes(pack([artifact_of("Flux all sizes"), artifact_of("WanModel all sizes")]))
    assert [manifest.target for manifest in manifests_in(tmp_path / "two.graph")] == [
        "Flux all sizes",
        "WanModel all sizes",
    ]


def test_memory_is_set_free_and_counted() -> None:
    gone: list[str] = []
    cache = GraphCache(100, on_evict=gone.append)
    cache.put("a", SimpleNamespace(nbytes=3, shapes=SimpleNamespace(general=True)))  # type: ignore[arg-type]
    cache.put("b", SimpleNamespace(nbytes=4, shapes=None))  # type: ignore[arg-type]
    assert cache.clear() == 7
    assert (len(cache), cache.nbytes, gone) == (0, 0, ["a", "b"])
