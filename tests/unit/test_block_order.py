"""benchmarks/block_order.py: how long steps take where blocks are brought, and what our order of layers makes of it."""

from __future__ import annotations

import pytest

from benchmarks import block_order
from benchmarks.block_order import MODELS, ORDERS, compared, left_out, step_seconds

BUS = 55_000_000_000  # bytes a second


@pytest.mark.parametrize(("computing", "step"), [(0.5, 5.0), (2.0, 20.0)])
def test_of_equal_blocks_a_step_is_the_larger_of_computing_and_copying(computing: float, step: float) -> None:
    assert step_seconds([BUS] * 10, computing) == pytest.approx(max(step, 10.0))


def test_a_block_with_more_to_bring_than_one_takes_to_compute_holds_the_device_up() -> None:
    assert step_seconds([2 * BUS, 0] * 5, 1.0) == pytest.approx(15.0)


def test_what_stays_is_what_comes_first_and_fits() -> None:
    assert left_out([(1, 30), (0, 20), (1, 5)], blocks=2, kept=50) == ([0, 5], 1)


@pytest.mark.parametrize("model", MODELS)
def test_our_order_is_no_worse_than_few_large_layers_and_brings_fewer_than_many_small_ones(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_order, "_SHARES", [0.4, 0.5, 0.6, 0.66, 0.7, 0.72, 0.8, 0.9])
    found = {name: compared(MODELS[model], order(MODELS[model])) for name, order in ORDERS.items()}
    assert found["ours"]["mean_over"] <= found["smallest-first"]["mean_over"] + 1e-9
    assert found["ours"]["layers"] <= 0.8 * found["largest-first"]["layers"]
