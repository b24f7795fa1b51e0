"""passes/frames.py: convolutions over frames with channels together are the same; other convolutions stay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule

from onediff_comfy.engines.inductor.passes.frames import conv3d_together, put_channels_together

IMAGE = (2, 4, 5, 6, 7)
"""Batch, channels, frames, height, width."""


class Convolved(nn.Module):
    def __init__(self, convolve: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.convolve = convolve
        self.weight, self.bias = nn.Parameter(torch.randn(8, 4, 3, 3, 3)), nn.Parameter(torch.randn(8))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        output = self.convolve(image, self.weight, self.bias)
        # What a decoder does next, a norm of each pixel; and a view that there is where frames are together.
        return F.normalize(output, dim=1).view(output.shape[0], -1, *output.shape[3:])


def traced(module: nn.Module) -> GraphModule:
    """A graph of weight, bias and image."""
    with torch.no_grad():
        return torch.export.export(module, (torch.randn(IMAGE),)).run_decompositions({}).graph_module


def together(graph: GraphModule) -> int:
    return sum(node.target is conv3d_together() for node in graph.graph.nodes)


OPERATOR = ([1, 1, 1], [0, 1, 1], [1, 1, 1], False, [0, 0, 0], 1)

PADDED: dict[str, Any] = {
    "all sides": {"padding": 1},
    "no frames": {"padding": (0, 1, 1)},
    "none": {},
    "dilated": {"dilation": (1, 2, 2), "padding": 2},
}


@pytest.mark.parametrize("how", PADDED)
@pytest.mark.parametrize("bias", [True, False])
def test_it_is_the_same_convolution(how: str, bias: bool) -> None:
    module = Convolved(lambda image, weight, own: F.conv3d(image, weight, own if bias else None, **PADDED[how]))
    before = traced(module)
    after = put_channels_together(before)
    assert together(after) == 1
    given = (module.weight, module.bias, torch.randn(IMAGE))
    torch.testing.assert_close(after(*given), before(*given))


def test_it_is_found_under_each_of_its_names() -> None:
    module = Convolved(lambda *operands: torch.ops.aten.convolution(*operands, *OPERATOR))
    after = put_channels_together(traced(module))
    assert together(after) == 1
    given = (module.weight, module.bias, torch.randn(IMAGE))
    torch.testing.assert_close(after(*given)[0], module(given[2]))


def test_what_it_takes_and_gives_has_channels_together() -> None:
    image, weight = torch.randn(IMAGE), torch.randn(8, 4, 3, 3, 3)
    arguments = (weight, [1, 1, 1], [1, 1, 1], [1, 1, 1], 1)
    output = conv3d_together()(image, *arguments)
    assert output.is_contiguous(memory_format=torch.channels_last_3d)
    torch.library.opcheck(torch.ops.onediff_comfy.conv3d_together.default, (image, *arguments))


LOADED_FIRST = """
import torch
from onediff_comfy.engines.inductor.engine import InductorEngine

try:
    InductorEngine().from_parts(None, None, {"artifact": b"no artifact"})
except Exception:
    print(str(hasattr(torch.ops.onediff_comfy, "conv3d_together")).lower())
"""


def test_a_process_that_only_loads_graphs_has_the_operator(fresh_process: Callable[..., Any], tmp_path: Path) -> None:
    """An artifact calls it by its name, and another process made the artifact."""
    assert fresh_process(LOADED_FIRST, ONEDIFF_CACHE_DIR=str(tmp_path)) is True


@pytest.mark.parametrize(
    "convolve",
    [
        lambda image, weight, bias: F.conv3d(image, weight, bias, stride=(1, 2, 2)),
        lambda image, weight, bias: torch.ops.aten.convolution(
            image, weight.transpose(0, 1), bias, [1, 1, 1], [0, 0, 0], [1, 1, 1], True, [0, 0, 0], 1
        ),
        lambda image, weight, bias: F.conv2d(image[:, :, 0], weight[:, :, 0], bias)[:, :, None],
    ],
    ids=["patches", "transposed", "without frames"],
)
def test_others_stay(convolve: Callable[..., torch.Tensor]) -> None:
    before = traced(Convolved(convolve))
    assert put_channels_together(before) is before
