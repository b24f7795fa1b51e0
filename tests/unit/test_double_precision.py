"""double_precision.py: angles of tokens are computed once, however many entries of a rotation use them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from onediff_comfy.engines.inductor.engine import InductorEngine
from onediff_comfy.engines.inductor.passes.double_precision import compute_once
from onediff_comfy.engines.inductor.passes.operands import in_memory

_CHANNELS, _THETA = 16, 10000


class Rotations(nn.Module):
    """A rotation for each token and pair of channels, from its place on two axes, as Flux has them."""

    def forward(self, places: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        rotations = torch.cat([self.rotation(places[..., axis]) for axis in (0, 1)], dim=-3)
        return (rotations * x[..., None, None, None]).sum(-1)

    def rotation(self, place: torch.Tensor) -> torch.Tensor:
        scale = torch.linspace(0, (_CHANNELS - 2) / _CHANNELS, steps=_CHANNELS // 2, dtype=torch.float64)
        angle = torch.einsum("...n,d->...nd", place.float(), 1.0 / (_THETA**scale))
        entries = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], dim=-1)
        return entries.unflatten(-1, (2, 2)).to(torch.float32)


def _tensors(batch: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 64, (batch, tokens, 2), generator=generator).float(), torch.randn(
        batch, tokens, generator=generator
    )


def test_each_angle_has_one_sine(capture_of: Callable[..., Any]) -> None:
    captured = capture_of(Rotations(), *_tensors(2, 6), general=True)
    graph = compute_once(captured.capture.graph)
    kept = [node.args[0] for node in graph.graph.nodes if node.target is in_memory()]
    assert {node.meta["val"].dtype for node in kept} == {torch.float64}
    assert len(kept) == 2 * (1 + 2)  # powers, a cosine and a sine of each axis
    for sizes in ((2, 6), (1, 9)):
        with torch.no_grad():
            given = captured.capture.binding.feed([], _tensors(*sizes))
            assert torch.equal(graph(*given)[0], Rotations()(*_tensors(*sizes)))


def test_inductor_writes_each_once(capture_of: Callable[..., Any]) -> None:
    from torch._inductor.utils import run_and_get_code

    captured = capture_of(Rotations(), *_tensors(2, 6), general=True)
    graph, code = run_and_get_code(InductorEngine().compile, captured.capture)
    text = "\n".join(code)
    counted = {name: len(re.findall(rf"(?:std::|\.){name}\(", text)) for name in ("pow", "cos", "sin")}
    assert counted == {"pow": 2, "cos": 2, "sin": 2}  # one of each for either axis
    with torch.no_grad():
        torch.testing.assert_close(graph([], captured.call.tensors)[0], Rotations()(*captured.call.tensors))


def test_others_stay_where_they_are(capture_of: Callable[..., Any]) -> None:
    class Single(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.float().sin() + (x.double() * 2).float()

    captured = capture_of(Single(), torch.randn(2, 6))
    assert compute_once(captured.capture.graph) is captured.capture.graph
