"""module_guard.py: what code of extensions reads may be another thing in each step of a run, and is looked at in each.

So does code that an extension has put into a class of the host's: it reads variables, tables and objects that a wrapper
around the model, or a callback of the sampler, sets for each step.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from onediff_comfy.capture.fingerprint.code_ownership import HostCode
from onediff_comfy.capture.target.target import Target
from onediff_comfy.compilation.compile_graph import HostServices
from onediff_comfy.compilation.library import GraphLibrary
from onediff_comfy.serving.dispatcher import Dispatcher

HOST = HostServices("host", "transformer_options", {}, lambda: None, lambda _layers: None)
STRENGTH = 1.0
STRENGTHS = [1.0]
NESTED = {"of": {"steps": [1.0]}}


class Settings:
    strength = 1.0

    def __init__(self) -> None:
        self.own = 1.0


class Called(Settings):
    def __call__(self) -> float:
        return self.own


SETTINGS, CALLED = Settings(), Called()


def closure() -> tuple[Callable[[], float], Callable[[float], None]]:
    strength = 1.0

    def read() -> float:
        return strength

    def write(value: float) -> None:
        nonlocal strength
        strength = value

    return read, write


read_in_cell, write_in_cell = closure()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.table, self.settings = [1.0], Settings()

    def strength(self) -> float:
        raise NotImplementedError

    def forward(self, x: torch.Tensor, transformer_options: dict[str, Any] = {}) -> torch.Tensor:  # noqa: B006
        out: torch.Tensor = self.linear(x) * self.strength()
        return out


def by_variable(value: float) -> None:
    global STRENGTH
    STRENGTH = value


READ: dict[str, tuple[Callable[[Any], float], Callable[[Net, float], Any]]] = {
    "a variable": (lambda self: STRENGTH, lambda net, value: by_variable(value)),
    "an item of a list": (lambda self: STRENGTHS[0], lambda net, value: STRENGTHS.__setitem__(0, value)),
    "an item far inside": (
        lambda self: sum(NESTED["of"]["steps"]),
        lambda net, value: NESTED["of"]["steps"].__setitem__(0, value),
    ),
    "an object": (lambda self: SETTINGS.own, lambda net, value: setattr(SETTINGS, "own", value)),
    "an object that is called": (lambda self: CALLED(), lambda net, value: setattr(CALLED, "own", value)),
    "a class": (lambda self: Settings.strength, lambda net, value: setattr(Settings, "strength", value)),
    "a closure": (lambda self: read_in_cell(), lambda net, value: write_in_cell(value)),
    "a list of its own": (lambda self: self.table[0], lambda net, value: net.table.__setitem__(0, value)),
    "an object of its own": (lambda self: self.settings.own, lambda net, value: setattr(net.settings, "own", value)),
}


@pytest.fixture(params=READ)
def served(request: pytest.FixtureRequest, library: GraphLibrary) -> Any:
    read, write = READ[request.param]
    kind = type("Extended", (Net,), {"strength": read, "__module__": __name__})
    net = kind().eval().requires_grad_(False)
    write(net, 1.0)
    yield net, setting(write, net), Dispatcher("eager", library, HOST)
    write(net, 1.0)


def setting(write: Callable[[Net, float], Any], net: Net) -> Callable[[float], Any]:
    return lambda value: write(net, value)


def run(served: Any, strengths: Sequence[float]) -> None:
    """Run the model with these strengths, one for each step, and see that each output is its own."""
    net, write, dispatcher = served
    x = torch.randn(2, 4)
    dispatcher.begin_run()
    with torch.inference_mode():
        for step, strength in enumerate(strengths):
            write(strength)
            torch.testing.assert_close(dispatcher(net, net.forward, (x,), {}), net(x), msg=f"step {step}")


def test_what_an_extension_reads_may_change_between_two_steps(served: Any) -> None:
    for _ in range(2):
        run(served, (1.0, 1.0, 2.0, 2.0, 3.0, 1.0))
    assert served[2].metrics.snapshot()["served"] >= 4, "it never was a graph's"


def test_what_stays_the_same_is_served(served: Any) -> None:
    for _ in range(3):
        run(served, [1.0] * 4)
    found = served[2].metrics.snapshot()
    assert (found["served"], found["fallbacks"]) == (12, {})


def test_a_number_that_is_set_again_is_no_reason_for_a_look_at_everything(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, is_current = list[Target](), Target.is_current
    monkeypatch.setattr(Target, "is_current", lambda target: (looks.append(target), is_current(target))[1])
    for _ in range(3):
        run(served, [1.0] * 4)
    looks.clear()
    run(served, [float(text) for text in ["1.0"] * 8])  # each an object of its own
    assert len(looks) <= 1, "once a run"
    assert served[2].metrics.snapshot()["served"] == 20


@pytest.mark.parametrize(("steps", "told"), [(3, False), (12, True)])
def test_an_equal_list_that_is_put_anew_in_each_step_has_the_model_looked_at_and_people_are_told(
    steps: int, told: bool, library: GraphLibrary
) -> None:
    kind = type("Extended", (Net,), {"strength": READ["a list of its own"][0], "__module__": __name__})
    net, shown = kind().eval().requires_grad_(False), list[str]()
    dispatcher = Dispatcher("eager", library, HOST, shown.append)
    for _ in range(2):
        shown.clear()
        dispatcher.begin_run()
        for _step in range(steps):
            net.table = [1.0]
            dispatcher(net, net.forward, (torch.ones(2, 4),), {})
        dispatcher.end_run(net)
    assert ["puts equal objects anew" in text for text in shown[-1:]] == [told]
    assert dispatcher.metrics.snapshot()["served"] == 2 * steps


def test_a_variable_that_changes_in_each_step_is_said_to_change(served: Any) -> None:
    for number in range(3):
        run(served, [1.0 + 0.1 * (12 * number + step) for step in range(12)])
    reasons = served[2].metrics.snapshot()["fallbacks"]
    assert sum(reasons.values()) > 20 and all("again and again" in reason or "changes" in reason for reason in reasons)


def test_what_the_host_s_own_code_reads_is_looked_at_once_a_run() -> None:
    """Of its own code nothing is asked in each call: hundreds of functions, in each of fifty blocks."""
    kind = type("OfHost", (Net,), {"strength": READ["a variable"][0], "__module__": __name__})
    target = Target(kind(), HostCode(__name__.partition(".")[0]))
    assert isinstance(target.guard_holds, types.MethodType), "more than attributes is compared"
    assert not isinstance(Target(kind()).guard_holds, types.MethodType)
