"""functionalize.py: what writes to a tensor of its own needs no second trace, and nothing else is taken for that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from onediff_comfy.capture.call import NotCovered

Function = Callable[[torch.Tensor, torch.Tensor], Any]


class Writing(nn.Module):
    """``function`` of an image, behind a layer, and another one."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.layer = nn.Conv2d(4, 4, 1)
        self.function = function

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> Any:
        return self.function(self.layer(x), other)


def twice(h: torch.Tensor, other: torch.Tensor) -> Any:
    """As a UNet does with a ControlNet's residuals, and with what it keeps for later."""
    h += other
    kept = h * 2
    h -= kept.tanh()
    h.mul_(0.5).add_(other, alpha=3)
    return h + kept


def view_behind(h: torch.Tensor, other: torch.Tensor) -> Any:
    """What is written is read by a view that is made afterwards."""
    h += other
    return h.flatten(1).sum(1) + h.transpose(1, 2).flatten(1).amax(1)


def view_done_with(h: torch.Tensor, other: torch.Tensor) -> Any:
    before = h.flatten(1).sum(1)
    h += other
    return h * before[:, None, None, None]


def given_back(h: torch.Tensor, other: torch.Tensor) -> Any:
    h.add_(other)
    return h


def both_given_back(h: torch.Tensor, other: torch.Tensor) -> Any:
    return h, h.relu_(), h.add_(other)


def with_numbers(h: torch.Tensor, other: torch.Tensor) -> Any:
    return h.clamp_(-1, 1).div_(3).sub_(0.25) * other


def masks_and_roundings(h: torch.Tensor, other: torch.Tensor) -> Any:
    """As text encoders make a mask, and layers of few bits round."""
    mask = torch.empty_like(h).fill_(-2.0).triu_(1)
    return (h * 8).round_() + mask + torch.zeros_like(h).fill_(other.amax()).detach_()


def rows_filled(h: torch.Tensor, other: torch.Tensor) -> Any:
    """As Flux does with the positions of what it computes, and what is written is read in between."""
    h[:, 1] = h[:, 1] + other[:, 0]
    h[:, :, 2, :] = h[:, :, 2, :] - other[:, :, 1]
    first = h[:, 1].tanh()
    h[:, 1] = first * 2
    h += other
    h[:, 3] = other[:, 3, :1]
    return h * h[:, 1:2] + first[:, None]


def parts_filled(h: torch.Tensor, other: torch.Tensor) -> Any:
    """As FreeU_V2 does with half of the channels, and with its mask."""
    h[:, : h.shape[1] // 2] = h[:, : h.shape[1] // 2] * other.mean(1, keepdim=True)
    mask = torch.ones_like(h)
    height, width = h.shape[2] // 2, h.shape[3] // 2
    mask[..., height - 1 : height + 1, width - 1 : width + 1] = other.amax()
    h = h * mask
    h[:, 1:3, 0] = other[:, 1:3, 0]
    h[:, 1, 0] = other[:, 1, 1]
    h[:, ::2, -1] = other[:, ::2, 0]
    h[:, 2:, 1:3, 2].mul_(3)
    h += other
    h[:, 1:].clamp_(-1, 1)
    return h + mask


def row_of_a_part(h: torch.Tensor, other: torch.Tensor) -> Any:
    h[:, 1:3, 0] = other[:, 1:3, 0]
    return h * 2


def row_of_a_row(h: torch.Tensor, other: torch.Tensor) -> Any:
    h[:, 1, 0] = other[:, 1, 0]
    return h * 2


def row_of_every_other(h: torch.Tensor, other: torch.Tensor) -> Any:
    h[:, ::2, 0] = other[:, ::2, 0]
    return h * 2


def part_from_what_is_written_later(h: torch.Tensor, other: torch.Tensor) -> Any:
    source = other[:, 1:3, 0] * 2
    h[:, 1:3, 0] = source
    source += 1
    h[:, 1:3, 1].fill_(source.amax())
    return h * source.mean()


SIMPLE: dict[str, Function] = {
    function.__name__: function
    for function in (
        twice,
        view_behind,
        view_done_with,
        given_back,
        both_given_back,
        with_numbers,
        masks_and_roundings,
        rows_filled,
        parts_filled,
        part_from_what_is_written_later,
        row_of_a_part,
        row_of_a_row,
        row_of_every_other,
    )
}


def through_a_view(h: torch.Tensor, other: torch.Tensor) -> Any:
    h[:, 1:3] += other[:, 1:3]
    return h * 2


def row_seen_by_a_view(h: torch.Tensor, other: torch.Tensor) -> Any:
    rows = h.flatten(2)
    h[:, 1] = other[:, 1]
    return rows.sum(-1)


def row_that_is_kept(h: torch.Tensor, other: torch.Tensor) -> Any:
    row = h[:, 1]
    row.copy_(other[:, 1])
    return row + h[:, 0]


def row_made_before(h: torch.Tensor, other: torch.Tensor) -> Any:
    row = h[:, 1]
    h[:, 2] = other[:, 2]
    row.copy_(other[:, 1])
    return h * 2


def row_from_another(h: torch.Tensor, other: torch.Tensor) -> Any:
    h[:, 1] = h[:, 2]
    return h * other


def row_of_another_dtype(h: torch.Tensor, other: torch.Tensor) -> Any:
    h[:, 1] = other[:, 1].half()
    return h * 2


def row_that_gives_itself(h: torch.Tensor, other: torch.Tensor) -> Any:
    return h[:, 1].copy_(other[:, 1]) + h[:, 0]


def seen_by_a_view(h: torch.Tensor, other: torch.Tensor) -> Any:
    rows = h.flatten(2)
    h += other
    return rows.sum(-1)


def base_of_a_view(h: torch.Tensor, other: torch.Tensor) -> Any:
    rows = h.flatten(2)
    rows += other.flatten(2)
    return h - other


def another_dtype(h: torch.Tensor, other: torch.Tensor) -> Any:
    h = h.half()
    h += other
    return h.float()


def another_layout(h: torch.Tensor, other: torch.Tensor) -> Any:
    h = h * 1
    turned = h.transpose(2, 3)
    turned += other.transpose(2, 3)
    return turned


def a_mask(h: torch.Tensor, other: torch.Tensor) -> Any:
    return h.masked_fill_(other > 0, 2.0)


def a_power(h: torch.Tensor, other: torch.Tensor) -> Any:
    """Of one name with another operator: a number to the power of a tensor."""
    h.pow_(2)
    return h * other


def a_comparison(h: torch.Tensor, other: torch.Tensor) -> Any:
    """Which writes floats, and gives truth values."""
    h.gt_(0)
    return other * (h + h) / 2


def a_view_operator(h: torch.Tensor, other: torch.Tensor) -> Any:
    h = h + other
    h.transpose_(2, 3)
    return h * 2


def part_that_reads_the_whole(h: torch.Tensor, other: torch.Tensor) -> Any:
    h[:, 1:3].add_(h[:, 2:])
    return h * other


def part_made_before(h: torch.Tensor, other: torch.Tensor) -> Any:
    part = h[:, 1:3]
    h += other
    part.mul_(2)
    return h * 2


def part_of_a_turned(h: torch.Tensor, other: torch.Tensor) -> Any:
    h.transpose(2, 3)[:, 1:3].mul_(2)
    return h + other


def part_that_is_kept(h: torch.Tensor, other: torch.Tensor) -> Any:
    part = h[:, 1:3].mul_(2)
    h += other
    return h * part.sum()


def part_from_one_number(h: torch.Tensor, other: torch.Tensor) -> Any:
    h[:, 1:3].copy_(other.amax())
    return h * 2


def filled_as_a_whole(h: torch.Tensor, other: torch.Tensor) -> Any:
    """From then on both have equal values, and are two tensors all the same."""
    source = other * 2
    h[:] = source
    source += 1
    return h - source.tanh()


DIFFICULT: dict[str, Function] = {
    function.__name__: function
    for function in (
        filled_as_a_whole,
        part_that_reads_the_whole,
        part_made_before,
        part_of_a_turned,
        part_that_is_kept,
        part_from_one_number,
        through_a_view,
        row_seen_by_a_view,
        row_that_is_kept,
        row_made_before,
        row_from_another,
        row_of_another_dtype,
        row_that_gives_itself,
        seen_by_a_view,
        base_of_a_view,
        another_dtype,
        another_layout,
        a_mask,
        a_power,
        a_comparison,
        a_view_operator,
    )
}


def test_dropout_that_is_off_may_give_what_it_is_given(capture_of: Any, traced_again: list[Any]) -> None:
    """Its fake tensors do not show that. PyTorch's own second trace does not see it either, and the proof does."""

    def function(h: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        kept = F.dropout(h, 0.5, training=False)
        h += other
        return kept + 1

    capture_of(Writing(function), *_tensors(2, 6, 8), general=True)
    assert len(traced_again) == 1


def _tensors(batch: int, height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, 4, height, width), torch.randn(batch, 4, height, width)


@pytest.fixture
def traced_again(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The programs that were traced a second time."""
    again: list[Any] = []
    run = torch.export.ExportedProgram.run_decompositions

    def noted(program: Any, *arguments: Any) -> Any:
        again.append(program)
        return run(program, *arguments)

    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", noted)
    return again


@pytest.mark.parametrize("name", [*SIMPLE, *DIFFICULT])
def test_a_capture_computes_what_the_module_does(name: str, capture_of: Any, traced_again: list[Any]) -> None:
    module = Writing({**SIMPLE, **DIFFICULT}[name])
    captured = capture_of(module, *_tensors(2, 6, 8), general=True)
    assert bool(traced_again) == (name in DIFFICULT)
    graph = captured.capture.graph.graph
    operators = [node.target for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    assert not any(operator._schema.is_mutable for operator in operators)
    for sizes in ((2, 6, 8), (3, 4, 10)):
        x, other = _tensors(*sizes)
        with torch.no_grad():
            expected = module(x.clone(), other.clone())
            torch.testing.assert_close(captured.run(other, x), expected)


def test_what_writes_to_what_it_is_given_is_not_covered(capture_of: Any) -> None:
    class Given(nn.Module):
        def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            x.flatten(2).add_(1)
            return x * other

    with pytest.raises(NotCovered, match="writes to its inputs"):
        capture_of(Given(), *_tensors(2, 6, 8), general=True)


def test_the_order_in_which_others_write_does_not_matter(capture_of: Any, traced_again: list[Any]) -> None:
    """Two tensors in turns, and a list of parts of which each is written to."""

    def function(h: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        a, b = h * 1, other * 2
        a += b
        b += a
        a -= b
        return torch.cat([a, b])

    module = Writing(function)
    captured = capture_of(module, *_tensors(2, 6, 8), general=True)
    assert traced_again == []
    x, other = _tensors(1, 4, 4)
    with torch.no_grad():
        torch.testing.assert_close(captured.run(other, x), module(x, other))
