"""scaled_fp8.py: 8-bit numbers are rounded by the kernel that computes them, or by none that a compiler makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from releases import rounds_in_16_bits

from onediff_comfy.capture.rewrites import scaled_fp8
from onediff_comfy.engines.inductor import engine as inductor
from onediff_comfy.engines.inductor.engine import InductorEngine
from onediff_comfy.engines.inductor.passes import few_bits, operands
from onediff_comfy.engines.inductor.passes.regions import share_regions
from onediff_comfy.serving.verification import numerics

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CPU = torch.device("cpu")
FORMS = {torch._scaled_mm_v2: scaled_fp8.scaled_mm}


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _multiplies_here() -> bool:
    one, tensorwise = torch.ones(()), [0]
    left, right = values(16, 32).to(E4M3), values(16, 32, seed=1).to(E4M3).t()
    try:
        torch._scaled_mm_v2(left, right, [one], tensorwise, [], [one], tensorwise, [], None, torch.bfloat16)
    except (AttributeError, NotImplementedError):
        return False
    return True


multiplies = pytest.mark.skipif(not _multiplies_here(), reason="this PyTorch multiplies no 8-bit matrices on a CPU")


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


def assert_as_good(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Fail if two outputs differ by more than rounding. Processors with AMX sum in another order for each operator."""
    assert numerics.relative_error(actual, expected) < torch.finfo(actual.dtype).eps / 4


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_rounding_is_that_of_the_nearest_number_and_ends_at_the_largest(dtype: torch.dtype) -> None:
    scale, largest = torch.tensor(0.25), torch.finfo(dtype).max
    given = torch.cat((values(1000), torch.tensor([0.0, -0.0, 1e6, -1e6])))
    rounded = scaled_fp8.quantize_fp8(given, scale, dtype)
    assert rounded.dtype == dtype
    assert torch.equal(rounded.float(), (given * 4).clamp(-largest, largest).to(dtype).float())
    assert rounded[-2:].tolist() == [largest, -largest]
    assert torch.equal(scaled_fp8.dequantize_fp8(rounded, scale, torch.float16), (rounded.float() / 4).half())


@multiplies
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
        assert_as_good(found.run_on(block, *given), expected)


@multiplies
def test_what_is_not_handed_over_is_as_the_function_has_it() -> None:
    left, right, one = values(4, 32).to(E4M3), values(8, 32, seed=1).to(E4M3).t(), torch.ones(())
    given = (left, right, [one], [0], [], [one], [0], [], None, torch.bfloat16)
    assert torch.equal(scaled_fp8.scaled_mm(*given), torch._scaled_mm_v2(*given))


@multiplies
def test_tokens_are_rounded_as_they_lie_and_in_memory_before_they_are_rows(capture_of: Callable[..., Any]) -> None:
    block, given = Block(), (values(2, 12, 64).bfloat16(), values(2, 5, 64).bfloat16())
    found = capture_of(block, *given, forms=FORMS, general=True)
    graph = operands.write_operands_once(few_bits.quantize_where_computed(found.capture.graph))
    rounding = [node for node in graph.graph.nodes if node.target is scaled_fp8.quantize_operator().default]
    assert [node.args[0].meta["val"].ndim for node in rounding] == [3, 3]
    assert [user.target for node in rounding for user in node.users] == [operands.in_memory()] * 2
    weights = found.target.weights(found.capture.binding.weight_names, CPU)
    with torch.no_grad():
        output = graph(*found.capture.binding.feed(weights, found.call.tensors))[0]
        assert torch.equal(output, block(*given))


class Together(Block):
    """One product in 8 bits of two tensors side by side, as a Flux block makes it of attention and activation."""

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        x = torch.cat((text, image), 1)
        rows, activation = x.split((48, 80), -1)
        heads = rows.unflatten(-1, (4, 12)).transpose(1, 2).softmax(-1).transpose(1, 2).flatten(2)
        return self.product(torch.cat((heads, F.gelu(activation)), 2), self.narrow)


@multiplies
@pytest.mark.parametrize("saturates", [False, True])
def test_what_is_put_together_is_rounded_part_by_part(capture_of: Callable[..., Any], saturates: bool) -> None:
    net, given = Together(), (values(2, 12, 128).bfloat16(), values(2, 5, 128).bfloat16())
    found = capture_of(net, *given, forms=FORMS, general=True)
    graph = few_bits.quantize_where_computed(found.capture.graph)
    graph = operands.write_operands_once(few_bits.saturate_by_conversion(graph) if saturates else graph)
    operator = torch.ops.aten._to_copy.default if saturates else scaled_fp8.quantize_operator().default
    rounding = [node for node in graph.graph.nodes if node.target is operator and node.meta["val"].dtype == E4M3]
    assert [node.args[0].meta["val"].shape[-1] for node in rounding] == [48, 80]
    assert {user.target for node in rounding for user in node.users} == {operands.in_memory()}
    weights = found.target.weights(found.capture.binding.weight_names, CPU)
    with torch.no_grad():
        assert torch.equal(graph(*found.capture.binding.feed(weights, found.call.tensors))[0], net(*given))


@multiplies
def test_a_scale_of_one_is_made_once_and_divides_nothing(capture_of: Callable[..., Any]) -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("wide", "narrow", "scale"):
                self.register_buffer(name, getattr(Block(), name))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.product(F.gelu(self.product(x, self.wide)), self.narrow)

        def product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            one, whole = torch.ones((), dtype=torch.float32), torch.nn.functional.ScalingType.TensorWise
            rows = scaled_fp8.quantize_fp8(x.reshape(-1, x.shape[-1]), one, E4M3)
            by = F.scaled_mm(rows, weight.t(), one, whole, self.scale, whole, output_dtype=x.dtype)
            return by.reshape(*x.shape[:-1], weight.shape[0])

    net, x = Net(), values(2, 12, 64).bfloat16() * 500
    found = capture_of(net, x, forms=FORMS, general=True)
    graph = few_bits.share_ones(few_bits.quantize_where_computed(found.capture.graph))
    targets = [node.target for node in graph.graph.nodes]
    assert targets.count(torch.ops.aten.ones.default) == 1
    assert targets.count(scaled_fp8.saturate_operator().default) == 2
    assert scaled_fp8.quantize_operator().default not in targets
    weights = found.target.weights(found.capture.binding.weight_names, CPU)
    with torch.no_grad():
        assert_as_good(graph(*found.capture.binding.feed(weights, found.call.tensors))[0], net(x))


class Blocks(torch.nn.Module):
    """Blocks that repeat, with products in 8 bits whose scales each layer makes for itself."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(OneByOne(), OneByOne()) for _ in range(blocks))

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        x = torch.cat((text, image), 1)
        for block in self.blocks:
            x = block(x)
        return x


class OneByOne(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("wide", "narrow", "scale"):
            self.register_buffer(name, getattr(Block(), name))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.product(F.layer_norm(x, x.shape[-1:]), self.wide), approximate="tanh")
        together = torch.cat((x, hidden), 2).unflatten(2, (2, -1)).sum(2)
        return x + self.product(torch.cat((together.sin(), together.cos()), 2)[..., : hidden.shape[-1]], self.narrow)

    def product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        one, whole = torch.ones((), dtype=torch.float32), torch.nn.functional.ScalingType.TensorWise
        rows = scaled_fp8.quantize_fp8(x.reshape(-1, x.shape[-1]), one, E4M3)
        by = F.scaled_mm(rows, weight.t(), one, whole, self.scale, whole, output_dtype=x.dtype)
        return by.reshape(*x.shape[:-1], weight.shape[0])


@multiplies
@pytest.mark.parametrize(("saturates", "functions"), [(False, 3), (True, 7)])  # of two small blocks, or of one larger
def test_blocks_whose_rounding_moved_are_still_one_function(
    capture_of: Callable[..., Any], saturates: bool, functions: int
) -> None:
    blocks, given = Blocks(), (values(2, 12, 64).bfloat16(), values(2, 5, 64).bfloat16())
    found = capture_of(blocks, *given, forms=FORMS, general=True)
    graph = few_bits.share_ones(few_bits.quantize_where_computed(found.capture.graph))
    graph = operands.write_operands_once(few_bits.saturate_by_conversion(graph) if saturates else graph)
    shared = share_regions(graph)
    calls = [node for node in shared.graph.nodes if node.target is torch.ops.higher_order.invoke_subgraph]
    assert len(calls) == functions  # the first block is another one: it makes the scales that all use
    weights = found.target.weights(found.capture.binding.weight_names, CPU)
    with torch.no_grad():
        output = shared(*found.capture.binding.feed(weights, found.call.tensors))[0]
        assert_as_good(output, blocks(*given))


def test_what_others_use_is_put_together_before_it_is_rounded(capture_of: Callable[..., Any]) -> None:
    class Shared(Block):
        def forward(self, image: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            x = torch.cat((image, text), 2)
            return self.product(x, self.narrow) + x.sum()

    given = values(2, 12, 48).bfloat16(), values(2, 12, 80).bfloat16()
    found = capture_of(Shared(), *given, forms=FORMS, general=True)
    graph = few_bits.quantize_where_computed(found.capture.graph)
    rounding = [node for node in graph.graph.nodes if node.target is scaled_fp8.quantize_operator().default]
    assert [node.args[0].meta["val"].shape[-1] for node in rounding] == [128]


@multiplies
@rounds_in_16_bits
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


def _beyond(dtype: torch.dtype) -> torch.Tensor:
    """Numbers of every exponent and both signs, halfway between two of ``dtype``, beyond its largest, and none."""
    exact = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    finite = exact[exact.isfinite()].sort().values
    halves = (finite[1:] + finite[:-1]) / 2
    largest = torch.finfo(dtype).max
    edges = largest * torch.tensor([1.0, 1.01, 1.0625, 1.125, 2.0, 1e4])
    special = torch.tensor([torch.inf, torch.nan, torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny])
    positive = torch.cat((halves.abs(), halves.nextafter(torch.tensor(torch.inf)).abs(), edges, special))
    return torch.cat((finite, positive, -positive))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("one", [True, False])
def test_a_kernel_saturates_as_eager_does(
    capture_of: Callable[..., Any], dtype: torch.dtype, given: torch.dtype, one: bool
) -> None:
    """Every finite 8-bit number, what lies between two, what is beyond, infinities and what is not a number."""
    from torch._inductor.utils import run_and_get_code

    class Rounding(torch.nn.Module):
        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            by = torch.ones((), device=x.device) if one else scale
            return scaled_fp8.quantize_fp8(x, by, dtype).view(torch.uint8)

    x = _beyond(dtype).to(given)[:1024].reshape(1, 4, 256).cuda()
    scale = torch.tensor(1.0 if one else 0.37, device="cuda")
    assert x.isnan().any() and x.isinf().any()
    found = capture_of(Rounding(), x, scale)
    graph, code = run_and_get_code(InductorEngine().compile, found.capture)
    saturates = scaled_fp8.conversion_saturates(x.device)
    assert ("clamp" in "\n".join(code) or "maximum" in "\n".join(code)) is not saturates
    expected = scaled_fp8.quantize_fp8(x, scale, dtype)
    rounded = graph([], found.call.tensors)[0].view(dtype)
    assert torch.equal(rounded.float().nan_to_num(nan=-12345.0), expected.float().nan_to_num(nan=-12345.0))


@pytest.mark.parametrize("fuses", [True, False])
def test_where_triton_has_no_8_bit_numbers_no_kernel_has_them(
    capture_of: Callable[..., Any], fuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.utils import run_and_get_code

    monkeypatch.setattr(inductor, "fuses_fp8", lambda _device: fuses)
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
    assert scaled_fp8.conversion_saturates(torch.device("cuda")) is fuses
    assert not scaled_fp8.conversion_saturates(CPU)


def test_where_conversion_saturates_nothing_is_compared_before_it(capture_of: Callable[..., Any]) -> None:
    class Rounding(torch.nn.Module):
        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            rounded = (scaled_fp8.quantize_fp8(x, by, E4M3) for by in (scale, torch.ones(())))
            return torch.cat([eight.view(torch.uint8) for eight in rounded])

    x, scale = values(2, 12, 64).bfloat16(), torch.tensor(0.5)
    found = capture_of(Rounding(), x, scale, general=True)
    graph = few_bits.saturate_by_conversion(few_bits.quantize_where_computed(found.capture.graph))
    targets = [node.target for node in graph.graph.nodes]
    assert not {scaled_fp8.quantize_operator().default, scaled_fp8.saturate_operator().default} & set(targets)
    divisions = [node for node in graph.graph.nodes if node.target is torch.ops.aten.div.Tensor]
    assert [node.meta["val"].dtype for node in divisions] == [torch.float32]
    given = found.capture.binding.feed([], found.call.tensors)
    assert torch.equal(graph(*given)[0], Rounding()(x, scale))  # none of these is beyond
