"""row_reductions.py: which reductions Inductor makes in one pass; afterwards the choice is its own again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.virtualized import V

from onediff_comfy.engines.inductor.while_compiling.row_reductions import MOST_ELEMENTS, rows_in_one_pass


def _in_one_pass(
    elements: int,
    hint: ReductionHint = ReductionHint.INNER,
    cooperative: bool = False,
    dense: bool = False,
    block: int | None = None,
) -> bool:
    read = SimpleNamespace(is_contiguous=lambda: False, stride1_for_last_dim=lambda: dense)
    node = SimpleNamespace(read_writes=SimpleNamespace(reads=[read]))
    features: Any = SimpleNamespace(
        reduction_numel=sympy.Integer(elements),
        numel=sympy.Integer(4608),
        get_reduction_hint=lambda: hint,
        reduction_nodes=lambda: [node],
        strict_sum_rblock=lambda: block,  # PyTorch 2.14
        has_strict_sum_multirow_reduction=lambda: False,
        strict_reduction_rblock=lambda: block,  # 2.15
        has_strict_multirow_reduction=lambda: False,
    )
    graph = GraphLowering(torch.fx.symbolic_trace(torch.nn.Identity()))
    with V.set_graph_handler(graph):
        return bool(V.choices.should_use_persistent_reduction(features, cooperative))


@pytest.mark.parametrize(
    ("elements", "inside", "outside"),
    [(1024, True, True), (3072, True, False), (MOST_ELEMENTS, True, False), (MOST_ELEMENTS + 1, False, False)],
)
def test_rows_that_fit_into_registers_are_read_once(elements: int, inside: bool, outside: bool) -> None:
    with rows_in_one_pass():
        assert _in_one_pass(elements) is inside
    assert _in_one_pass(elements) is outside


@pytest.mark.parametrize(("elements", "dense", "inside"), [(128, True, True), (128, False, False), (3072, True, False)])
def test_heads_within_wider_rows_are_read_once_if_each_is_dense(elements: int, dense: bool, inside: bool) -> None:
    with rows_in_one_pass():
        assert _in_one_pass(elements, ReductionHint.DEFAULT, dense=dense) is inside
    assert not _in_one_pass(elements, ReductionHint.DEFAULT, dense=dense)


def test_other_reductions_are_left_to_inductor() -> None:
    with rows_in_one_pass():
        assert not _in_one_pass(3072, ReductionHint.OUTER)
        assert _in_one_pass(3072, cooperative=True) is False
        assert _in_one_pass(3072, block=64) is False  # in an order that is set
