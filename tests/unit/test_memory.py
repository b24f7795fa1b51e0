"""cache/memory.py: least recently used first out, under a budget of bytes."""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.utils._pytree as pytree
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from onediff_comfy.cache.memory import GraphCache
from onediff_comfy.capture.export import Binding
from onediff_comfy.capture.shape_range import ShapeRange
from onediff_comfy.engines.base import CompiledGraph

EXACT = ShapeRange(((2, 4),), {})
GENERAL = ShapeRange((((1, "s0"), 4),), {"s0": (1, None)})


class Sized(CompiledGraph):
    """A graph of so many bytes, for one set of sizes or for many."""

    def __init__(self, size: int, general: bool = False) -> None:
        super().__init__(Binding((), {}, pytree.tree_structure(())), GENERAL if general else EXACT)
        self.size = size

    @property
    def nbytes(self) -> int:
        return self.size

    def __call__(self, weights: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return ()


def filled(budget: int, **sizes: int) -> tuple[GraphCache, list[str]]:
    evicted: list[str] = []
    cache = GraphCache(budget, evicted.append)
    for key, size in sizes.items():
        cache.put(key, Sized(size))
    return cache, evicted


def test_get_gives_what_was_put_and_none_otherwise() -> None:
    cache, _ = filled(10)
    graph = Sized(1)
    cache.put("a", graph)
    assert cache.get("a") is graph
    assert cache.get("b") is None
    assert "a" in cache
    assert "b" not in cache
    assert (len(cache), cache.nbytes) == (1, 1)


def test_the_least_recently_used_goes_first() -> None:
    cache, evicted = filled(3, a=1, b=1, c=1)
    cache.get("a")
    cache.put("d", Sized(1))
    assert evicted == ["b"]
    cache.put("e", Sized(1))
    assert evicted == ["b", "c"]
    assert "a" in cache


def test_putting_again_makes_it_the_most_recently_used_and_counts_it_once() -> None:
    cache, evicted = filled(3, a=1, b=1)
    cache.put("a", Sized(2))
    assert (len(cache), cache.nbytes, evicted) == (2, 3, [])
    cache.put("c", Sized(1))
    assert evicted == ["b"]


def test_asking_for_sizes_is_no_use() -> None:
    cache, evicted = filled(3, a=1, b=2)
    assert cache.sizes() == {"a": 1, "b": 2}
    cache.put("c", Sized(1))
    assert evicted == ["a"]


def test_looking_with_in_is_no_use() -> None:
    cache, evicted = filled(2, a=1, b=1)
    assert "a" in cache
    cache.put("c", Sized(1))
    assert evicted == ["a"]


def test_exactly_the_budget_fits() -> None:
    assert filled(3, a=1, b=2)[1] == []
    assert filled(2, a=1, b=2)[1] == ["a"]


def test_several_go_for_one_that_is_large() -> None:
    cache, evicted = filled(4, a=1, b=1, c=1, d=4)
    assert evicted == ["a", "b", "c"]
    assert "d" in cache


def test_the_newest_stays_though_it_exceeds_the_budget_alone() -> None:
    cache, evicted = filled(1, a=1, b=5)
    assert evicted == ["a"]
    assert "b" in cache
    cache.put("c", Sized(0))
    assert evicted == ["a", "b"]


def test_no_budget_keeps_one_graph() -> None:
    cache, evicted = filled(0, a=1, b=1)
    assert (len(cache), evicted) == (1, ["a"])


def test_a_graph_that_grew_is_counted_at_its_size_now() -> None:
    """A recorded CUDA graph has its memory only after its first call."""
    cache, evicted = filled(4)
    grows = Sized(1)
    cache.put("a", grows)
    cache.put("b", Sized(1))
    grows.size = 3
    assert cache.nbytes == 4
    cache.put("c", Sized(1))
    assert evicted == ["a"]
    assert cache.nbytes == 2


def test_discard_forgets_without_an_eviction() -> None:
    cache, evicted = filled(3, a=1)
    cache.discard("a")
    cache.discard("never there")
    assert (len(cache), cache.nbytes, evicted) == (0, 0, [])


def test_a_negative_budget_is_an_error_that_names_it() -> None:
    with pytest.raises(ValueError, match="-1 bytes"):
        GraphCache(-1)


def test_on_evict_may_use_the_cache() -> None:
    """It is called with no lock held."""
    seen: list[int] = []
    cache = GraphCache(1, lambda key: seen.append(len(cache) + (key in cache)))
    cache.put("a", Sized(1))
    cache.put("b", Sized(1))
    assert seen == [1]


def test_evictions_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "onediff_comfy"):
        filled(1, first=1, second=1)
    assert "evicted compiled graph first" in caplog.text


def test_graphs_for_one_set_of_sizes_go_before_those_for_many() -> None:
    """What serves every size is missed by all of them; least recently used is told among equals only."""
    cache, evicted = filled(4)
    for key, general in [("g1", True), ("g2", True), ("e1", False), ("e2", False)]:
        cache.put(key, Sized(1, general))
    cache.get("e1")
    for key in "wxyz":
        cache.put(key, Sized(1))
    assert evicted == ["e2", "e1", "w", "x"]
    cache.put("large", Sized(3))
    assert evicted[4:] == ["y", "z", "g1"]
    assert "g2" in cache


def test_the_newest_stays_though_it_is_for_one_set_of_sizes() -> None:
    cache, evicted = filled(1)
    cache.put("general", Sized(1, general=True))
    cache.put("exact", Sized(1))
    assert evicted == ["general"]
    assert "exact" in cache


def test_trimming_makes_room_for_what_grew_or_a_smaller_budget() -> None:
    cache, evicted = filled(4, a=1, b=1, c=1)
    cache.trim()
    assert evicted == []
    cache.budget = 2
    cache.trim()
    assert evicted == ["a"]
    cache.budget = 0
    cache.trim()
    assert (evicted, len(cache)) == (["a", "b"], 1)
    cache.discard("c")
    cache.trim()
    assert len(cache) == 0


KEYS = st.sampled_from("abcdef")
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["put exact", "put general"]), KEYS, st.integers(0, 6)),
        st.tuples(st.just("grow"), KEYS, st.integers(0, 6)),
        st.tuples(st.just("get"), KEYS, st.just(0)),
        st.tuples(st.just("discard"), KEYS, st.just(0)),
    ),
    max_size=40,
)


@given(st.integers(0, 12), OPERATIONS)
@settings(max_examples=300, deadline=None)
def test_behaves_like_the_simplest_model(budget: int, operations: list[tuple[str, str, int]]) -> None:
    model: OrderedDict[str, Sized] = OrderedDict()
    model_evicted: list[str] = []
    evicted: list[str] = []
    cache = GraphCache(budget, evicted.append)
    for operation, key, size in operations:
        if operation.startswith("put"):
            graph = Sized(size, operation == "put general")
            cache.put(key, graph)
            model.pop(key, None)
            model[key] = graph
            while len(model) > 1 and sum(kept.size for kept in model.values()) > budget:
                others = [old for old in model if old != key]
                model_evicted.append(next((old for old in others if model[old].shapes is EXACT), others[0]))
                del model[model_evicted[-1]]
            assert cache.get(key) is graph, "the newest is always kept"
            assert cache.nbytes <= budget or len(cache) == 1
        elif operation == "grow":
            if key in model:
                model[key].size += size
        elif operation == "get":
            assert cache.get(key) is model.get(key)
            if key in model:
                model.move_to_end(key)
        else:
            cache.discard(key)
            model.pop(key, None)
        assert len(cache) == len(model)
        assert cache.nbytes == sum(kept.size for kept in model.values())
        assert evicted == model_evicted


class Budgeted(RuleBasedStateMachine):
    """What must hold after any history, whatever the order in which graphs leave."""

    def __init__(self) -> None:
        super().__init__()
        self.left: list[str] = []
        self.cache = GraphCache(10, self.left.append)
        self.graphs: dict[str, Sized] = {}  # least recently used first

    @rule(key=KEYS, size=st.integers(0, 14), general=st.booleans())
    def put(self, key: str, size: int, general: bool) -> None:
        self.graphs.pop(key, None)
        graph = self.graphs[key] = Sized(size, general)
        self.after(lambda: self.cache.put(key, graph))
        assert self.cache.get(key) is graph

    @rule(budget=st.integers(0, 20))
    def another_budget(self, budget: int) -> None:
        self.cache.budget = budget
        self.after(self.cache.trim)

    @rule(key=KEYS)
    def use(self, key: str) -> None:
        assert self.cache.get(key) is self.graphs.get(key)
        if key in self.graphs:
            self.graphs[key] = self.graphs.pop(key)

    @rule(key=KEYS, size=st.integers(0, 6))
    def grow(self, key: str, size: int) -> None:
        if key in self.graphs:
            self.graphs[key].size += size
        self.after(self.cache.trim)

    @rule(key=KEYS)
    def discard(self, key: str) -> None:
        self.cache.discard(key)
        self.graphs.pop(key, None)

    def after(self, action: Callable[[], None]) -> None:
        self.left.clear()
        newest = list(self.graphs)[-1:]
        action()
        left = [self.graphs.pop(key) for key in self.left]
        assert self.cache.nbytes <= self.cache.budget or list(self.graphs) == newest
        if left:
            assert self.cache.nbytes + left[-1].size > self.cache.budget, "the last one left in vain"
        if any(graph.shapes.general for graph in left):
            exact = [key for key in self.graphs if not self.graphs[key].shapes.general]
            assert exact in ([], newest), "a general graph left before an exact one"

    @invariant()
    def holds_what_was_put_and_has_not_left(self) -> None:
        assert len(self.cache) == len(self.graphs)
        assert all(key in self.cache for key in self.graphs)
        assert self.cache.nbytes == sum(graph.size for graph in self.graphs.values())


TestBudget = Budgeted.TestCase
TestBudget.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def test_many_threads_leave_it_whole() -> None:
    """Every key put is evicted exactly once or still here, and nobody sees an exception."""
    evicted: Counter[str] = Counter()
    lock, errors = threading.Lock(), []

    def on_evict(key: str) -> None:
        with lock:
            evicted[key] += 1

    cache = GraphCache(5, on_evict)

    def work(name: int) -> None:
        try:
            for number in range(200):
                cache.put(f"{name}-{number}", Sized(1))
                cache.get(f"{(name + 1) % 4}-{number}")
                assert cache.nbytes <= 5
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert set(evicted.values()) == {1}
    assert len(evicted) + len(cache) == 4 * 200
