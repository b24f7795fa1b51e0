"""rotary.py: what is fused in the place of comfy-kitchen's rotations computes what the library computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from onediff_comfy.capture.rewrites.rotary import rotates_plainly

kitchen = pytest.importorskip("comfy_kitchen", reason="comfy-kitchen is a part of newer hosts")

BATCH, HEADS, TOKENS, WIDTH = 2, 3, 10, 8


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rotations(tokens: int = TOKENS, width: int = WIDTH) -> torch.Tensor:
    angles = values(1, 1, tokens, width // 2, seed=3)
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((cos, -sin, sin, cos), -1).unflatten(-1, (2, 2))


def forms() -> Any:
    from onediff_comfy.host.weights.rotations import fused_rotations

    return fused_rotations(torch.ops.comfy_kitchen)


def arguments(name: str, dtype: torch.dtype, tokens: int = TOKENS) -> tuple[torch.Tensor, ...]:
    queries, keys = (values(BATCH, HEADS, TOKENS, WIDTH, seed=seed).to(dtype) for seed in (1, 2))
    given = (queries,) if "1" in name else (queries, keys)
    scales = (values(WIDTH, seed=4).to(dtype), values(WIDTH, seed=5).to(dtype))[: len(given)]
    return (*given, rotations(tokens), *(scales if "rms" in name else ()))


HALVES, NUMBERS = ("", "_split_half"), ("", "1")
NAMES = [first + half + one for first in ("apply_rope", "rms_rope") for half in HALVES for one in NUMBERS]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_what_the_library_computes(name: str, dtype: torch.dtype) -> None:
    operator, given = getattr(torch.ops.comfy_kitchen, name), arguments(name, dtype)
    tight = {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0, "atol": 0}
    found = forms()
    torch.testing.assert_close(found[operator](*given), operator(*given), **tight)
    assert found[operator.default] is found[operator]


@pytest.mark.parametrize("name", [name for name in NAMES if "split_half" not in name])
def test_the_library_takes_what_is_not_plain(name: str) -> None:
    """Rotations for more tokens than there are: the library leaves the last ones out."""
    operator, given = getattr(torch.ops.comfy_kitchen, name), arguments(name, torch.float32, TOKENS + 3)
    torch.testing.assert_close(forms()[operator](*given), operator(*given), rtol=0, atol=0)


def test_a_part_of_each_row_may_be_rotated() -> None:
    operator = torch.ops.comfy_kitchen.rms_rope_split_half
    queries, keys = (values(BATCH, HEADS, TOKENS, WIDTH, seed=seed) for seed in (1, 2))
    given = (queries, keys, rotations(width=4), values(WIDTH, seed=4), None, 1e-6, 4)
    torch.testing.assert_close(forms()[operator](*given), operator(*given), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("x", "table", "plain"),
    [
        ((2, 3, 10, 8), (1, 1, 10, 4, 2, 2), True),
        ((2, 3, 10, 8), (2, 1, 10, 4, 2, 2), True),
        ((2, 3, 10, 8), (1, 1, 12, 4, 2, 2), False),  # for more tokens
        ((2, 3, 10, 8), (1, 1, 10, 2, 2, 2), False),  # for half of each row
        ((2, 3, 10, 8), (10, 4, 2, 2), False),
    ],
)
def test_plain_is_what_needs_no_cutting(x: tuple[int, ...], table: tuple[int, ...], plain: bool) -> None:
    assert rotates_plainly(torch.empty(x), torch.empty(table)) is plain
    assert not rotates_plainly(torch.empty(x), torch.empty(table).bfloat16())
