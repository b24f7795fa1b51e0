"""engines/oneflow/lowering: every operator in the table, compiled, against torch's own result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree

pytest.importorskip("oneflow", reason="OneFlow is not in this Python; make test-oneflow runs these in one that has it")

from cases import Case, cases
from graphs import capture_of, run

from onediff_comfy.engines.oneflow import OneFlowEngine
from onediff_comfy.engines.oneflow.lowering import FAMILIES, lowering_of

ALL = list(cases())


@pytest.mark.parametrize(("operator", "case"), [pytest.param(o, c, id=name) for name, o, c in ALL])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_an_operator_computes_what_torch_does(operator: Callable[..., Any], case: Case, dtype: torch.dtype) -> None:
    if "comfy_kitchen" in str(operator) and dtype == torch.float64:
        pytest.skip("torch's own side of this operator has no fp64")
    args, kwargs = pytree.tree_map_only(
        torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, (case.args, dict(case.kwargs))
    )
    capture, tensors = capture_of(operator, args, kwargs)
    before = [tensor.clone() for tensor in tensors]
    expected = operator(*args, **kwargs)
    actual = run(OneFlowEngine().compile(capture), tensors)
    for one, other in zip(actual, [expected] if isinstance(expected, torch.Tensor) else expected, strict=True):
        torch.testing.assert_close(one, other.contiguous(), rtol=2e-5, atol=2e-5)
    assert all(map(torch.equal, tensors, before)), "an input was written to"


def test_every_operator_in_the_table_has_a_case() -> None:
    tested = {operator for _, operator, _ in ALL} | {str(operator) for _, operator, _ in ALL}
    several = "<built-in function getitem>"  # in every case with more than one result
    assert [str(o) for table in FAMILIES.values() for o in table if o not in tested and str(o) != several] == []
    assert all(lowering_of(operator) is not None for _, operator, _ in ALL)
