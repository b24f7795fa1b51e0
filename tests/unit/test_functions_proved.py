"""A graph with functions is proved of these functions and numbers, brings their tensors along, and costs few looks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from test_functions_handed_over import HOST, Net
from torch import nn

from benchmarks.hot_path import entries
from onediff_comfy.capture.call import split
from onediff_comfy.capture.fingerprint.code_ownership import NO_HOST
from onediff_comfy.capture.functions.lifted import LiftedFunctions, lift
from onediff_comfy.compilation.library import GraphLibrary
from onediff_comfy.serving.dispatcher import Dispatcher

MOST_ENTRIES = 400
"""Of functions of this pack, in a call with five patches."""

Run = Callable[..., torch.Tensor]


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().eval().requires_grad_(False)


@pytest.fixture
def dispatcher(library: GraphLibrary) -> Dispatcher:
    return Dispatcher("eager", library, HOST)


@pytest.fixture
def run(net: Net, dispatcher: Dispatcher) -> Run:
    """Call the model with patches, in a run of its own, and see that the output is right."""

    def called(*patches: Any) -> torch.Tensor:
        x = torch.randn(2, 4)
        options = {"patches": {"output": list(patches)}, "sigmas": torch.ones(1)}
        with torch.inference_mode():
            dispatcher.begin_run()
            output: torch.Tensor = dispatcher(net, net.forward, (x,), {"transformer_options": options})
            torch.testing.assert_close(output, net(x, options))
        return output

    return called


class Weighted:
    """As an image prompt is: an adapter's layer, an image, and how much of it."""

    def __init__(self, adapter: nn.Module, image: torch.Tensor, weight: float) -> None:
        self.adapter, self.image, self.weight = adapter, image, weight

    def __call__(self, out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        return out + self.weight * self.adapter(self.image)


def _counted(library: GraphLibrary) -> dict[str, int]:
    """Return how many graphs were made, and proved."""
    return {"made": library.metrics.graphs_made(), "proved": library.metrics.snapshot()["proved"]}


def _weighted(weight: float, seed: int = 1) -> Weighted:
    torch.manual_seed(seed)
    return Weighted(nn.Linear(4, 4).requires_grad_(False), torch.randn(2, 4), weight)


def test_another_number_or_image_is_the_same_graph(run: Run, library: GraphLibrary) -> None:
    run(_weighted(0.7))
    before = _counted(library)
    run(_weighted(0.7, seed=2))
    assert _counted(library) == before
    run(_weighted(0.4))
    assert _counted(library) == {"made": before["made"], "proved": before["proved"] + 1}
    run(_weighted(0.4, seed=3))
    assert _counted(library)["proved"] == before["proved"] + 1


@pytest.mark.parametrize(("kind", "made"), [(torch.Tensor, 1), (float, 3)])
def test_code_that_asks_whether_a_number_is_a_tensor_may_calculate_with_it(
    run: Run, kind: type, made: int, library: GraphLibrary
) -> None:
    """As IP-Adapter_plus asks of each argument; who asks for a number's own type takes it as it is."""
    asks = {torch.Tensor: _asks_for_tensors, float: _asks_for_floats}[kind]
    for number in (0.5, 0.7, 0.9):
        run(asks(number))
    assert _counted(library)["made"] == made


def _asks_for_tensors(number: float) -> Any:
    return lambda out, extra: out if type(number) is torch.Tensor else out * number


def _asks_for_floats(number: float) -> Any:
    return lambda out, extra: out * number if type(number) is float else out


def test_a_graph_is_proved_of_so_many_numbers_and_then_believed(run: Run, library: GraphLibrary) -> None:
    """A number that is another at each step must not cost an eager call each."""
    for step in range(20):
        run(_weighted(step / 20 + 0.01))
    assert _counted(library) == {"made": 1, "proved": 8}


def test_a_function_that_a_trace_mistakes_takes_no_graph_from_the_plain_model(
    run: Run, dispatcher: Dispatcher, library: GraphLibrary
) -> None:
    def patch(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        return out * 1.5 if type(out) is torch.Tensor else out

    run(patch)
    assert dispatcher.metrics.snapshot()["served"] == 0
    made = _counted(library)["made"]
    run()
    assert dispatcher.metrics.snapshot()["served"] == 1
    assert _counted(library)["made"] == made
    assert library.metrics.snapshot()["retired"] == 0


def test_a_reason_says_that_a_graph_with_a_function_was_off(run: Run, dispatcher: Dispatcher) -> None:
    def patch(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        return out * 1.5 if type(out) is torch.Tensor else out

    run(patch)
    (reason,) = dispatcher.metrics.snapshot()["fallbacks"]
    assert "patch, which the options hold, is off by" in reason


def test_tensors_on_the_cpu_are_brought_to_where_a_call_computes() -> None:
    """A recording takes none from the CPU. On the CPU, and large ones, they stay what they are."""
    lifted = _lifted(_weighted(0.7))
    assert all(tensor.device.type == "meta" for tensor in lifted.tensors(torch.device("meta")))
    kept = lifted.held[0]
    assert lifted.tensors(torch.device("cpu"))[0].data_ptr() == kept.data_ptr()
    large = torch.zeros(1).expand(5 << 20)
    assert _lifted(lambda out, extra: out + large).tensors(torch.device("meta"))[0].device.type == "cpu"


def _lifted(function: Any) -> LiftedFunctions:
    return lift([function], {}, NO_HOST)


def test_attention_that_no_trace_can_look_into_runs_eager_and_is_named(run: Run, dispatcher: Dispatcher) -> None:
    """As SageAttention's and FlashAttention's kernels, which want numbers and are given none in a trace."""

    def attention_of_a_library(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        scores = np.exp(out.numpy() @ out.numpy().T)
        return torch.from_numpy(scores / scores.sum(-1, keepdims=True)) @ out

    for _ in range(2):
        run(attention_of_a_library)
    assert dispatcher.metrics.snapshot()["served"] == 0
    (reason,) = dispatcher.metrics.snapshot()["fallbacks"]
    assert "attention_of_a_library, which the options hold" in reason


def test_a_graph_is_proved_with_other_values_of_what_functions_hold(run: Run, dispatcher: Dispatcher) -> None:
    """A weight of one would hide that a trace left it out."""
    kept = torch.ones(4)

    def mistaken(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        return out * kept if type(out) is torch.Tensor else out

    run(mistaken)
    assert dispatcher.metrics.snapshot()["served"] == 0
    run(lambda out, extra: out * kept)
    assert dispatcher.metrics.snapshot()["served"] == 1


def test_a_table_is_handed_over_in_its_order(net: Net) -> None:
    """In any call: whoever is handed it may go through it."""

    def called(patches: Any) -> Any:
        options = {"patches": patches, "table": {"b": 1, "a": 2}}
        lifted = {"options_read": ("patches", "table"), "options_name": "options"}
        lift_all = lambda functions, options: _lifted(functions[0])  # noqa: E731
        call = split({"x": torch.ones(2), "options": options}, lift=lift_all, **lifted)  # type: ignore[arg-type]
        return call.rebuild(call.tensors, [len])["options"]["table"]

    assert list(called([lambda out, extra: out])) == ["b", "a"]
    assert list(called([])) == ["b", "a"]


def test_another_start_and_end_is_captured_once_a_side(net: Net, dispatcher: Dispatcher, library: GraphLibrary) -> None:
    """IP-Adapter_plus asks in this way whether it is between its start and its end."""

    def between(start: float, end: float) -> Any:
        def patch(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
            sigma = extra["sigmas"].detach().cpu()[0].item()
            return out * 1.5 if sigma <= start and sigma >= end else out

        return patch

    captured = []
    with torch.inference_mode():
        for start, end in ((0.8, 0.3), (0.7, 0.4), (0.9, 0.1)):
            dispatcher.begin_run()
            for sigma in (1.0, 0.75, 0.5, 0.2, 0.05):
                x = torch.randn(2, 4)
                options = {"patches": {"output": [between(start, end)]}, "sigmas": torch.full((2,), sigma)}
                output = dispatcher(net, net.forward, (x,), {"transformer_options": options})
                torch.testing.assert_close(output, net(x, options))
            captured.append(library.metrics.snapshot()["captured"])
    assert captured == [3, 4, 4]  # the first side once more: its key had no answer yet to what is asked later
    assert dispatcher.metrics.snapshot()["served"] == 15


class Direct(nn.Module):
    """Hands its options themselves to the patches, as Flux does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, transformer_options: dict[str, Any]) -> torch.Tensor:
        x = self.layer(x)
        transformer_options["total"] = 1
        for patch in transformer_options["patches"]["output"]:
            x = patch(x, transformer_options)
        return x


@pytest.mark.parametrize(("left", "served"), [(lambda out: 1.5, 1), (lambda out: [out.clone()], 0)])
def test_a_tensor_that_is_left_in_the_options_is_for_others(
    dispatcher: Dispatcher, left: Callable[[torch.Tensor], Any], served: int
) -> None:
    def patch(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        extra["left"] = left(out)
        return out * 1.1

    net = Direct().eval().requires_grad_(False)
    with torch.inference_mode():
        dispatcher.begin_run()
        for _ in range(2):
            options: dict[str, Any] = {"patches": {"output": [patch]}, "sigmas": torch.ones(1)}
            dispatcher(net, net.forward, (torch.randn(2, 4),), {"transformer_options": options})
            assert served or "left" in options
    assert dispatcher.metrics.snapshot()["served"] == served * 2


def test_patches_take_turns(run: Run, dispatcher: Dispatcher, library: GraphLibrary) -> None:
    """On, off, on; and two models of one architecture, each with its own."""

    def other(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        return out.mul_(1.3).add_(0.1)

    one = _weighted(0.7)
    for patches in ((one,), (), (one,), (other,), (one, other), (other, one), (one,), (other,), ()):
        run(*patches)
    assert dispatcher.metrics.snapshot()["served"] == 9
    assert _counted(library)["made"] == 5


def test_five_patches_cost_few_looks(run: Run, net: Net, dispatcher: Dispatcher) -> None:
    patches = [_weighted(0.1 * number) for number in range(5)]
    options = {"patches": {"output": patches}, "sigmas": torch.ones(1)}
    x = torch.randn(2, 4)
    with torch.inference_mode():
        dispatcher.begin_run()

        def call() -> None:
            dispatcher(net, net.forward, (x,), {"transformer_options": options})

        for _ in range(3):
            call()
        served = dispatcher.metrics.snapshot()["served"]
        entered = entries(call)
    assert dispatcher.metrics.snapshot()["served"] == served + 1
    assert sum(entered.values()) <= MOST_ENTRIES, entered.most_common(8)
    assert not any("held_state" in place or "reached_state" in place for place in entered)  # nothing is walked again
