"""tensor_parts.py: a weight that is several tensors is several inputs of a graph, and one weight to the model."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import return_and_correct_aliasing

from onediff_comfy.capture.call import NotCovered
from onediff_comfy.capture.target.target import Target
from onediff_comfy.compilation import weightless_pickle

CPU = torch.device("cpu")
aten = torch.ops.aten


class Eighths(torch.Tensor):
    """A matrix in 8 bits with a scale, as a library may have it: PyTorch's protocol, and products of its own."""

    data8: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, data8: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, doubled: bool = False) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, data8.shape, dtype=dtype, device=data8.device)
        made.data8, made.scale, made.doubled = data8, scale, doubled
        return made

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return ["data8", "scale"], {"dtype": self.dtype, "doubled": self.doubled}

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, torch.Tensor], context: dict[str, Any], _size: Any, _stride: Any) -> Any:
        return Eighths(parts["data8"], parts["scale"], **context)

    @classmethod
    def of(cls, values: torch.Tensor, doubled: bool = False) -> Any:
        scale = values.abs().max() / 127
        return cls((values / scale).round().to(torch.int8), scale, values.dtype, doubled)

    def plain(self) -> torch.Tensor:
        return self.data8.to(self.dtype) * self.scale * (2 if self.doubled else 1)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.detach.default:
            whole = args[0]
            made = cls(whole.data8.detach(), whole.scale.detach(), whole.dtype, whole.doubled)
            return return_and_correct_aliasing(func, args, kwargs or {}, made)
        if func is aten.linear.default:
            return F.linear(args[0], args[1].plain(), *args[2:])
        raise NotImplementedError(func)


class Params4bit(torch.nn.Parameter):
    """A weight of a library that has no protocol."""

    quant_type = "nf4"


Params4bit.__module__ = "bitsandbytes.nn.modules"


class Layered(torch.nn.Module):
    def __init__(self, seed: int = 0, doubled: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first = torch.nn.Linear(6, 8)
        self.second = torch.nn.Linear(8, 4, bias=False)
        for layer in (self.first, self.second):
            values = torch.randn(layer.weight.shape, generator=generator)
            layer.weight = torch.nn.Parameter(Eighths.of(values, doubled), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.first.weight.shape == (8, 6)
        return self.second(F.gelu(self.first(x)))


@pytest.fixture(autouse=True)
def as_hosts_run_models() -> Any:
    with torch.inference_mode():
        yield


def rows(count: int = 5) -> torch.Tensor:
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize("general", [False, True])
def test_each_part_is_an_input_and_the_graph_computes_what_the_library_does(
    capture_of: Callable[..., Any], general: bool
) -> None:
    net = Layered().eval()
    found = capture_of(net, rows(), general=general)
    assert {"first.weight/data8", "first.weight/scale", "first.bias"} < set(found.capture.binding.weight_names)
    assert found.target.specs["first.weight/data8"].dtype == torch.int8
    assert torch.equal(found.run_on(net, rows()), net(rows()))
    assert torch.equal(found.run(rows(), target=Target(Layered(1).eval())), Layered(1).eval()(rows())) is False
    if general:
        assert torch.equal(found.run_on(net, rows(11)), net(rows(11)))


def test_other_values_of_the_parts_are_seen_at_the_next_call(capture_of: Callable[..., Any]) -> None:
    """A LoRA puts other tensors in the place of the weight's, in a weight of its own or in the same one."""
    net, other = Layered().eval(), Layered(1).eval()
    found = capture_of(net, rows())
    net.second.weight = other.second.weight
    assert torch.equal(found.run(rows()), net(rows()))
    net.first.weight.data8, net.first.weight.scale = other.first.weight.data8, other.first.weight.scale
    assert torch.equal(found.run(rows()), net(rows()))


def test_the_context_is_part_of_the_fingerprint_and_values_are_not() -> None:
    assert Target(Layered(0)).fingerprint == Target(Layered(1)).fingerprint
    assert Target(Layered(0)).fingerprint != Target(Layered(0, doubled=True)).fingerprint
    plain = Layered(0)
    plain.second.weight = torch.nn.Parameter(torch.zeros(4, 8), requires_grad=False)
    assert Target(Layered(0)).fingerprint != Target(plain).fingerprint


def test_a_weight_that_means_something_else_in_the_middle_of_a_run_is_not_used() -> None:
    net = Layered()
    target = Target(net)
    names = tuple(target.specs)
    target.weights(names, CPU)
    net.first.weight = Layered(0, doubled=True).first.weight
    with pytest.raises(NotCovered, match="replaced"):
        target.weights(names, CPU)
    net.first.weight = torch.nn.Parameter(torch.zeros(8, 6), requires_grad=False)
    with pytest.raises(NotCovered, match="replaced"):
        target.weights(names, CPU)


def test_capturing_leaves_the_layers_as_they_were(capture_of: Callable[..., Any]) -> None:
    net = Layered().eval()
    before = [dict(layer.__dict__) for layer in net.modules()]
    weights = [net.first.weight, net.first.bias, net.second.weight]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch.export says so of a layer that a forward leaves something on
        capture_of(net, rows())
    after = [dict(layer.__dict__) for layer in net.modules()]
    assert [list(found) for found in after] == [list(found) for found in before]
    assert all(a[name] is b[name] for a, b in zip(after, before, strict=True) for name in b)
    assert [net.first.weight is weights[0], net.first.bias is weights[1], net.second.weight is weights[2]] == [True] * 3


def test_what_a_library_does_not_do_is_refused_in_words(capture_of: Callable[..., Any]) -> None:
    class Sums(Layered):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sum() + self.first.weight.sum()

    with pytest.raises(NotCovered, match=r"^weights of a tests checkpoint are used .*\(sum\)$"):
        capture_of(Sums().eval(), rows())


def test_a_weight_without_the_protocol_is_refused_by_the_kind_of_its_file() -> None:
    net = torch.nn.Linear(4, 4)
    net.weight = Params4bit(net.weight.detach(), requires_grad=False)
    target = Target(net)
    with pytest.raises(NotCovered, match=r"^weights are those of a bitsandbytes NF4 checkpoint, "):
        target.weights(tuple(target.specs), CPU)


def test_a_model_without_such_weights_reads_them_as_before() -> None:
    net = torch.nn.Linear(4, 4)
    weight, bias = Target(net).weights(("weight", "bias"), CPU)
    assert weight is net.weight and bias is net.bias


def test_another_process_sees_the_same_weights_but_for_their_values(capture_of: Callable[..., Any]) -> None:
    net = Layered(0, doubled=True).eval()
    target = Target(net)
    data = weightless_pickle.to_bytes(net, target.formats)
    assert len(data) < 20_000
    with pytest.raises(weightless_pickle.Unpicklable):
        weightless_pickle.to_bytes(net)
    sent = weightless_pickle.from_bytes(data, CPU, target.formats)
    assert Target(sent).fingerprint == target.fingerprint
    assert capture_of(sent, rows()).digest == capture_of(net, rows()).digest


def test_classes_may_be_parts_of_classes(capture_of: Callable[..., Any]) -> None:
    net = Layered().eval()
    inner = net.second.weight
    net.second.weight = torch.nn.Parameter(Within(inner), requires_grad=False)
    found = capture_of(net, rows())
    assert "second.weight/inner/scale" in found.capture.binding.weight_names
    assert torch.equal(found.run(rows()), net(rows()))


class Within(torch.Tensor):
    """Has another such tensor for its only part."""

    inner: Any

    @staticmethod
    def __new__(cls, inner: Any) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        made.inner = inner
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Any], _context: None, _size: Any, _stride: Any) -> Any:
        return Within(parts["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.detach.default:
            return return_and_correct_aliasing(func, args, kwargs or {}, cls(args[0].inner.detach()))
        return func(*(arg.inner if isinstance(arg, cls) else arg for arg in args), **(kwargs or {}))
