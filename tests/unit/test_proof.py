"""serving/verification/numerics.py: what counts as the same output."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from onediff_comfy.compilation.compile_graph import HostServices
from onediff_comfy.compilation.library import GraphLibrary
from onediff_comfy.serving.dispatcher import Dispatcher
from onediff_comfy.serving.verification import numerics
from onediff_comfy.serving.verification.numerics import again, limit, relative_error, tells

NAN, INF = math.nan, math.inf
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def t(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize(
    ("actual", "expected", "error"),
    [
        (t(3, 4), t(3, 4), 0.0),
        (t(3, 4.5), t(3, 4), 0.1),
        (t(3.3, 4.4), t(3, 4), 0.1),
        (t(0, 0), t(3, 4), 1.0),
        (t(-3, -4), t(3, 4), 2.0),
        (t(0, 0), t(0, 0), 0.0),
        (t(1e-30, 0), t(0, 0), INF),
        (t(), t(), 0.0),
        (t(NAN, 1), t(NAN, 1), 0.0),
        (t(INF, 1), t(INF, 1), 0.0),
        (t(NAN, NAN), t(NAN, NAN), 0.0),
        (t(NAN, 3.3, 4.4), t(NAN, 3, 4), 0.1),
        (t(NAN, 1), t(1, NAN), INF),
        (t(NAN, 1), t(1, 1), INF),
        (t(1, 1), t(NAN, 1), INF),
        (t(INF, 1), t(1, 1), INF),
        (t(1, 2), t(1, 2, 3), INF),
        (t(1, 2), t(1, 2)[None], INF),
        (t(1, 2), t(1, 2, dtype=torch.float16), INF),
        (t(1, 2, dtype=torch.int64), t(1, 2), INF),
        (t(True, False, dtype=torch.bool), t(True, False, dtype=torch.bool), 0.0),
        (t(True, False, dtype=torch.bool), t(False, True, dtype=torch.bool), math.sqrt(2)),
        (t(2, 4, dtype=torch.int64), t(2, 4, dtype=torch.int64), 0.0),
        (t(6e4, 6e4, dtype=torch.float16), t(6e4, 6e4, dtype=torch.float16), 0.0),
        (t(3e38, 3e38), t(1.5e38, 1.5e38), 1.0),
        (t(3.5, 4, dtype=torch.bfloat16), t(3, 4, dtype=torch.bfloat16), 0.1),
    ],
)
def test_relative_error(actual: torch.Tensor, expected: torch.Tensor, error: float) -> None:
    assert relative_error(actual, expected) == pytest.approx(error, rel=1e-6)


def test_relative_error_is_taken_in_float64() -> None:
    """In float16 the squares of ordinary activations overflow."""
    large = torch.full((1000,), 300.0, dtype=torch.float16)
    assert relative_error(large * 1.5, large) == pytest.approx(0.5)


def test_a_small_sample_is_not_hidden_by_a_large_one() -> None:
    expected = torch.randn(2, 100) * torch.tensor([[1.0], [0.01]])
    wrong = expected * torch.tensor([[1.0], [1.5]])
    assert relative_error(wrong, expected) == pytest.approx(0.5, rel=1e-4)


def test_rounding_of_a_sample_that_is_next_to_nothing_is_none() -> None:
    expected = torch.stack([torch.ones(100), torch.zeros(100)])
    assert 0 < relative_error(expected + 1e-8, expected) < 1e-4


@pytest.mark.parametrize(
    ("output", "known"),
    [
        (t(0, 1), True),
        ([None, t(0, 0), (t(NAN, 2),)], True),
        (t(1, dtype=torch.int64), True),
        (t(0, 0), False),
        ({"a": t(NAN, INF)}, False),
        (t(), False),
        (None, False),
    ],
)
def test_what_has_no_finite_number_but_zero_tells_nothing(output: object, known: bool) -> None:
    assert tells(output) is known


def test_inputs_that_are_off_in_the_last_place_are_hardly_others() -> None:
    x = torch.randn(4, 64)
    off = again(lambda value: value * 2, (x,), {}, few_bits=False)
    assert off is not None and 0 < off(x * 2) < 1e-6


def test_relative_error_ignores_layout() -> None:
    tensor = torch.rand(1, 2, 3, 4)
    assert relative_error(tensor.to(memory_format=torch.channels_last), tensor) == 0.0


@pytest.mark.parametrize(("actual", "expected"), [(INF, -INF), (NAN, INF), (-INF, NAN)])
def test_non_finite_values_must_agree(actual: float, expected: float) -> None:
    assert relative_error(t(actual, 1), t(expected, 1)) == INF


@pytest.mark.filterwarnings("ignore:Casting complex values")
def test_imaginary_parts_are_compared() -> None:
    assert relative_error(torch.tensor([1 + 1j]), torch.tensor([1 - 1j])) > 0.5


def test_coarser_dtypes_have_wider_limits() -> None:
    order = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
    limits = [limit({dtype}, CPU) for dtype in order]
    assert all(tight < wide for tight, wide in pairwise(limits))


def test_the_coarsest_dtype_decides() -> None:
    assert limit({torch.float32, torch.float16}, CPU) == limit({torch.float16}, CPU)
    assert limit({torch.bfloat16, torch.float16, torch.float64}, CPU) == limit({torch.bfloat16}, CPU)


def test_dtypes_that_do_not_round_do_not_widen_the_limit() -> None:
    assert limit({torch.float32, torch.int64, torch.bool}, CPU) == limit({torch.float32}, CPU)
    assert limit({torch.int64}, CPU) == limit({torch.float32}, CPU)
    assert limit(set(), CPU) == limit({torch.float32}, CPU)


def test_float32_on_a_gpu_may_be_tf32() -> None:
    assert limit({torch.float32}, CUDA) > limit({torch.float32}, CPU)
    assert limit({torch.float64}, CUDA) == limit({torch.float64}, CPU)
    assert limit({torch.float16, torch.float32}, CUDA) == limit({torch.float16}, CPU)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_a_limit_is_above_rounding_and_below_a_visible_difference(dtype: torch.dtype, device: torch.device) -> None:
    """Rounding gives some epsilons; a dropped patch, or the graph of another shape, 0.1 and more."""
    assert 2 * torch.finfo(dtype).eps < limit({dtype}, device) < 0.1


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_a_comparison_that_fails_ends_no_image(
    error: type[Exception], library: GraphLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a video it takes more memory than the video: eager's output is there, and the graph is compared again."""
    module, x = torch.nn.Linear(4, 4).requires_grad_(False), torch.randn(2, 4)
    dispatcher = Dispatcher("eager", library, HostServices("host", None, {}, lambda: None, lambda _layers: None))

    def failing(_actual: object, _expected: object) -> float:
        raise error("too large")

    with monkeypatch.context() as failed:
        failed.setattr(numerics, "difference", failing)
        torch.testing.assert_close(dispatcher(module, module.forward, (x,), {}), module(x))
    assert library.metrics.snapshot()["proved"] == 0
    torch.testing.assert_close(dispatcher(module, module.forward, (x,), {}), module(x))
    assert library.metrics.snapshot()["proved"] == 1


def test_an_interruption_in_a_comparison_is_one(library: GraphLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = torch.nn.Linear(4, 4).requires_grad_(False), torch.randn(2, 4)
    dispatcher = Dispatcher("eager", library, HostServices("host", None, {}, lambda: None, lambda _layers: None))

    def interrupted(_actual: object, _expected: object) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(numerics, "difference", interrupted)
    with pytest.raises(KeyboardInterrupt):
        dispatcher(module, module.forward, (x,), {})
