"""Arguments that are neither tensors nor options: numbers that may or may not be used, members of an enum."""

from __future__ import annotations

import enum
from typing import Any

import pytest
import torch
from torch import nn

from onediff_comfy.capture.call import NotCovered, bind, split
from onediff_comfy.capture.option_probe import OptionProbe, OptionRead

OPTIONS = "transformer_options"


class Kind(enum.Enum):
    IMAGE = "image"
    VIDEO = "video"


class Counting(nn.Module):
    """Is told how many tokens there are; ``use`` says what it does with that."""

    def __init__(self, use: str = "not at all") -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.use = use

    def forward(
        self, x: torch.Tensor, count: int | None = None, kind: Kind = Kind.IMAGE, transformer_options: Any = None
    ) -> torch.Tensor:
        hidden: torch.Tensor = self.linear(x)
        handed_on = {"count": count}
        if self.use == "as a factor":
            hidden = hidden * handed_on["count"]
        if self.use == "as a size":
            hidden = hidden + torch.arange(handed_on["count"])  # type: ignore[arg-type]
        return -hidden if kind is Kind.VIDEO else hidden


class Looped(nn.Module):
    """Takes its samples one by one, so that it is another graph for each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.conv(x[sample]) for sample in range(x.size(0))])


def signature(read: tuple[str, ...] = (), **arguments: Any) -> Any:
    bound = bind(Counting().forward, (torch.zeros(2, 4),), {OPTIONS: {}, **arguments})
    return split(bound, options_name=OPTIONS, options_read=read).signature


def test_a_number_that_is_not_read_is_no_part_of_the_signature() -> None:
    assert signature(count=3) == signature(count=4)
    assert signature(("count",), count=3) != signature(("count",), count=4)
    assert signature(count=3) != signature(count=None)


@pytest.mark.parametrize("other", [True, "3", [3], (3,)])
def test_what_is_no_number_by_itself_always_is(other: Any) -> None:
    assert signature(count=3) != signature(count=other)
    assert signature(count=[3]) != signature(count=[4])


def test_a_number_in_a_call_without_options_always_is() -> None:
    assert signature(count=3, transformer_options=None) != signature(count=4, transformer_options=None)


def test_a_number_is_probed_in_a_trace_and_given_to_who_reads_it() -> None:
    call = split({"count": 3, "x": torch.zeros(1), OPTIONS: {}}, options_name=OPTIONS)
    assert call.probed == ("count",)
    assert type(call.rebuild(call.tensors)["count"]) is OptionProbe
    shown = split({"count": 3, "x": torch.zeros(1), OPTIONS: {}}, options_name=OPTIONS, options_read=("count",))
    assert (shown.probed, shown.rebuild(shown.tensors)["count"]) == ((), 3)


@pytest.mark.parametrize("use", ["as a factor", "as a size"])
def test_using_a_number_names_it_and_then_it_is_computed_with(use: str, capture_of: Any) -> None:
    module, x = Counting(use), torch.randn(2, 4)
    with pytest.raises(OptionRead) as raised:
        capture_of(module, x, count=4, transformer_options={})
    assert raised.value.name == "count"
    captured = capture_of(module, x, count=4, transformer_options={}, read=("count",))
    torch.testing.assert_close(captured.run(), module(x, count=4))


def test_a_number_that_is_handed_on_unused_needs_no_capture_of_its_own(capture_of: Any) -> None:
    module, x = Counting(), torch.randn(2, 4)
    first, second = (capture_of(module, x, count=count, transformer_options={}) for count in (3, 4))
    assert (first.call.signature, first.digest) == (second.call.signature, second.digest)
    torch.testing.assert_close(first.run(), module(x, count=3))


def test_a_member_of_an_enum_is_part_of_the_signature_and_the_graph(capture_of: Any) -> None:
    module, x = Counting(), torch.randn(2, 4)
    assert signature(kind=Kind.IMAGE) != signature(kind=Kind.VIDEO)
    captured = capture_of(module, x, kind=Kind.VIDEO)
    assert captured.call.rebuild(captured.call.tensors)["kind"] is Kind.VIDEO
    torch.testing.assert_close(captured.run(), module(x, kind=Kind.VIDEO))


def test_an_enum_that_cannot_be_found_by_name_is_not_covered() -> None:
    class Hidden(enum.Enum):
        ONE = 1

    with pytest.raises(NotCovered, match="Hidden"):
        signature(kind=Hidden.ONE)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_forward_that_loops_over_its_samples_has_a_graph_for_its_batch_and_all_sizes(
    batch: int, capture_of: Any
) -> None:
    module = Looped()
    captured = capture_of(module, torch.randn(batch, 4, 8, 8), general=True)
    for height, width in ((8, 8), (12, 20)):
        x = torch.randn(batch, 4, height, width)
        assert captured.covers(module, x)
        torch.testing.assert_close(captured.run_on(module, x), module(x))
    assert not captured.covers(module, torch.randn(batch + 1, 4, 8, 8))


class Video(nn.Module):
    """Its samples are the frames of videos, and see each other."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor, frames: int) -> torch.Tensor:
        videos = x.reshape(x.shape[0] // frames, frames, *x.shape[1:]).transpose(1, 2)
        hidden: torch.Tensor = self.conv(videos)
        return hidden.transpose(1, 2).reshape(x.shape)


def test_a_batch_that_is_made_up_of_frames_is_given_and_its_sizes_are_open(capture_of: Any) -> None:
    module = Video()
    captured = capture_of(module, torch.randn(6, 4, 8, 8), frames=3, general=True)
    x = torch.randn(6, 4, 12, 20)
    assert captured.capture.shapes.axes[0][0] == 6
    torch.testing.assert_close(captured.run_on(module, x, 3), module(x, 3))
