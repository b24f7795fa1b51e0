"""fp8_linear.py and what a dispatcher makes of it: which layers, how far off, and lossless where it cannot be.

On a GPU that can, which is what people have; elsewhere on the CPU, whose operators are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from onediff_comfy.cache.keys import Variant
from onediff_comfy.cache.memory import GraphCache
from onediff_comfy.capture.export import Capture
from onediff_comfy.capture.rewrites import fp8_linear
from onediff_comfy.capture.rewrites.fp8_linear import IN_FP8, fp8_unavailable, linear
from onediff_comfy.compilation.compile_graph import HostServices
from onediff_comfy.compilation.library import GraphLibrary
from onediff_comfy.engines.base import Engine
from onediff_comfy.engines.eager import EagerEngine, EagerGraph
from onediff_comfy.messages import first_line
from onediff_comfy.metrics import Metrics
from onediff_comfy.serving.dispatcher import Dispatcher
from onediff_comfy.serving.options import Options
from onediff_comfy.store.store import GraphStore
from onediff_comfy.store.trust import Trust

CPU = torch.device("cpu")
WIDTH = 512


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where models are. Made before any test changes what the product asks of a GPU, for it keeps the answer."""
    gpu = torch.device("cuda", 0)
    return gpu if torch.cuda.is_available() and fp8_unavailable(gpu) is None else CPU


@pytest.fixture(scope="session")
def computing(device: torch.device) -> torch.device:
    """The same for tests that compute in fp8_linear, which this PyTorch may not do on the CPU: 2.11 does not."""
    if device.type == "cpu":
        ones, scale = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 1)
        try:  # PyTorch's own operator and not ours: if that breaks, tests are to fail
            torch._scaled_mm(ones, ones.t(), scale_a=scale, scale_b=scale.t(), out_dtype=torch.bfloat16)
        except RuntimeError as error:
            gpu = fp8_unavailable(torch.device("cuda", 0)) if torch.cuda.is_available() else "there is no NVIDIA GPU"
            pytest.skip(f"{gpu}, and the CPU has no such product in PyTorch {torch.__version__} ({first_line(error)})")
    return device


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers here are small, so what counts as large is less."""
    monkeypatch.setattr(fp8_linear, "_LEAST_WEIGHTS", WIDTH * WIDTH)


class Wide(nn.Module):
    """Two large layers over many rows, a small one, and one that is told the time, of which there is one row."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.wide, self.back = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.small, self.time = nn.Linear(WIDTH, 16), nn.Linear(WIDTH, 2 * WIDTH)
        self.to(dtype)

    def forward(self, x: torch.Tensor, timestep: torch.Tensor, options: dict[str, Any] = {}) -> torch.Tensor:  # noqa: B006
        hidden = F.gelu(self.wide(x)) * self.time(timestep)[:, None]
        return self.small(x + self.back(hidden))


def call(
    device: torch.device, batch: int = 2, rows: int = 192, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(batch, rows, WIDTH, device=device, dtype=dtype)
    return x, torch.randn(batch, WIDTH, device=device, dtype=dtype)


def products(captured: Any) -> list[str]:
    names = {"fp8_linear", "linear"}
    return [n.target._opname for n in captured.capture.graph.graph.nodes if getattr(n.target, "_opname", "") in names]


def off(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 256, WIDTH), (2, 77, WIDTH), (2, 3, 64, WIDTH), (2, 777, WIDTH)])
def test_a_large_layer_is_off_by_three_percent(
    computing: torch.device, shape: tuple[int, ...], bias: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x, weight, offsets = (torch.randn(s, device=computing, dtype=dtype) for s in (shape, (1024, WIDTH), (1024,)))
    added = offsets if bias else None
    actual, expected = linear(x, weight, added), F.linear(x.double(), weight.double(), added.double() if bias else None)
    assert (actual.shape, actual.dtype) == (expected.shape, dtype)
    # e4m3 has 3 bits after the point: relative errors are even up to 2^-4, their mean square a third of that squared.
    # An input's and a weight's add up.
    assert 0.02 < off(actual, expected) < 2**-4 / 3**0.5 * 2**0.5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_no_row_leaves_what_8_bits_hold_without_a_clamp(dtype: torch.dtype) -> None:
    """Each finite number is the largest of a row. PyTorch's conversion gives no number for what is too large."""
    numbers = torch.arange(-(1 << 15), 1 << 15).short().view(dtype)
    largest = numbers[numbers.isfinite()]
    rounded, scale = fp8_linear._rounded(torch.stack([largest, largest / 2, -largest, torch.zeros_like(largest)], 1))
    assert rounded.float().isfinite().all()
    exact = largest.double().abs() > 448e-12  # below, the scale is not smaller any more
    assert (rounded.float()[exact, 0].abs() == 448).all()
    back = rounded.double() * scale.double()
    assert off(back[exact, 0], largest[exact]) < 1e-6


def test_rows_have_scales_of_their_own(computing: torch.device) -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(s, device=computing).bfloat16() for s in ((1, 256, WIDTH), (1024, WIDTH)))
    x[:, ::2] *= 1e4
    weight[::2] *= 1e-4
    expected = F.linear(x.double(), weight.double())
    actual = linear(x, weight)
    for rows in (slice(0, None, 2), slice(1, None, 2)):
        for columns in (slice(0, None, 2), slice(1, None, 2)):
            assert off(actual[0, rows, columns], expected[0, rows, columns]) < 0.05


def test_zeros_give_zeros_and_what_is_no_number_stays_none(computing: torch.device) -> None:
    x = torch.zeros(1, 256, WIDTH, device=computing, dtype=torch.bfloat16)
    weight = torch.randn(1024, WIDTH, device=computing, dtype=torch.bfloat16)
    assert not linear(x, weight).any()
    x[0, 3, 5] = float("nan")
    result = linear(x, weight)
    assert result[0, 3].isnan().all() and not result[0, 4].isnan().any()


@pytest.mark.parametrize(
    ("shape", "out", "dtype"),
    [
        pytest.param((256, WIDTH), 1024, torch.bfloat16, id="a vector"),
        pytest.param((256, 1, WIDTH), 1024, torch.bfloat16, id="one token"),
        pytest.param((1, 256, 128), 1024, torch.bfloat16, id="few weights"),
        pytest.param((1, 256, WIDTH), 1000, torch.bfloat16, id="no multiple of 16"),
        pytest.param((1, 256, WIDTH), 1024, torch.float32, id="float32"),
    ],
)
def test_other_layers_are_left_as_they_are(
    device: torch.device, shape: tuple[int, ...], out: int, dtype: torch.dtype
) -> None:
    x, weight = (torch.randn(s, device=device, dtype=dtype) for s in (shape, (out, shape[-1])))
    assert torch.equal(linear(x, weight), F.linear(x, weight))


@pytest.mark.parametrize("general", [True, False], ids=["general", "exact"])
def test_a_graph_has_its_large_layers_in_fp8_at_every_size(
    computing: torch.device, capture_of: Callable[..., Any], general: bool
) -> None:
    module = Wide().to(computing)
    captured = capture_of(module, *call(computing), general=general, forms=IN_FP8)
    plain = capture_of(module, *call(computing), general=general)
    assert products(captured).count("fp8_linear") == 2
    assert products(plain).count("fp8_linear") == 0
    assert captured.digest != plain.digest
    for other in (call(computing), call(computing, 3, 320)) if general else (call(computing),):
        with torch.no_grad():
            expected = module(*other)
        assert 1e-3 < off(captured.run_on(module, *other), expected) < 0.1
    if general:
        assert captured.covers(
            module, *call(computing, 1, 64)
        )  # which rows a layer has says nothing of which it may have


def test_a_lora_needs_nothing_new(computing: torch.device, capture_of: Callable[..., Any]) -> None:
    module, tensors = Wide().to(computing), call(computing)
    captured = capture_of(module, *tensors, forms=IN_FP8)
    with torch.no_grad():
        module.wide.weight.add_(torch.randn_like(module.wide.weight))
        assert off(captured.run_on(module, *tensors), module(*tensors)) < 0.1


# -- in a dispatcher ---------------------------------------------------------------------------


class Served:
    def __init__(self, device: torch.device, engine: str = "eager", folder: Path | None = None) -> None:
        store = GraphStore(folder / "store", Trust(folder / "config")) if folder is not None else None
        services = HostServices("host 1", "options", {}, lambda: None, lambda _layers: None)
        self.library = GraphLibrary(GraphCache(1 << 30), Metrics(), store)
        self.module, self.shown = Wide().to(device), list[str]()
        self.dispatcher = Dispatcher(
            engine,
            self.library,
            services,
            self.shown.append,
            options=Options(precision="fp8"),
        )

    def run(self, calls: int = 3) -> float:
        """The largest error of a run."""
        self.dispatcher.begin_run()
        worst = 0.0
        for _ in range(calls):
            weight = self.module.wide.weight
            tensors = call(weight.device, dtype=weight.dtype)
            with torch.no_grad():
                expected = self.module(*tensors)
                actual = self.dispatcher(self.module, self.module.forward, tensors, {})
            worst = max(worst, off(actual, expected))
        self.dispatcher.end_run(self.module)
        return worst


@pytest.fixture
def available(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU counts for a GPU with 8-bit units. A GPU that has them counts for what it is."""
    if device.type == "cpu":
        asked = Engine.fp8_unavailable
        monkeypatch.setattr(Engine, "fp8_unavailable", lambda engine, d: None if engine.fp8 else asked(engine, d))


@pytest.mark.usefixtures("available")
@pytest.mark.parametrize("engine", ["eager", "inductor"])
def test_a_dispatcher_serves_in_fp8(computing: torch.device, engine: str) -> None:
    served = Served(computing, engine)
    assert 1e-3 < served.run() < 0.1
    assert "lossless" not in served.shown[-1]
    snapshot = served.library.metrics.snapshot()
    assert (snapshot["compiled"], snapshot["served"], snapshot["retired"]) == (1, 3, 0)


@pytest.mark.usefixtures("available")
def test_a_call_that_fails_in_any_precision_takes_fp8_from_no_other(computing: torch.device) -> None:
    """A person connects something that the model cannot compute, and mends it."""
    served = Served(computing)
    x, timestep = call(computing)
    with pytest.raises(RuntimeError), torch.no_grad():
        served.dispatcher(served.module, served.module.forward, (x[..., 1:], timestep), {})
    assert 1e-3 < served.run() < 0.1
    assert "lossless" not in served.shown[-1]


@pytest.mark.usefixtures("available")
def test_a_model_that_fp8_is_too_far_off_for_is_lossless_from_then_on(
    computing: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        fp8_linear, "_rounded", lambda rows, right=fp8_linear._rounded: (right(rows)[0], right(rows)[1] * 1.5)
    )
    served = Served(computing)
    assert served.run() == 0.0
    snapshot = served.library.metrics.snapshot()
    assert (snapshot["retired"], snapshot["served"]) == (1, 2)
    assert "lossless instead of fp8: fp8 was too far off for this model" in served.shown[-1]


@pytest.mark.usefixtures("available")
def test_a_new_process_knows_that_fp8_was_too_far_off(
    computing: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        fp8_linear, "_rounded", lambda rows, right=fp8_linear._rounded: (right(rows)[0], right(rows)[1] * 1.5)
    )
    assert Served(computing, folder=tmp_path).run() == 0.0
    again = Served(computing, folder=tmp_path)
    assert again.run() == 0.0
    snapshot = again.library.metrics.snapshot()
    assert (snapshot["served"], snapshot["retired"], snapshot["fallbacks"]) == (3, 0, {})
    assert "lossless instead of fp8: its compiled graph differed from eager" in again.shown[-1]


@pytest.mark.usefixtures("available")
@pytest.mark.parametrize("when", ["capturing", "compiling", "running"])
def test_what_fails_in_fp8_is_lossless_and_not_eager(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no kernel for this")

    def compile(engine: EagerEngine, capture: Capture) -> EagerGraph:
        graph = EagerGraph(capture)
        if any("fp8" in str(node.target) for node in capture.graph.graph.nodes):
            fails = type("Fails", (EagerGraph,), {"__call__": fail})
            return fail() if when == "compiling" else fails(capture)
        return graph

    if when == "capturing":
        monkeypatch.setattr(torch, "_scaled_mm", fail)
    else:
        monkeypatch.setattr(EagerEngine, "compile", compile)
    served = Served(device)
    assert served.run() == 0.0
    assert served.library.metrics.snapshot()["served"] == (2 if when == "running" else 3)
    assert "lossless instead of fp8: " in served.shown[-1] and "no kernel for this" in served.shown[-1]


def test_where_fp8_cannot_be_had_graphs_are_lossless_and_say_so() -> None:
    served = Served(CPU)
    assert served.run() == 0.0
    assert served.shown[-1].endswith("lossless instead of fp8: fp8 needs an NVIDIA GPU, and this model runs on cpu")
    assert served.library.metrics.snapshot()["fallbacks"] == {}
    served.run()  # which looks for nothing new
    assert "lossless instead of fp8" in served.shown[-1]


@pytest.mark.usefixtures("available")
def test_another_model_that_can_be_in_fp8_is_not_said_to_be_lossless(
    computing: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served(computing)
    with monkeypatch.context() as wrong:
        wrong.setattr(
            fp8_linear, "_rounded", lambda rows, right=fp8_linear._rounded: (right(rows)[0], right(rows)[1] * 1.5)
        )
        served.run()
    assert "lossless instead of fp8" in served.shown[-1]
    served.module = Wide(torch.float16).to(computing)
    assert served.run() > 1e-3
    assert "lossless" not in served.shown[-1]


@pytest.mark.usefixtures("available")
def test_an_engine_without_8_bit_products_is_lossless(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EagerEngine, "fp8", False)
    served = Served(device)
    assert served.run() == 0.0
    assert served.shown[-1].endswith("the eager engine does not compute in fp8")


def test_what_is_chosen_is_part_of_the_options_and_read_from_them() -> None:
    for variant in (Variant(), Variant(reusable=True), Variant(fp8=True), Variant(True, True)):
        assert Variant.of({"layout": "channels_last", **variant.options()}) == variant


def _hopper() -> bool:
    return torch.cuda.is_available() and not torch.version.hip and torch.cuda.get_device_capability() == (9, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not _hopper(), reason="needs a Hopper GPU")
def test_a_gpu_that_has_8_bit_units_is_used(device: torch.device) -> None:
    """If products came out wrong there, all of this would be tested on the CPU or not at all."""
    assert fp8_unavailable(torch.device("cuda", 0)) is None
    assert device.type == "cuda"
