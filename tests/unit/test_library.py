"""What the library remembers beyond a process. (What it does with graphs is tested through dispatch and faults.)"""

from __future__ import annotations

from pathlib import Path

import pytest

from onediff_comfy.graphs.cache import GraphCache
from onediff_comfy.graphs.library import GraphLibrary
from onediff_comfy.metrics import Metrics
from onediff_comfy.store.store import GraphStore
from onediff_comfy.store.trust import Trust

KEY = "a" * 64


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    return tmp_path


def process(folders: Path) -> GraphLibrary:
    """The library of a new process on the same machine."""
    return GraphLibrary(GraphCache(1 << 30), Metrics(), GraphStore(folders / "cache", Trust(folders / "config")))


def test_what_was_learnt_of_calls_and_options_is_known_to_the_next_process(folders: Path) -> None:
    first = process(folders)
    first.serve_with("call", KEY)
    first.learn_option("target", "sigmas")
    first.learn_option("target", "patches")
    second = process(folders)
    assert second.graph_key_of("call") == KEY
    assert second.options_read("target") == {"sigmas", "patches"}
    assert second.graph_key_of("another call") is None
    assert second.options_read("another target") == frozenset()


def test_a_graph_that_was_found_wrong_is_not_compiled_again_after_a_restart(folders: Path) -> None:
    process(folders).retire(KEY, "off by 0.2")
    later = process(folders)
    assert "differed from eager" in str(later.retired(KEY))
    assert later.retired("b" * 64) is None


def test_without_a_store_everything_works_and_nothing_outlives_the_process() -> None:
    library = GraphLibrary(GraphCache(1 << 30), Metrics())
    library.serve_with("call", KEY)
    library.learn_option("target", "sigmas")
    assert library.graph_key_of("call") == KEY
    library.retire(KEY, "off by 0.2")
    assert library.retired(KEY) == "off by 0.2"
