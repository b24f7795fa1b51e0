"""host/weights/gguf.py: tensors of bytes that note what they stand for, as ComfyUI-GGUF's layers read them."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from onediff_comfy.capture.call import NotCovered, bind, split
from onediff_comfy.capture.export import Capture
from onediff_comfy.capture.target.target import Target
from onediff_comfy.capture.tracing.trace_forward import TraceSettings, capture
from onediff_comfy.host.weights.gguf import BlocksOfBytes

CPU = torch.device("cpu")
FORMATS = (BlocksOfBytes(),)
OUT, IN = 8, 64


class Type(enum.IntEnum):
    F16 = 1
    Q8_0 = 8


class Noted(torch.Tensor):
    """As the pack's: its shape is that of the numbers, and functions of torch's give it back."""

    def __new__(cls, data: torch.Tensor, **_notes: Any) -> Any:
        return super().__new__(cls, data)

    def __init__(self, data: torch.Tensor, tensor_type: Type, tensor_shape: torch.Size, patches: Any = ()) -> None:
        super().__init__()
        self.tensor_type, self.tensor_shape, self.patches = tensor_type, tensor_shape, list(patches)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        moved = super().to(*args, **kwargs)
        moved.tensor_type = getattr(self, "tensor_type", None)
        moved.tensor_shape = getattr(self, "tensor_shape", moved.size())
        moved.patches = list(getattr(self, "patches", ()))
        return moved

    def clone(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def detach(self, *args: Any, **kwargs: Any) -> Any:
        return self

    @property
    def shape(self) -> torch.Size:
        return getattr(self, "tensor_shape", None) or self.size()


class Adapter:
    """A LoRA's factors, as the host keeps them."""

    def __init__(self, up: torch.Tensor, down: torch.Tensor) -> None:
        self.name = "lora"
        self.weights = (up, down, None)


class Layer(torch.nn.Module):
    def __init__(self, weight: Noted) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.weight.shape == (OUT, IN)
        weight = self.weight.to(x.device)
        if weight.tensor_type is Type.F16:
            return F.linear(x, weight.to(x.dtype))
        blocks = weight.data.reshape(-1, 34)
        scale, numbers = torch.split(blocks, [2, 32], dim=1)
        plain = (scale.view(torch.float16).to(x.dtype) * numbers.view(torch.int8)).reshape(weight.tensor_shape)
        for strength, adapter in weight.patches:
            up, down, _ = adapter.weights
            plain = plain + strength * (up @ down)
        return F.linear(x, plain)


@pytest.fixture(autouse=True)
def as_hosts_run_models() -> Any:
    with torch.inference_mode():
        yield


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def quantised(seed: int = 0, patches: Any = ()) -> Noted:
    blocks = values(OUT * IN // 32, 32, seed=seed)
    scale = blocks.abs().amax(1, keepdim=True) / 127
    numbers = (blocks / scale).round().to(torch.int8)
    data = torch.cat((scale.half().view(torch.uint8), numbers.view(torch.uint8)), 1).reshape(OUT, -1)
    return Noted(data, tensor_type=Type.Q8_0, tensor_shape=torch.Size((OUT, IN)), patches=patches)


def lora(rank: int, seed: int = 0) -> list[tuple[float, Adapter]]:
    return [(0.5, Adapter(values(OUT, rank, seed=seed), values(rank, IN, seed=seed + 1)))]


def captured(layer: Layer, x: torch.Tensor) -> tuple[Target, Capture]:
    target = Target(layer, formats=FORMATS)
    call = split(bind(layer.forward, (x,), {}))
    return target, capture(target, layer.forward, call, {}, TraceSettings("options", general=True))


def run(target: Target, made: Capture, x: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = made.graph(*made.binding.feed(target.weights(made.binding.weight_names, CPU), [x]))[0]
    return output


def test_bytes_are_inputs_and_the_layer_makes_numbers_of_them() -> None:
    layer = Layer(quantised())
    target, made = captured(layer, values(5, IN))
    assert made.binding.weight_names == ("weight/bytes",)
    assert (target.specs["weight/bytes"].dtype, target.specs["weight/bytes"].shape) == (torch.uint8, (OUT, 68))
    assert torch.equal(run(target, made, values(7, IN)), layer(values(7, IN)))
    layer.weight = torch.nn.Parameter(quantised(seed=3), requires_grad=False)
    assert torch.equal(run(target, made, values(7, IN)), layer(values(7, IN)))


def test_a_loras_factors_are_inputs_too() -> None:
    layer = Layer(quantised(patches=lora(2)))
    target, made = captured(layer, values(5, IN))
    assert set(made.binding.weight_names) == {"weight/bytes", "weight/patch_0", "weight/patch_1"}
    assert torch.equal(run(target, made, values(5, IN)), layer(values(5, IN)))
    layer.weight.patches = lora(2, seed=7)
    assert Target(layer, formats=FORMATS).fingerprint == target.fingerprint
    assert torch.equal(run(target, made, values(5, IN)), layer(values(5, IN)))


@pytest.mark.parametrize(
    "other",
    [
        lambda: quantised(),
        lambda: quantised(patches=lora(3)),
        lambda: quantised(patches=[(0.7, lora(2)[0][1])]),
        lambda: quantised(patches=lora(2) + lora(2)),
        lambda: Noted(values(OUT, IN).half(), tensor_type=Type.F16, tensor_shape=torch.Size((OUT, IN))),
    ],
)
def test_what_decides_on_the_code_is_in_the_fingerprint(other: Callable[[], Noted]) -> None:
    first, second = (Target(Layer(weight), formats=FORMATS) for weight in (quantised(patches=lora(2)), other()))
    assert first.fingerprint != second.fingerprint
    assert not first.refusal and not second.refusal


def test_numbers_in_16_bits_are_used_as_they_are() -> None:
    layer = Layer(Noted(values(OUT, IN).half(), tensor_type=Type.F16, tensor_shape=torch.Size((OUT, IN))))
    target, made = captured(layer, values(5, IN))
    expected = layer(values(5, IN))
    assert torch.equal(run(target, made, values(5, IN)), expected.as_subclass(torch.Tensor))


def test_bytes_are_not_taken_for_numbers() -> None:
    class Sums(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.weight.sum()

    with pytest.raises(NotCovered, match=r"^weights of a GGUF checkpoint are used"):
        captured(Sums(quantised()), values(5, IN))


def test_capturing_leaves_the_weight_as_it_was() -> None:
    layer = Layer(quantised(patches=lora(2)))
    weight, noted = layer.weight, dict(vars(layer.weight))
    captured(layer, values(5, IN))
    assert layer.weight is weight and vars(weight) == noted
