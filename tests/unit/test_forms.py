"""capture/forms.py: what is traced in the place of torch's functions computes the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from onediff_comfy.capture import forms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("batch", "heads", "n", "m"), [(1, 1, 70, 70), (2, 3, 33, 64)])
def test_wide_attention_is_attention(
    batch: int, heads: int, n: int, m: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forms, "_SCORES_AT_ONCE", 16 * m * batch * heads)  # 16 rows at a time, and a rest
    query, key, value = (torch.randn(batch, heads, size, 512, dtype=dtype) for size in (n, m, m))
    exact = F.scaled_dot_product_attention(query.double(), key.double(), value.double())
    eager = F.scaled_dot_product_attention(query, key, value)
    ours = forms.wide_attention()(query, key, value, 512**-0.5)
    assert (ours.shape, ours.dtype) == (eager.shape, eager.dtype)
    assert (ours - exact).norm() <= 1.2 * (eager - exact).norm() + 1e-6 * exact.norm()


@pytest.mark.parametrize("heads_last", [False, True])
def test_wide_attention_is_an_operator_that_can_be_traced(heads_last: bool) -> None:
    shapes = [(1, size, 2, 512) if heads_last else (1, 2, size, 512) for size in (5, 7, 7)]
    operands = (*(torch.randn(shape).transpose(1, 2 if heads_last else 1) for shape in shapes), 0.1)
    torch.library.opcheck(forms.wide_attention(), operands, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("options", [{"is_causal": True}, {"attn_mask": torch.randn(6, 6)}, {}])
def test_other_attention_stays_as_it_is(options: dict[str, torch.Tensor | bool]) -> None:
    query, key, value = torch.randn(3, 1, 2, 6, 300).unbind()
    expected = F.scaled_dot_product_attention(query, key, value, **options)
    torch.testing.assert_close(forms.attention(query, key, value, **options), expected, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_wide_attention_is_no_worse_than_the_kernel_it_replaces(dtype: torch.dtype) -> None:
    query, key, value = (torch.randn(1, 1, 5000, 512, dtype=dtype, device="cuda") for _ in range(3))
    exact = F.scaled_dot_product_attention(query.float(), key.float(), value.float())
    eager = F.scaled_dot_product_attention(query, key, value)
    ours = forms.attention(query, key, value)
    assert (ours - exact).norm() <= 1.1 * (eager - exact).norm()
