"""capture/rewrites/step_cache_split.py: where a forward is cut, and that both halves compute what it computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from steps import Transformer, UNet, transformer_call, unet_call
from torch import nn

from onediff_comfy.capture.call import bind, split
from onediff_comfy.capture.export import Capture
from onediff_comfy.capture.rewrites.step_cache_split import with_brief, work

Made = Callable[..., Capture]


@pytest.fixture
def made(capture_of: Callable[..., Any]) -> Made:
    """A capture with its brief half."""

    def make(module: nn.Module, *tensors: torch.Tensor, general: bool = True, **options: Any) -> Capture:
        return with_brief(capture_of(module, *tensors, general=general).capture, **options)

    return make


def run(
    capture: Capture, module: nn.Module, tensors: Sequence[torch.Tensor], *features: torch.Tensor
) -> list[torch.Tensor]:
    weights = dict(module.named_parameters())
    call = split(bind(module.forward, tensors, {}))
    inputs = capture.binding.feed([weights[n] for n in capture.binding.weight_names], [*call.tensors, *features])
    with torch.no_grad():
        return list(capture.graph(*inputs))


CASES = {"transformer": (Transformer, transformer_call), "unet": (UNet, unet_call)}


@pytest.mark.parametrize("general", [True, False], ids=["general", "exact"])
@pytest.mark.parametrize("name", CASES)
def test_for_the_same_call_both_halves_give_the_forwards_output(made: Made, name: str, general: bool) -> None:
    kind, call = CASES[name]
    module, tensors = kind(), call()
    capture = made(module, *tensors, general=general)
    assert capture.brief is not None
    sizes = [{}, {"batch": 3, "height": 16, "width": 4}] if general else [{}]
    for size in sizes:
        tensors = call(**size)
        with torch.no_grad():
            expected = module(*tensors)
        output, early, deep = run(capture, module, tensors)
        torch.testing.assert_close(output, expected)
        again, early_again = run(capture.brief, module, tensors, deep)
        torch.testing.assert_close(again, expected)
        torch.testing.assert_close(early_again, early)


def test_a_transformers_brief_half_is_its_first_block_and_what_the_others_added(made: Made) -> None:
    module = Transformer()
    capture = made(module, *transformer_call())
    assert capture.brief is not None
    kept = {name.split(".")[1] for name in capture.brief.binding.weight_names if name.startswith("blocks.")}
    assert kept == {"0"}
    assert work(capture.brief) < work(capture) / 4
    # Another image: the first block's own part of the answer is new.
    tensors, other = transformer_call(), transformer_call()
    deep = run(capture, module, tensors)[-1]
    torch.testing.assert_close(run(capture, module, other)[-1].shape, deep.shape)
    with torch.no_grad():
        entered = torch.cat([other[2], module.enter(other[0].flatten(2).transpose(1, 2))], 1)
        late = module.blocks[0](entered, other[1]) + deep
        expected = module.leave(late[:, 5:]).transpose(1, 2).unflatten(2, (8, 12))
    torch.testing.assert_close(run(capture.brief, module, other, deep)[0], expected)


def test_a_unets_brief_half_goes_by_its_outermost_skip_connection(made: Made) -> None:
    module = UNet()
    capture = made(module, *unet_call())
    assert capture.brief is not None
    kept = {name.rsplit(".", 2)[0] for name in capture.brief.binding.weight_names if name[:2] in ("do", "up")}
    assert kept == {"down.0", "down.1", "up.3"}
    tensors, other = unet_call(), unet_call()
    deep = run(capture, module, tensors)[-1]
    with torch.no_grad():
        outer = module.up[3](torch.cat([deep, module.down[0](other[0], other[1])], 1), other[1])
        expected = module.out(outer)
    torch.testing.assert_close(run(capture.brief, module, other, deep)[0], expected)


@pytest.mark.parametrize("blocks", [0, 1])
def test_a_model_without_blocks_to_leave_out_stays_whole(
    made: Made, capture_of: Callable[..., Any], blocks: int
) -> None:
    module, tensors = Transformer(blocks), transformer_call()
    assert made(module, *tensors).brief is None
    assert made(module, *tensors).digest == capture_of(module, *tensors, general=True).digest


def test_a_model_whose_brief_half_would_be_half_of_it_stays_whole(made: Made) -> None:
    assert made(Transformer(2), *transformer_call()).brief is None
    assert made(Transformer(2), *transformer_call(), most_work=1.0).brief is not None


def test_what_comes_in_late_is_not_taken_for_the_image(made: Made) -> None:
    class Controlled(UNet):
        def forward(self, x: torch.Tensor, timestep: torch.Tensor, control: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            skips, image = [], x
            for block in self.down:
                image = block(image, timestep)
                skips.append(image)
            skips[0] = skips[0] + control
            for block in self.up:
                image = block(torch.cat([image, skips.pop()], 1), timestep)
            return self.out(image)

    module, (x, timestep) = Controlled(), unet_call()
    capture = made(module, x, timestep, torch.randn(2, 16, *x.shape[2:]))  # larger than the image itself
    assert capture.brief is not None
    assert work(capture.brief) < work(capture) / 2


def test_a_model_that_is_told_no_time_stays_whole(made: Made) -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = x + block(x)
            return x

    assert made(Plain(), torch.randn(2, 4, 8, 12)).brief is None


def test_a_whole_graph_is_another_than_the_forwards_own(made: Made, capture_of: Callable[..., Any]) -> None:
    module, tensors = Transformer(), transformer_call()
    whole = made(module, *tensors)
    assert whole.brief is not None
    digests = {whole.digest, whole.brief.digest, capture_of(module, *tensors, general=True).digest}
    assert len(digests) == 3
    assert made(Transformer(), *transformer_call()).digest == whole.digest
