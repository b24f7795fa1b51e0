"""capture/functions: a function in a call's options is served with what it holds now, or not at all."""

from __future__ import annotations

import collections
import logging
import random
from collections.abc import Sequence
from typing import Any

import adversaries
import numpy as np
import pytest
import shrewd_adversaries
import sly_adversaries
import torch
from adversaries import Adversary, Patch
from torch import nn

from onediff_comfy.cache.memory import GraphCache
from onediff_comfy.compilation.compile_graph import HostServices
from onediff_comfy.compilation.library import GraphLibrary
from onediff_comfy.metrics import Metrics
from onediff_comfy.serving.dispatcher import Dispatcher

HOST = HostServices(
    identity="host",
    options_name="transformer_options",
    capture_options={},
    check_interrupted=lambda: None,
    refuse=lambda _layers: None,
)


CALLS = 9


class Net(nn.Module):
    """Two blocks, each of which hands its output to the patches, with options of its own, as ComfyUI's UNets do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor, transformer_options: dict[str, Any]) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = torch.tanh(block(x))
            extra = {**transformer_options, "block": number}
            for patch in transformer_options.get("patches", {}).get("output", ()):
                x = patch(x, extra)
        return x


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    made = Net().eval().requires_grad_(False)
    sly_adversaries.MODEL[:] = shrewd_adversaries.MODEL[:] = [made]
    return made


@pytest.fixture
def dispatcher() -> Dispatcher:
    return Dispatcher("eager", GraphLibrary(GraphCache(1 << 30), Metrics()), HOST)


def reset(net: Net) -> None:
    sly_adversaries.MODEL[:] = shrewd_adversaries.MODEL[:] = [net]
    for module in (adversaries, sly_adversaries, shrewd_adversaries):
        module.reset()


def _options(patches: Sequence[Patch], step: int, kept: dict[str, Any]) -> dict[str, Any]:
    """What ComfyUI makes anew for each call; what an extension has put in as a table of its own stays."""
    sigmas, turned = torch.tensor([1.0 - step % 8 / 8 - step // 8 / 16]), {"a": 1.2, "b": 1.5}
    return {
        "patches": {"output": list(patches)},
        "sigmas": sigmas,
        "noise level": sigmas,
        "level": 1.0 + 0.5 * (step % 8 // 2),
        "tensor": torch.ones(4),
        "turned": turned if step % 4 < 2 else dict(reversed(turned.items())),
        "kept": kept,
    }


def _outputs(net: Net, run: Any, adversary: Adversary, begin: Any = lambda: None) -> list[torch.Tensor]:
    """Five runs, in and between which what the patch reads changes: also after two in which nothing did."""
    reset(net)
    torch.manual_seed(2)
    patch, change = adversary()
    kept: dict[str, Any] = {}
    generator = torch.Generator().manual_seed(3)
    outputs = []
    for step in range(CALLS):
        if step in (0, 4, 5, 6, 7):
            begin()
        if step in (2, 4, 7, 8):
            change()
        x = torch.randn(2, 4, generator=generator)
        outputs.append(run(x, _options([patch], step, kept)).clone())
        outputs.append(torch.rand(1))  # what others draw
    outputs.append(torch.tensor([random.random(), float(np.random.rand())]))
    return outputs


def _compared(net: Net, dispatcher: Dispatcher, adversary: Adversary, inference: bool = True) -> int:
    """Return how many calls were served, all of them rightly.

    The model without patches is served first: a graph that a patch is mistaken for is proved already.
    """
    with torch.inference_mode(inference), torch.no_grad():
        options = _options([], 0, {})
        for _ in range(2):
            dispatcher(net, net.forward, (torch.randn(2, 4),), {"transformer_options": options})
        expected = _outputs(net, net, adversary)
        found = _outputs(
            net,
            lambda x, options: dispatcher(net, net.forward, (x,), {"transformer_options": options}),
            adversary,
            dispatcher.begin_run,
        )
    reset(net)
    for number, (output, eager) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(output, eager, msg=lambda text, number=number: f"output {number}: {text}")
    return int(dispatcher.metrics.snapshot()["served"]) - 2


@pytest.mark.parametrize("adversary", adversaries.EAGER, ids=lambda adversary: adversary.__name__)
def test_what_no_graph_can_stand_for_runs_eager(net: Net, dispatcher: Dispatcher, adversary: Adversary) -> None:
    served = _compared(net, dispatcher, adversary)
    assert served == 0
    assert dispatcher.metrics.snapshot()["fallbacks"]


@pytest.mark.parametrize("adversary", adversaries.WRITES, ids=lambda adversary: adversary.__name__)
def test_what_writes_into_its_tensor_runs_eager(net: Net, dispatcher: Dispatcher, adversary: Adversary) -> None:
    """Also where PyTorch does not forbid it, as it does of a tensor that was made in inference mode."""
    assert _compared(net, dispatcher, adversary, inference=False) == 0


@pytest.mark.parametrize(
    "adversary", [*sly_adversaries.ALL, *shrewd_adversaries.ALL], ids=lambda adversary: adversary.__name__
)
def test_what_a_trace_mistakes_is_seen(net: Net, dispatcher: Dispatcher, adversary: Adversary) -> None:
    try:
        served = _compared(net, dispatcher, adversary)
    finally:  # some change what other tests count on
        reset(net)
    eager = adversary in sly_adversaries.EAGER | shrewd_adversaries.EAGER
    assert (served == 0) is eager, dispatcher.metrics.snapshot()["fallbacks"]


@pytest.mark.parametrize(
    "adversary", [*adversaries.BY_THE_CLOCK, *sly_adversaries.BY_THE_CLOCK], ids=lambda adversary: adversary.__name__
)
def test_what_reads_a_clock_runs_eager(net: Net, dispatcher: Dispatcher, adversary: Adversary) -> None:
    patch, _ = adversary()
    with torch.inference_mode():
        for step in range(3):
            options = _options([patch], step, {})
            dispatcher(net, net.forward, (torch.randn(2, 4),), {"transformer_options": options})
    assert dispatcher.metrics.snapshot()["served"] == 0


@pytest.mark.parametrize("adversary", adversaries.SERVED, ids=lambda adversary: adversary.__name__)
def test_what_others_change_is_seen(net: Net, dispatcher: Dispatcher, adversary: Adversary) -> None:
    assert _compared(net, dispatcher, adversary) == CALLS, dispatcher.metrics.snapshot()["fallbacks"]


def test_what_torch_compile_notes_on_a_patchs_tensor_changes_nothing(net: Net) -> None:
    """Another extension compiles a layer that a patch's tensor is in, or did before the patch came here."""
    before, meanwhile = torch.ones(4), torch.ones(4)
    torch._dynamo.mark_static_address(before)
    made = Metrics()
    dispatcher = Dispatcher("eager", GraphLibrary(GraphCache(1 << 30), made), HOST)

    def patch(x: torch.Tensor, _options: dict[str, Any]) -> torch.Tensor:
        return x * before + meanwhile

    with torch.inference_mode():
        for step in range(3):
            given = (torch.randn(2, 4),), {"transformer_options": _options([patch], 0, {})}
            torch.testing.assert_close(dispatcher(net, net.forward, *given), net(given[0][0], **given[1]))
            if step == 1:
                torch._dynamo.mark_static_address(meanwhile)
    counts = dispatcher.metrics.snapshot()
    assert (counts["served"], counts["fallbacks"], made.snapshot()["captured"]) == (3, {}, 1)


def _served(net: Net, dispatcher: Dispatcher, patch: Patch, **more: Any) -> int:
    """Run five steps with a patch, each compared with eager. Return how many were served."""
    with torch.inference_mode():
        for step in range(5):
            options, x = {**_options([patch], step, {}), **more}, torch.randn(2, 4)
            output = dispatcher(net, net.forward, (x,), {"transformer_options": options})
            torch.testing.assert_close(output, net(x, options))
    return int(dispatcher.metrics.snapshot()["served"])


def test_a_patch_may_ask_a_tensor_itself_whether_it_is_its_turn(net: Net, dispatcher: Dispatcher) -> None:
    """PyTorch words its error by what variables hold, so it looks at options that nothing has read."""

    def patch(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        sigma = extra["sigmas"]
        return out * 1.5 if 0.3 < sigma[0] <= 0.8 else out

    assert _served(net, dispatcher, patch, wrappers={"another extension": [collections.Counter()]}) == 5


log = logging.getLogger(__name__)


def test_a_patch_may_log(net: Net, dispatcher: Dispatcher) -> None:
    def patch(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        log.debug("patched")
        return out * 1.5

    assert _served(net, dispatcher, patch) == 5, dispatcher.metrics.snapshot()["fallbacks"]


class Sharing(nn.Module):
    """As ComfyUI-layerdiffuse has it: the options of a call are left on a class, for whoever may ask."""

    options: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, transformer_options: dict[str, Any]) -> torch.Tensor:
        Sharing.options = transformer_options
        return self.linear(x)


def test_options_that_a_forward_leaves_behind_are_not_read_by_our_own_look(dispatcher: Dispatcher) -> None:
    module, x = Sharing(), torch.randn(2, 4)
    with torch.inference_mode():
        for _run in range(3):
            dispatcher.begin_run()
            options = {"wrappers": {"another extension": [collections.Counter()]}}
            output = dispatcher(module, module.forward, (x,), {"transformer_options": options})
            torch.testing.assert_close(output, module.linear(x))
    assert not any("wrappers" in reason for reason in dispatcher.metrics.snapshot()["fallbacks"])
