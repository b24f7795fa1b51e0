"""upsampling.py: a convolution of an upsampled image, computed before it is upsampling, is the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from releases import since
from torch import nn

from onediff_comfy.engines.inductor.engine import InductorEngine
from onediff_comfy.engines.inductor.passes import upsampling

# What torch says of itself while its compiler is imported.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")


class Upsample(nn.Module):
    """As VAEs do it: by a factor; as UNets do it: to a size; and what is not that."""

    def __init__(self, to: str = "factor", channels: int = 8, bias: bool = True, **options: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 6, 3, **{"padding": 1, "bias": bias, **options})
        self.kind = to

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        height, width = x.shape[2:]
        how: dict[str, dict[str, Any]] = {
            "factor": {"scale_factor": 2.0},
            "size": {"size": (2 * height, 2 * width)},
            "exact": {"scale_factor": 2.0, "mode": "nearest-exact"},
            "three": {"scale_factor": 3.0},
            "nearly": {"scale_factor": 2.2, "mode": "nearest-exact"},
            "one side": {"size": (2 * height, width)},
            "bilinear": {"scale_factor": 2.0, "mode": "bilinear"},
            "twice": {"scale_factor": 2.0},
        }
        large = F.interpolate(x, **how[self.kind])
        output: torch.Tensor = self.conv(large)
        return output + large.mean() if self.kind == "twice" else output


@pytest.mark.parametrize("shape", [(1, 8, 1, 1), (2, 8, 5, 7), (1, 8, 16, 4)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_same_convolution(shape: tuple[int, ...], bias: bool, dtype: torch.dtype) -> None:
    module = Upsample(bias=bias).to(dtype)
    x = torch.randn(shape, dtype=dtype)
    exact = Upsample(bias=bias).double()
    exact.load_state_dict(module.state_dict())
    with torch.no_grad():
        reference = exact(x.double())
        eager = (module(x).double() - reference).norm()
        ours = upsampling.conv_of_upsampled()(x, module.conv.weight, module.conv.bias)
    assert (ours.shape, ours.dtype) == (reference.shape, dtype)
    # Sums of weights are rounded once more than eager rounds.
    assert (ours.double() - reference).norm() <= 2 * eager + torch.finfo(dtype).eps * reference.norm()


@pytest.mark.parametrize("general", [False, True])
@pytest.mark.parametrize("to", ["factor", "size", "exact"])
@pytest.mark.parametrize("bias", [True, False])
def test_it_is_found_and_takes_its_place(capture_of: Callable[..., Any], to: str, bias: bool, general: bool) -> None:
    module = Upsample(to, bias=bias).eval()
    captured = capture_of(module, torch.randn(2, 8, 6, 10), general=general)
    graph = upsampling.fold_upsampling(captured.capture.graph)
    assert _operators(graph) >= {"onediff_comfy.conv_of_upsampled.default"}
    assert not any(name.startswith(("aten.upsample", "aten._upsample")) for name in _operators(graph))
    assert len(_operators(captured.capture.graph) & {"onediff_comfy.conv_of_upsampled.default"}) == 0
    sizes = [(2, 6, 10)] + [(3, 4, 14), (1, 22, 2)] * general
    for batch, height, width in sizes:
        x = torch.randn(batch, 8, height, width)
        weights = captured.target.weights(captured.capture.binding.weight_names, x.device)
        with torch.no_grad():
            (output,) = graph(*captured.capture.binding.feed(weights, [x]))
            torch.testing.assert_close(output, module(x))


@pytest.mark.parametrize(
    "module",
    [
        Upsample("three"),
        pytest.param(Upsample("nearly"), marks=since("2.11", "has no such capture for all sizes")),
        Upsample("one side"),
        Upsample("bilinear"),
        Upsample("twice"),
        Upsample(channels=648),
        Upsample(groups=2),
        Upsample(stride=2),
        Upsample(padding=0),
        Upsample(padding=2, dilation=2),
        Upsample(padding="same"),
        Upsample(padding_mode="reflect"),
    ],
    ids=lambda module: f"{module.kind} {module.conv.extra_repr()}",
)
def test_anything_else_stays_as_it_is(capture_of: Callable[..., Any], module: nn.Module) -> None:
    for general in (True, False):
        captured = capture_of(module, torch.randn(1, module.conv.in_channels, 4, 4), general=general).capture
        assert upsampling.fold_upsampling(captured.graph) is captured.graph


def test_inductor_compiles_it_for_all_sizes(capture_of: Callable[..., Any]) -> None:
    torch._dynamo.reset()
    module = nn.Sequential(Upsample(), nn.SiLU(), Upsample("size", channels=6)).eval()
    captured = capture_of(module, torch.randn(2, 8, 6, 10), general=True)
    compiled = InductorEngine().compile(captured.capture)
    for batch, height, width in ((2, 6, 10), (1, 8, 4), (3, 2, 2)):
        x = torch.randn(batch, 8, height, width)
        weights = captured.target.weights(captured.capture.binding.weight_names, x.device)
        with torch.no_grad():
            (output,) = compiled(weights, [x])
            torch.testing.assert_close(output, module(x), rtol=1e-4, atol=1e-5)


def _operators(graph: torch.fx.GraphModule) -> set[str]:
    return {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
