"""host/weights/gguf.py: tensors of bytes that note what they stand for, as ComfyUI-GGUF's layers read them."""

from __future__ import annotations

import enum
import operator
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
    """A LoRA's factors, as the host keeps them: up, down, alpha, a middle, magnitudes (DoRA), another shape."""

    def __init__(self, up: torch.Tensor, down: torch.Tensor, alpha: float | None = None, dora: Any = None) -> None:
        self.name = "lora"
        self.loaded_keys = {f"lora_{alpha}"}
        self.weights = (up, down, alpha, None, dora, None)


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
        for patches, key in weight.patches:
            assert key == "weight"
            for strength, adapter, *_ in patches:
                up, down, alpha, _, dora, _ = adapter.weights
                scale = 1.0 if alpha is None else alpha / down.shape[0]
                if dora is not None and strength != 1.0:
                    scale *= 2
                plain = plain + (strength * scale) * (up @ down)
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


def lora(rank: int, seed: int = 0, strength: float = 0.3, **more: Any) -> list[Any]:
    """A weight's patches, with a LoRA among them, as the pack notes them on the weight."""
    adapter = Adapter(values(OUT, rank, seed=seed), values(rank, IN, seed=seed + 1), **more)
    return [([(strength, adapter, 1.0, None, None)], "weight")]


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
    assert set(made.binding.weight_names) == {"weight/bytes", *(f"weight/patch_{index}" for index in range(3))}
    assert torch.equal(run(target, made, values(5, IN)), layer(values(5, IN)))
    layer.weight.patches = lora(2, seed=7)
    assert Target(layer, formats=FORMATS).fingerprint == target.fingerprint
    assert torch.equal(run(target, made, values(5, IN)), layer(values(5, IN)))


def test_a_loras_strength_and_alpha_are_inputs_too() -> None:
    layer = Layer(quantised(patches=lora(2, alpha=3.0)))
    target, made = captured(layer, values(5, IN))
    for strength, alpha in ((0.7, 3.0), (-1, 0.1)):
        layer.weight.patches = lora(2, strength=strength, alpha=alpha)
        assert Target(layer, formats=FORMATS).fingerprint == target.fingerprint
        assert torch.equal(run(target, made, values(5, IN)), layer(values(5, IN)))


def test_a_strength_that_code_decides_by_is_no_input() -> None:
    layer = Layer(quantised(patches=lora(2, dora=values(OUT))))
    target, made = captured(layer, values(5, IN))
    assert torch.equal(run(target, made, values(5, IN)), layer(values(5, IN)))
    layer.weight.patches = lora(2, dora=values(OUT), strength=1.0)
    assert Target(layer, formats=FORMATS).fingerprint != target.fingerprint


def test_patches_are_moved_to_the_weight_once() -> None:
    """A host keeps LoRAs in CPU memory, and a graph takes all its weights from one device."""
    form, weight = BlocksOfBytes(), quantised(patches=lora(2)).to("meta")
    parts = form.parts(weight)
    assert {part.device.type for part in parts} == {"meta"}
    assert [part.dtype for part in parts] == [torch.uint8, torch.float64, torch.float32, torch.float32]
    assert all(map(operator.is_, form.parts(weight)[1:], parts[1:]))
    weight.patches = lora(2)
    assert not any(map(operator.is_, form.parts(weight)[1:], parts[1:]))
    weight.patches = []
    assert len(form.parts(weight)) == 1


@pytest.mark.parametrize(
    "other",
    [
        lambda: quantised(),
        lambda: quantised(patches=lora(3)),
        lambda: quantised(patches=lora(2, alpha=1.0)),
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
