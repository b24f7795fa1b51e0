"""scaled_fp8.py: 8-bit numbers are rounded by the kernel that computes them, or by none that a compiler makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from onediff_comfy.capture.rewrites import scaled_fp8
from onediff_comfy.engines.inductor import engine
from onediff_comfy.engines.inductor.engine import InductorEngine
from onediff_comfy.engines.inductor.passes import operands

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CPU = torch.device("cpu")
FORMS = {torch._scaled_mm_v2: scaled_fp8.scaled_mm}


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Block(torch.nn.Module):
    """Two products in 8 bits, as ComfyUI's layers make them, of tokens of two kinds together."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in (("wide", (128, 64)), ("narrow", (64, 128))):
            self.register_buffer(name, (values(*shape, seed=len(name)) * 40).to(E4M3))
        self.register_buffer("scale", torch.tensor(1 / 400))
        self.register_buffer("one", torch.ones(()))

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        x = torch.cat((text, image), 1)
        hidden = F.gelu(self.product(F.layer_norm(x, (64,)), self.wide))
        return x + self.product(hidden, self.narrow)

    def product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows = scaled_fp8.quantize_fp8(x.reshape(-1, x.shape[-1]), self.one, E4M3)
        whole = torch.nn.functional.ScalingType.TensorWise
        by = F.scaled_mm(rows, weight.t(), self.one, whole, self.scale, whole, output_dtype=x.dtype)
        return by.reshape(*x.shape[:-1], weight.shape[0])


class Cast(torch.nn.Module):
    """8-bit weights that are read as what the input is, layer by layer, as with a loader's weight_dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", (values(10, 64) * 4).to(E4M3))
        self.register_buffer("weight", values(64, 64, seed=1).to(E5M2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = F.embedding(tokens, self.table).to(torch.float32)
        return F.gelu(F.linear(x, self.weight.to(x.dtype))) + self.weight.float().sum()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_rounding_is_that_of_the_nearest_number_and_ends_at_the_largest(dtype: torch.dtype) -> None:
    scale, largest = torch.tensor(0.25), torch.finfo(dtype).max
    given = torch.cat((values(1000), torch.tensor([0.0, -0.0, 1e6, -1e6])))
    rounded = scaled_fp8.quantize_fp8(given, scale, dtype)
    assert rounded.dtype == dtype
    assert torch.equal(rounded.float(), (given * 4).clamp(-largest, largest).to(dtype).float())
    assert rounded[-2:].tolist() == [largest, -largest]
    assert torch.equal(scaled_fp8.dequantize_fp8(rounded, scale, torch.float16), (rounded.float() / 4).half())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_product_of_matrices_with_a_scale_each_is_that_of_eager(
    capture_of: Callable[..., Any], dtype: torch.dtype
) -> None:
    block, given = Block(), (values(2, 12, 64).to(dtype), values(2, 5, 64).to(dtype))
    expected = block(*given)
    found = capture_of(block, *given, forms=FORMS, general=True)
    targets = [node.target for node in found.capture.graph.graph.nodes]
    assert targets.count(torch.ops.aten._scaled_mm.default) == 2
    assert torch.ops.aten._scaled_mm_v2.default not in targets
    with torch.no_grad():
        assert torch.equal(found.run_on(block, *given), expected)


def test_what_is_not_handed_over_is_as_the_function_has_it() -> None:
    left, right, one = values(4, 32).to(E4M3), values(8, 32, seed=1).to(E4M3).t(), torch.ones(())
    given = (left, right, [one], [0], [], [one], [0], [], None, torch.bfloat16)
    assert torch.equal(scaled_fp8.scaled_mm(*given), torch._scaled_mm_v2(*given))


def test_tokens_are_rounded_as_they_lie_and_in_memory_before_they_are_rows(capture_of: Callable[..., Any]) -> None:
    block, given = Block(), (values(2, 12, 64).bfloat16(), values(2, 5, 64).bfloat16())
    found = capture_of(block, *given, forms=FORMS, general=True)
    graph = operands.write_operands_once(scaled_fp8.quantize_before_flattening(found.capture.graph))
    rounding = [node for node in graph.graph.nodes if node.target is scaled_fp8._quantize().default]
    assert [node.args[0].meta["val"].ndim for node in rounding] == [3, 3]
    assert [user.target for node in rounding for user in node.users] == [operands.in_memory()] * 2
    weights = found.target.weights(found.capture.binding.weight_names, CPU)
    with torch.no_grad():
        output = graph(*found.capture.binding.feed(weights, found.call.tensors))[0]
        assert torch.equal(output, block(*given))


def test_inductor_rounds_in_the_kernel_that_computes(capture_of: Callable[..., Any]) -> None:
    from torch._inductor.utils import run_and_get_code

    block, given = Block(), (values(2, 12, 64).bfloat16(), values(2, 5, 64).bfloat16())
    found = capture_of(block, *given, forms=FORMS, general=True)
    graph, code = run_and_get_code(InductorEngine().compile, found.capture)
    kernels = [line for line in "\n".join(code).splitlines() if "async_compile.cpp_pybinding" in line]
    assert len(kernels) == 3  # norm and rounding; activation and rounding; the sum
    weights = found.target.weights(found.capture.binding.weight_names, CPU)
    with torch.no_grad():
        torch.testing.assert_close(graph(weights, found.call.tensors)[0], block(*given), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("fuses", [True, False])
def test_where_triton_has_no_8_bit_numbers_no_kernel_has_them(
    capture_of: Callable[..., Any], fuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.utils import run_and_get_code

    monkeypatch.setattr(engine, "fuses_fp8", lambda _device: fuses)
    net, tokens = Cast(), torch.tensor([[1, 7, 3], [9, 0, 2]])
    found = capture_of(net, tokens, general=True)
    graph, code = run_and_get_code(InductorEngine().compile, found.capture)
    assert ("at::Float8" in "\n".join(code)) is fuses  # as kernels name it; what calls them says torch.float8
    weights = found.target.weights(found.capture.binding.weight_names, CPU)
    with torch.no_grad():
        torch.testing.assert_close(graph(weights, found.call.tensors)[0], net(tokens), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("capability", "fuses"), [((8, 6), False), ((8, 0), False), ((8, 9), True), ((9, 0), True)])
def test_triton_has_8_bit_numbers_from_ada_on(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], fuses: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    assert scaled_fp8.fuses_fp8(torch.device("cuda")) is fuses
