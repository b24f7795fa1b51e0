"""Calls that differ in a plain value each time: a trace and a compilation for each would never end."""

from __future__ import annotations

from typing import Any

import torch
from test_general import Served, process
from torch import nn

from onediff_comfy.serving.resolution import graph_provider


class Cached(nn.Module):
    """As a text encoder that is handed how many tokens are known already."""

    def forward(self, x: torch.Tensor, known: list[Any]) -> torch.Tensor:
        (cache, count) = known[0]
        return x + cache[:, :count].sum()


def right(served: Served, count: int, tokens: int = 4) -> bool:
    x, known = torch.randn(1, tokens), [(torch.randn(1, 64), count)]
    with torch.no_grad():
        actual = served.dispatcher(served.module, served.module.forward, (x, known), {})
        return torch.allclose(actual, served.module(x, known), rtol=1e-4)


def test_graphs_are_made_for_so_many_values_and_no_more() -> None:
    served, most = Served(process(), Cached()), graph_provider.MOST_VALUES
    assert all(right(served, count) for count in range(1, most + 9))
    assert served.counts["captured"] <= 2 * most  # of all sizes, and of these alone where that fails
    assert served.fallbacks == {"plain values among its arguments are others in each call": 8}
    captured = served.counts["captured"]
    assert all(right(served, count) for count in (1, most))
    assert (served.counts["captured"], sum(served.fallbacks.values())) == (captured, 8)


def test_other_sizes_are_no_other_values() -> None:
    served = Served(process(), Cached())
    assert all(right(served, 3, tokens) for tokens in range(4, 24))
    assert served.fallbacks == {}
