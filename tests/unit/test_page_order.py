"""Weights in Dynamic VRAM are kept in an order by which about as many bytes are brought for each block."""

from __future__ import annotations

import copy
import gc
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onediff_comfy.host.weights.page_order import places_of, spread_over_blocks

ALIGNED = 512
SIZES = st.lists(st.lists(st.integers(1, 10_000), min_size=1, max_size=5), min_size=2, max_size=12)


class Range:
    """Stands for comfy-aimdo's ModelVBAR."""

    def __init__(self, there: int = 0) -> None:
        self.there, self.asked, self.pages, self.offset = there, list[str](), [1], 0

    def loaded_size(self) -> int:
        return self.there

    def get_residency(self) -> list[int]:
        return self.pages

    def free_memory(self, _size: int) -> None:
        self.asked.append("free")

    def prioritize(self) -> None:
        self.asked.append("prioritize")


class Model(torch.nn.Module):
    """A list of blocks, and layers before and behind it, placed as the host does: the largest first."""

    def __init__(self, blocks: list[list[int]], others: tuple[int, ...] = (700, 20), there: int = 0) -> None:
        super().__init__()
        self.range = Range(there)
        self.others = torch.nn.ModuleList(self._layer(size) for size in others)
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(*map(self._layer, sizes)) for sizes in blocks)
        start = 4096
        for layer in sorted(self.layers(), key=lambda layer: -layer.size):
            layer._v, layer._v_signature = (self.range, start, layer.size), "brought"
            start += -(-layer.size // ALIGNED) * ALIGNED
        self.end, self.range.offset = start, start - 4096

    @staticmethod
    def _layer(size: int) -> Any:
        layer: Any = torch.nn.Identity()
        layer.size = size
        return layer

    def layers(self) -> list[Any]:
        return [layer for layer in self.modules() if hasattr(layer, "size")]

    def in_order(self) -> list[Any]:
        return sorted(self.layers(), key=lambda layer: layer._v[1])

    def spread(self) -> bool:
        return spread_over_blocks(self, self.blocks)


def brought(model: Model, kept: int) -> list[int]:
    """Of each block, how many bytes are not among the first layers, which are kept."""
    there = set(model.in_order()[:kept])
    return [sum(layer.size for layer in block if layer not in there) for block in model.blocks]


@given(SIZES)
def test_no_two_layers_overlap_and_none_is_outside_of_what_they_had(sizes: list[list[int]]) -> None:
    model = Model(sizes)
    model.spread()
    ends = [0, 4096]
    for layer in model.in_order():
        its_range, start, size = layer._v
        assert its_range is model.range and size == layer.size
        assert start % ALIGNED == 0 and start >= ends[-1]
        ends.append(start + size)
    assert ends[-1] <= model.end


@given(SIZES)
def test_wherever_memory_ends_as_many_bytes_of_each_block_are_brought_but_for_a_layer(sizes: list[list[int]]) -> None:
    """Unless a block has not as many."""
    model = Model(sizes)
    model.spread()
    for kept in range(2, len(model.layers()) + 1):
        behind = brought(model, kept)
        for block, bytes_of_it in zip(sizes, behind, strict=True):
            assert bytes_of_it == sum(block) or max(behind) - bytes_of_it <= max(block)


def test_of_equal_blocks_those_with_a_layer_less_are_not_side_by_side() -> None:
    """Else copies wait for the device in one half of them, and it for copies in the other."""
    model = Model([[4000, 3000]] * 41)
    model.spread()
    there = [behind < 7000 for behind in brought(model, 2 + 20)]
    assert sum(there) == 20
    assert max(len(list(run)) for _, run in itertools.groupby(there)) <= 2


def test_what_is_in_no_block_comes_first() -> None:
    model = Model([[50, 60], [9000, 40], [800]], others=(10, 20))
    assert model.spread()
    assert [layer.size for layer in model.in_order()] == [20, 10, 9000, 800, 50, 60, 40]


def test_a_block_is_left_with_as_much_as_others_and_not_with_what_is_largest() -> None:
    """Flux in 8 bits, a quarter of which is brought. Of few large layers some blocks had one, and some had none."""
    double, single = [113, 28, 9, 38, 38] * 2, [66, 47, 57]
    model = Model([[size * 1000 for size in double]] * 19 + [[size * 1000 for size in single]] * 38, others=(1, 1))
    model.spread()
    missing = next(behind for kept in itertools.count() if sum(behind := brought(model, kept)) <= 4_250_000)
    assert min(missing) >= 66_000 and max(missing) <= 114_000


def test_what_else_is_called_alike_is_no_place() -> None:
    others = [torch.nn.Identity() for _ in range(3)]
    for other, noted in zip(others, (7, torch.ones(2), ()), strict=True):
        other._v = noted  # type: ignore[assignment]
    assert Model([[50, 60], [9000, 40]]).spread()


def test_a_layer_that_blocks_share_has_one_place() -> None:
    model = Model([[50, 60], [9000, 40], [800]])
    model.blocks[2].append(model.blocks[0][0])  # type: ignore[operator, index]
    assert model.spread()
    assert len({layer._v[1] for layer in model.layers()}) == len(model.layers())
    assert sum(model.in_order()[-1]._v[1:]) <= model.end, "behind it are others' places"


def test_what_is_there_goes_and_is_brought_anew() -> None:
    model = Model([[50, 60], [9000, 40]], there=1)
    assert model.spread()
    assert model.range.asked == ["free", "prioritize"]
    assert {layer._v_signature for layer in model.layers()} == {None}


@given(SIZES)
def test_a_block_is_told_where_its_own_places_are_at_least(sizes: list[list[int]]) -> None:
    model = Model(sizes)
    for block in model.blocks:
        layers: list[Any] = list(block.children())
        places = places_of(layers)
        assert all(start in places and start + size - 1 in places for _, start, size in (each._v for each in layers))
        assert places[0] in [each._v[1] for each in layers], "and no address before them"
        assert places[-1] + 1 in [each._v[1] + each._v[2] for each in layers]


@pytest.mark.parametrize("note", [object(), (None, 4096), (None, 4096, 8, 0), (None, "4096", 8)])
def test_a_host_may_note_places_in_another_way(note: Any) -> None:
    model = Model([[8], [8]])
    layers = model.layers()
    assert len(places_of(layers)) > 0
    layers[1]._v = note
    assert places_of(layers) == range(0)
    assert not spread_over_blocks(model, model.blocks)


def test_places_are_given_once() -> None:
    """Else two models with other blocks over the same layers would move them to and fro. A new layer stays behind."""
    model = Model([[50, 60], [9000, 40], [800]])
    assert model.spread()
    late: Any = model.others[0]
    late._v = (model.range, model.end, late.size)
    before = [layer._v for layer in model.layers()]
    for layer in model.layers():
        layer._v_signature = "brought"
    assert not model.spread()
    assert [layer._v for layer in model.layers()] == before
    assert {layer._v_signature for layer in model.layers()} == {"brought"}


@pytest.mark.parametrize(
    "held",
    [
        *("a page is in use", "a layer is being brought", "the host records", "two ranges", "more is noted"),
        *("a layer is elsewhere", "a layer was copied"),
    ],
)
def test_nothing_moves_that_something_holds_on_to(held: str) -> None:
    """A layer that an extension has put something else in the place of, or a copy, may be called again."""
    model = Model([[50, 60], [9000, 40]])
    some: Any = model.layers()[-1]
    hidden = list[Any]()
    if held == "a page is in use":
        model.range.pages = [1, 3]
    elif held == "a layer is being brought":
        some._prefetch = {"resident": True}
    elif held == "the host records":
        model.blocks[0]._v_block = some._v  # type: ignore[assignment]
    elif held == "a layer is elsewhere":
        model.blocks[1][0] = torch.nn.Identity()  # type: ignore[index]
    elif held == "a layer was copied":
        hidden = [copy.copy(some)]
    elif held == "more is noted":
        some._v = (*some._v, "since another release")
    else:
        some._v = (Range(), *some._v[1:])
    before = [layer._v for layer in model.layers()]
    assert not model.spread()
    assert [layer._v for layer in model.layers()] == before
    del hidden


@pytest.mark.parametrize("copied", [True, False])
def test_frozen_objects_are_counted_like_any_others(copied: bool) -> None:
    """Some are in each process of Python 3.12, and an extension may freeze more: nothing follows from that."""
    model = Model([[50, 60], [9000, 40]])
    hidden = [copy.copy(model.layers()[-1])] if copied else []
    gc.freeze()  # once more: the tests' own are frozen already
    assert gc.get_freeze_count()
    assert model.spread() is not copied
    del hidden


def test_a_model_of_one_block_or_none_stays_as_it_is() -> None:
    assert not Model([[50, 60]]).spread()
    assert not Model([]).spread()
    assert not spread_over_blocks(torch.nn.Linear(2, 2), [])
