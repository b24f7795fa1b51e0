"""Sums along rows in one pass.

Inductor keeps a row in registers only up to 1024 elements, and reads longer ones twice: once to sum, once to use the
sum. Up to 16384 elements one pass is faster: the layer norms of Flux and SDXL took 40.4 and 11.4 µs and take 20.0 and
6.9 (H200, cold L2; benchmarks/NOTES.md, section 19). The sums are the same, in another order.

Of rows that do not lie one behind the other, such as a query's heads within a wider tensor, Inductor keeps only 64
elements. Heads of 128 are kept here as well: what matters is that the elements of one row are neighbours.
"""

from __future__ import annotations

import contextlib
from typing import Any

MOST_ELEMENTS = 16384
"""Of a row that is kept in registers."""

MOST_ELEMENTS_APART = 1024
"""The same where rows do not lie one behind the other."""

_BLOCK_IN_ORDER = ("strict_sum_rblock", "strict_reduction_rblock")  # as PyTorch 2.14 and 2.15 call it


def rows_in_one_pass() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which Inductor, on this thread, generates Triton code that reads each row once.

    It does nothing in a PyTorch whose Inductor is not asked for such choices.
    """
    try:
        from torch._inductor.runtime.hints import ReductionHint
        from torch._inductor.virtualized import V

        chosen_before: Any = type(V.choices)
        decide = chosen_before.should_use_persistent_reduction
        use = V.set_choices_handler
    except (ImportError, AttributeError):
        return contextlib.nullcontext()

    class RowsInOnePass(chosen_before):
        @staticmethod
        def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
            hint = features.get_reduction_hint()
            apart = hint == ReductionHint.DEFAULT and _rows_are_dense(features)
            most = MOST_ELEMENTS if hint == ReductionHint.INNER else MOST_ELEMENTS_APART if apart else 0
            ours = not cooperative_reduction and not _order_is_set(features)
            if ours and V.graph.sizevars.statically_known_leq(features.reduction_numel, most):
                return True
            return bool(decide(features, cooperative_reduction))

    handler: contextlib.AbstractContextManager[Any] = use(RowsInOnePass())
    return handler


def _order_is_set(features: Any) -> bool:
    """Return True if sums are to be added up in eager's order, which PyTorch can be told from 2.14 on."""
    asked = (getattr(features, name, None) for name in _BLOCK_IN_ORDER)
    return any(block is not None and block() is not None for block in asked)


def _rows_are_dense(features: Any) -> bool:
    """Return True if whatever a kernel sums lies with the elements of each row next to one another."""
    sums = features.reduction_nodes()
    reads = [read for node in sums for read in node.read_writes.reads if hasattr(read, "stride1_for_last_dim")]
    return bool(reads) and all(read.is_contiguous() or read.stride1_for_last_dim() for read in reads)
