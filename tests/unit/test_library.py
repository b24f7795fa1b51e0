"""What the library remembers beyond a process. (What it does with graphs is tested through dispatch and faults.)"""

from __future__ import annotations

from pathlib import Path

import pytest

from onediff_comfy.cache.call_index import Candidate
from onediff_comfy.cache.memory import GraphCache
from onediff_comfy.capture.shape_range import ShapeRange
from onediff_comfy.compilation.library import GraphLibrary
from onediff_comfy.metrics import Metrics
from onediff_comfy.store.store import GraphStore
from onediff_comfy.store.trust import Trust

KEY = "a" * 64
EXACT = ShapeRange(((2, 4),), {})
GENERAL = ShapeRange((((1, "s0"), (2, "s1")),), {"s0": (1, None), "s1": (2, 64)}, ("s0 * s1 < 1000",))


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    return tmp_path


def process(folders: Path) -> GraphLibrary:
    """The library of a new process on the same machine."""
    return GraphLibrary(GraphCache(1 << 30), Metrics(), GraphStore(folders / "cache", Trust(folders / "config")))


def test_what_was_learnt_of_calls_and_options_is_known_to_the_next_process(folders: Path) -> None:
    first = process(folders)
    first.index.serve_with("call", KEY, EXACT)
    first.index.serve_with("call", "b" * 64, GENERAL)
    first.index.serve_with("call", KEY, EXACT)
    first.index.learn_option("target", "sigmas")
    first.index.learn_option("target", "patches")
    second = process(folders)
    expected = {KEY: EXACT, "b" * 64: GENERAL}
    for library in (first, second):
        assert {candidate.graph_key: candidate.shapes for candidate in library.index.candidates("call")} == expected
        assert len(library.index.candidates("call")) == 2
    assert second.index.options_read("target") == {"sigmas", "patches"}
    assert second.index.candidates("another call") == ()
    assert second.index.options_read("another target") == frozenset()


def test_a_graph_that_was_found_wrong_is_not_compiled_again_after_a_restart(folders: Path) -> None:
    process(folders).verdicts.retire(KEY, "off by 0.2")
    later = process(folders)
    assert "differed from eager" in str(later.verdicts.retired(KEY))
    assert later.verdicts.retired("b" * 64) is None


def test_sizes_that_were_proved_are_known_to_the_next_process_each_for_itself(folders: Path) -> None:
    first = process(folders)
    for sizes in [(1, 8), (), (2, 8)]:
        assert not first.verdicts.is_proved(KEY, sizes)
        first.verdicts.proved(KEY, sizes)
        assert first.verdicts.is_proved(KEY, sizes)
    second = process(folders)
    assert all(second.verdicts.is_proved(KEY, sizes) for sizes in [(1, 8), (2, 8), ()])
    assert not any(second.verdicts.is_proved(KEY, sizes) for sizes in [(8, 1), (1,), (1, 8, 1), (3, 8)])
    assert not second.verdicts.is_proved("b" * 64, (1, 8))


def test_what_is_proved_now_is_proved_though_it_is_one_of_very_many(folders: Path) -> None:
    library = GraphLibrary(GraphCache(1 << 30), Metrics())
    for number in range(1500):
        library.verdicts.proved(KEY, (number,))
    assert library.verdicts.is_proved(KEY, (1499,)) and library.verdicts.is_proved(KEY, (600,))
    assert not library.verdicts.is_proved(KEY, (0,)), "the list grows without end"


def test_a_graph_that_was_found_wrong_stays_wrong_though_it_was_right_for_other_sizes(folders: Path) -> None:
    first = process(folders)
    first.verdicts.proved(KEY, (1,))
    first.verdicts.retire(KEY, "off by 0.2 at another size")
    for library in (first, process(folders)):
        assert library.verdicts.retired(KEY)


def test_a_graph_that_another_process_made_is_found_when_asked_again(folders: Path) -> None:
    first, second = process(folders), process(folders)
    assert first.index.candidates("call") == ()
    second.index.serve_with("call", KEY, GENERAL)
    assert first.index.candidates("call") == (Candidate(KEY, GENERAL),)
    second.index.serve_with("call", "b" * 64, EXACT)
    first.index.forget_candidates("call")
    assert len(first.index.candidates("call")) == 2


def test_without_a_store_everything_works_and_nothing_outlives_the_process() -> None:
    library = GraphLibrary(GraphCache(1 << 30), Metrics())
    library.index.serve_with("call", KEY, GENERAL)
    library.index.learn_option("target", "sigmas")
    assert library.index.candidates("call") == (Candidate(KEY, GENERAL),)
    library.verdicts.retire(KEY, "off by 0.2")
    assert library.verdicts.retired(KEY) == "off by 0.2"


def test_a_note_that_cannot_be_read_is_as_good_as_none(tmp_path: Path) -> None:
    store = GraphStore(tmp_path / "cache", Trust(tmp_path / "config"))
    store.notes.add_call("call", "other", {"axes": "from another version"})
    library = GraphLibrary(GraphCache(1 << 30), Metrics(), store)
    assert library.index.candidates("call") == ()


@pytest.mark.parametrize("noted", [[[1, 2, 3]], [[KEY]], [[KEY, 5]], {"a": 1}, "text", 7, [None]])
def test_a_note_of_another_form_is_no_note(folders: Path, noted: object) -> None:
    """As a version that is yet to come may write it; it is sealed by the same key."""
    notes = GraphStore(folders / "cache", Trust(folders / "config")).notes
    for kind in ("calls", "options", "proved", "eager_seconds"):
        notes.write(kind, "call", noted)
    later = process(folders)
    assert later.index.candidates("call") == ()
    assert later.index.options_read("call") == frozenset()
    later.index.serve_with("call", KEY, EXACT)
    later.index.learn_option("call", "sigmas")
    again = process(folders)
    assert [candidate.graph_key for candidate in again.index.candidates("call")] == [KEY]
    assert again.index.options_read("call") == {"sigmas"}
    assert not again.verdicts.is_proved("call", (1,)) and not again.verdicts.eager_samples("call", (1,))


def test_a_process_that_was_stopped_while_it_compiled_holds_up_nobody(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onediff_comfy.store.store._LONGEST_COMPILATION_S", 0.1)
    stopped, other = (GraphStore(folders / "cache", Trust(folders / "config")) for _ in range(2))
    with stopped.compiling(KEY), other.compiling(KEY):
        pass
