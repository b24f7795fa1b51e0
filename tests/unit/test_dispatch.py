"""serving/dispatcher.py: a call is served by a right graph, or by eager with a reason; never by a wrong one."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import pytest
import torch
from releases import since
from torch import nn

from onediff_comfy import engines
from onediff_comfy.capture.call import NotCovered
from onediff_comfy.capture.export import Capture
from onediff_comfy.capture.fingerprint.code_ownership import HostCode
from onediff_comfy.capture.target.target import Target
from onediff_comfy.compilation.background import Background, Job
from onediff_comfy.compilation.compile_graph import HostServices
from onediff_comfy.compilation.library import GraphLibrary
from onediff_comfy.engines.base import CompiledGraph, Engine, EngineError
from onediff_comfy.engines.eager import EagerEngine, EagerGraph
from onediff_comfy.messages import Message, message
from onediff_comfy.runtime.step_cache import StepCache
from onediff_comfy.serving.dispatcher import Dispatcher
from onediff_comfy.serving.module_identities import MOST_CHANGES
from onediff_comfy.serving.verification.eager_times import EagerTimes
from onediff_comfy.settings import MOST_IDENTITIES, SPECIALISE_AFTER_RUNS

WAIT = 10.0  # seconds after which a test is broken, not slow
HOST = HostServices(
    identity="host 1",
    options_name="transformer_options",
    capture_options={},
    check_interrupted=lambda: None,
    refuse=lambda _layers: None,
)


# How often a model's own code ran. Not on the classes: class attributes are part of a fingerprint.
RUNS: Counter[str] = Counter()


class Net(nn.Module):
    """A small model with the host's calling convention. Counts how often its own code runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.spare = nn.Parameter(torch.zeros(2))  # in no operator

    def forward(
        self,
        x: torch.Tensor,
        timestep: torch.Tensor,
        context: torch.Tensor | None = None,
        transformer_options: dict[str, Any] = {},  # noqa: B006
        **kwargs: Any,
    ) -> Any:
        RUNS["Net"] += 1
        hidden = self.norm(self.linear(x)) * timestep[:, None]
        if context is not None:
            hidden = hidden + context
        if transformer_options.get("double"):
            hidden = hidden * 2
        return hidden


@pytest.fixture(autouse=True)
def _log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "onediff_comfy")


class Served:
    """A dispatcher over one module, called like the module."""

    def __init__(
        self,
        library: GraphLibrary,
        module: nn.Module | None = None,
        engine: str = "eager",
        on_show: Callable[[list[str]], object] = lambda _shown: None,
        **host: Any,
    ):
        """``on_show`` is called with all that was shown so far, after each text."""
        self.module = module if module is not None else Net()
        self.library = library
        self.shown: list[str] = []

        def show(text: str) -> None:
            self.shown.append(text)
            on_show(self.shown)

        self.dispatcher = Dispatcher(engine, library, dataclasses.replace(HOST, **host), show)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return self.dispatcher(self.module, self.module.forward, args, kwargs)

    def expected(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return self.module(*args, **kwargs)

    def matches(self, *args: Any, **kwargs: Any) -> bool:
        """Whether one call gives eager's output."""
        torch.testing.assert_close(self(*args, **kwargs), self.expected(*args, **kwargs))
        return True

    @property
    def counts(self) -> dict[str, int]:
        snapshot = self.library.metrics.snapshot()
        return {name: value for name, value in snapshot.items() if isinstance(value, int) and value}

    @property
    def fallbacks(self) -> dict[str, int]:
        return self.library.metrics.snapshot()["fallbacks"]

    @property
    def only_reason(self) -> str:
        (reason,) = self.fallbacks
        return str(reason)


def inputs(batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, 4), torch.rand(batch) + 0.5


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


class FakeEngine(EagerEngine):
    """The eager engine with something done to its graphs, counting compilations."""

    def __init__(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda run: run, size: int = 0):
        self.compilations = 0
        self.digests: list[str] = []  # of what was compiled
        self._wrap, self._size = wrap, size

    def compile(self, capture: Capture) -> CompiledGraph:
        self.compilations += 1
        self.digests.append(capture.digest)
        return FakeGraph(capture, self._wrap, self._size)


class FakeGraph(EagerGraph):
    def __init__(self, capture: Capture, wrap: Callable[..., Any], size: int) -> None:
        super().__init__(capture)
        self._size, self._call = size, wrap(super().__call__)

    @property
    def nbytes(self) -> int:
        return self._size

    def __call__(self, weights: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return self._call(weights, tensors)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[Engine], Any]:
    """Puts an engine in the place of the eager one."""

    def put(engine: Engine) -> Any:
        monkeypatch.setitem(engines.ENGINES, "eager", engine)
        return engine

    return put


class Interrupted(BaseException):
    """As the host's: no Exception."""


# -- served ------------------------------------------------------------------------------------


def test_a_call_is_served_and_counted(library: GraphLibrary, caplog: pytest.LogCaptureFixture) -> None:
    served = Served(library)
    assert served.matches(*inputs())
    assert served.counts == {"captured": 1, "compiled": 1, "proved": 1, "served": 1}
    assert served.fallbacks == {}
    assert warnings(caplog) == []
    assert served.shown[0] == "capturing"
    assert served.shown[-1].startswith("compiled")


def test_the_third_call_runs_neither_capture_nor_the_models_own_code(library: GraphLibrary) -> None:
    """The second call ever of a model times eager once more: in the first it loads its kernels."""
    served = Served(library)
    served(*inputs())
    served(*inputs())
    runs = RUNS["Net"]
    output = served(x := inputs()[0], torch.ones(2))
    assert RUNS["Net"] == runs
    torch.testing.assert_close(output, served.expected(x, torch.ones(2)))
    assert served.counts == {"captured": 1, "compiled": 1, "proved": 1, "served": 3}


def test_names_and_positions_are_one_call(library: GraphLibrary) -> None:
    served = Served(library)
    x, timestep = inputs()
    for args, kwargs in [((x, timestep), {}), ((x,), {"timestep": timestep}), ((), {"timestep": timestep, "x": x})]:
        assert served.matches(*args, **kwargs)
    assert served.counts["captured"] == 1


def test_another_batch_size_is_served_by_the_same_graph(library: GraphLibrary) -> None:
    """Without a capture; its first output is compared with eager's, and no other."""
    served = Served(library)
    for batch in (2, 3, 1, 64):
        for _ in range(2):
            assert served.matches(*inputs(batch))
    assert served.counts == {"captured": 1, "compiled": 1, "proved": 4, "served": 8}
    assert len(served.dispatcher.graph_keys()) == 1


def test_an_engine_that_compiles_for_one_set_of_sizes_gets_a_route_for_each(
    library: GraphLibrary, install: Any
) -> None:
    class OneSize(FakeEngine):
        general = False

    engine = install(OneSize())
    served = Served(library)
    for batch in (2, 3, 2, 3):
        assert served.matches(*inputs(batch))
    assert served.counts == {"captured": 2, "compiled": 2, "proved": 2, "served": 4}
    assert engine.compilations == 2


@pytest.mark.parametrize("other", ["context", "dtype", "extra argument", "new option"])
def test_another_signature_gets_a_route_of_its_own(other: str, library: GraphLibrary) -> None:
    served = Served(library, Net().double() if other == "dtype" else None)
    x, timestep = inputs()
    first = (x.double(), timestep.double()) if other == "dtype" else (x, timestep)
    served(*first)
    args, kwargs = {
        "context": ((x, timestep, torch.randn(2, 4)), {}),
        "dtype": ((x.double(), timestep), {}),
        "extra argument": ((x, timestep), {"y": torch.zeros(2)}),
        "new option": ((x, timestep), {"transformer_options": {"unheard of": 1}}),
    }[other]
    for _ in range(2):
        assert served.matches(*args, **kwargs)
    assert served.counts["captured"] == 2
    assert served.counts["served"] == 3
    assert served.matches(*first)
    assert served.counts["captured"] == 2


def test_an_option_nobody_reads_costs_a_capture_but_no_compilation(library: GraphLibrary) -> None:
    served = Served(library)
    for options in ({}, {"a": 1}, {"a": object(), "b": print}):
        assert served.matches(*inputs(), transformer_options=options)
    assert (served.counts["captured"], served.counts["compiled"]) == (3, 1)
    served(*inputs(), transformer_options={"a": "another value"})
    assert served.counts["captured"] == 3


def test_an_option_that_is_read_is_told_apart_by_value(library: GraphLibrary) -> None:
    served = Served(library)
    x = inputs()
    for _ in range(2):
        for double in (True, False, None, 1):
            assert served.matches(*x, transformer_options={"double": double, "id": object()})
    assert served.counts["served"] == 8
    # True and 1 compute the same graph; so do False and None.
    assert served.counts["compiled"] == 2


def test_options_are_not_changed_by_a_call(library: GraphLibrary) -> None:
    options = {"double": True, "id": object()}
    before = dict(options)
    Served(library, capture_options={"optimized_attention_override": print})(*inputs(), transformer_options=options)
    assert options == before


def test_outputs_keep_their_structure(library: GraphLibrary) -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            hidden = self.linear(x)
            return {"output": [hidden, (hidden * 2,)], "middle": {"a": hidden + 1}}

    served = Served(library, Nested())
    x = torch.randn(2, 4)
    for _ in range(2):
        actual, expected = served(x), served.expected(x)
        assert torch.utils._pytree.tree_structure(actual) == torch.utils._pytree.tree_structure(expected)
        torch.testing.assert_close(actual, expected)
    assert served.counts["served"] == 2


def test_outputs_may_hold_none_and_numbers(library: GraphLibrary) -> None:
    class Partial(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return {"output": [x * 2, None], "count": 3}

    output = Served(library, Partial())(torch.ones(2))
    assert output["output"][1] is None
    assert output["count"] == 3


def test_works_under_inference_mode(library: GraphLibrary) -> None:
    with torch.inference_mode():
        served = Served(library, Net().requires_grad_(False))
        for _ in range(2):
            assert served.matches(*inputs())
    assert served.counts["served"] == 2
    assert served.matches(*inputs())


# -- weights -----------------------------------------------------------------------------------


def test_changed_weights_give_the_new_output_and_no_new_graph(library: GraphLibrary) -> None:
    """A LoRA on, edited in place, off again; another checkpoint."""
    served = Served(library)
    x = inputs()
    before = served(*x)
    original = served.module.linear.weight
    served.module.linear.weight = nn.Parameter(torch.randn(4, 4))
    assert served.matches(*x)
    assert not torch.allclose(served(*x), before)
    with torch.no_grad():
        served.module.linear.weight.mul_(0.5)
    assert served.matches(*x)
    served.module.linear.weight = original
    torch.testing.assert_close(served(*x), before)
    served.module.load_state_dict(Net().state_dict(), assign=True)
    assert served.matches(*x)
    served.dispatcher.begin_run()
    assert served.matches(*x)
    assert (served.counts["captured"], served.counts["compiled"], served.fallbacks) == (1, 1, {})


def test_weights_that_moved_run_eager_until_they_are_back(library: GraphLibrary) -> None:
    served = Served(library)
    x = inputs()
    served(*x)
    resident = served.module.spare
    served.module.spare = nn.Parameter(torch.zeros(2, device="meta"))
    assert served.matches(*x)
    assert served.only_reason == "weights are not resident on cpu (offloaded)"
    served.module.spare = resident
    served(*x)
    assert served.counts == {"captured": 1, "compiled": 1, "proved": 1, "served": 2}


def test_weights_that_are_away_in_the_first_call_run_eager_until_they_are_back(library: GraphLibrary) -> None:
    served = Served(library)
    resident = served.module.spare
    served.module.spare = nn.Parameter(torch.zeros(2, device="meta"))
    served(*inputs())
    served.module.spare = resident
    served.dispatcher.begin_run()
    served(*inputs())
    assert served.counts.get("served") == 1


def test_two_dispatchers_share_the_graphs_of_one_architecture(library: GraphLibrary) -> None:
    first, second = Served(library), Served(library)
    x = inputs()
    assert first.matches(*x)
    assert second.matches(*x)
    assert not torch.allclose(first(*x), second(*x))
    assert first.counts == {"captured": 1, "compiled": 1, "proved": 1, "served": 4}


def test_another_host_shares_the_graph_after_a_capture_of_its_own(library: GraphLibrary) -> None:
    """An update of the host that left the operators alone costs seconds, not minutes."""
    first, second = Served(library), Served(library, identity="host 2")
    first(*inputs())
    second(*inputs())
    assert (first.counts["captured"], first.counts["compiled"]) == (2, 1)


# -- wrong pictures that must not happen -------------------------------------------------------


class Moded(nn.Module):
    """Computes according to a plain attribute."""

    def __init__(self, activation: Any = None, factor: float = 1.0, bias: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=bias)
        self.activation, self.factor = activation, factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x) * self.factor
        return self.activation(hidden) if self.activation else hidden


def test_two_modules_with_different_built_in_activations_do_not_share_a_graph(library: GraphLibrary) -> None:
    x = torch.randn(2, 4)
    assert Served(library, Moded(torch.sin)).matches(x)
    assert Served(library, Moded(torch.cos)).matches(x)


def test_an_attribute_changed_between_runs_changes_the_output(library: GraphLibrary) -> None:
    served = Served(library, Moded(factor=1.0))
    served(torch.randn(2, 4))
    served.module.factor = 2.0
    served.dispatcher.begin_run()
    assert served.matches(torch.randn(2, 4))


class Scaled(nn.Module):
    """Holds a number where only a thorough look finds it: inside of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.factors = [2.0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.linear(x) * self.factors[0]
        return output


@pytest.fixture
def events(library: GraphLibrary, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a dispatcher does, on a device that computes while others go on."""
    events: list[str] = []
    is_current, run = Target.is_current, EagerGraph.__call__
    monkeypatch.setattr(CompiledGraph, "returns_early", lambda _graph, _device: True)
    monkeypatch.setattr(Target, "is_current", lambda target: (events.append("looked"), is_current(target))[1])
    monkeypatch.setattr(EagerGraph, "__call__", lambda *args: (events.append("computed"), run(*args))[1])
    return events


@pytest.mark.parametrize("changed", [False, True])
def test_a_model_is_looked_at_while_the_first_call_of_a_run_is_computed(
    library: GraphLibrary, changed: bool, events: list[str]
) -> None:
    """And if it is another one than before, what was computed meanwhile is thrown away. So it is of the host's code."""
    served, x = Served(library, Scaled(), code=HostCode(__name__.partition(".")[0])), torch.randn(2, 4)
    assert served.matches(x)
    served.dispatcher.begin_run()
    if changed:
        served.module.factors[0] += 1  # in the same list
    before = served.counts["served"]
    events.clear()
    for _ in range(3):
        assert served.matches(x)
    assert events == ["computed", "looked"] + ["computed"] * (3 if changed else 2), "nobody is to wait for the look"
    assert served.counts["served"] - before == 3
    assert served.counts["captured"] == (2 if changed else 1)


class ToldApart(nn.Module):
    """Asks whether it is the one that a table has."""

    table: ClassVar[dict[int, float]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mul(self.linear(x), self.table.get(id(self), 1.0))


@pytest.mark.parametrize("meant_first", [False, True])
def test_code_that_asks_which_module_it_is_of_is_compared_for_each(library: GraphLibrary, meant_first: bool) -> None:
    """The table is the same for all of them, and so is the fingerprint."""
    meant, other = ToldApart(), ToldApart()
    ToldApart.table = {id(meant): 3.0}
    first, second = (Served(library, module) for module in ((meant, other) if meant_first else (other, meant)))
    x = torch.randn(2, 4)
    for _ in range(2):  # the next process finds the first one's proof
        for served in (first, second, first, second):
            assert served.matches(x)
        first.dispatcher.begin_run()
        second.dispatcher.begin_run()
    assert first.counts["captured"] == 1 and first.counts["served"] == 4
    assert "retired" not in first.counts, "it is right for the first"
    assert any("right for another model" in reason for reason in second.fallbacks)


def test_another_module_of_one_dispatcher_is_compared_however_often_the_first_one_was(library: GraphLibrary) -> None:
    """In the same run, as the models of several GPUs are."""
    meant, other = ToldApart(), ToldApart()
    ToldApart.table = {id(meant): 3.0}
    served, x = Served(library, other), torch.randn(2, 4)
    for _ in range(20):
        assert served.matches(x)
    served.module = meant
    for _ in range(3):
        assert served.matches(x)


def test_weights_are_looked_at_anew_in_every_run(library: GraphLibrary, events: list[str]) -> None:
    """What lies where something else lay before may be of another shape, and no graph is to read beyond it."""
    served, x = Served(library, Scaled()), torch.randn(2, 4)
    for _ in range(3):
        assert served.matches(x)
    weight = served.module.linear.weight
    weight.data = weight.data.as_strided((3, 4), (4, 1))
    served.module.linear.bias.data = served.module.linear.bias.data.as_strided((3,), (1,))
    served.dispatcher.begin_run()
    events.clear()
    assert served(x).shape == (2, 3)
    assert events[0] == "looked"


def _another_shape(module: Scaled) -> None:
    module.linear.weight, module.linear.bias = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(6))


def _no_bias(module: Scaled) -> None:
    module.linear.bias = None


def _indescribable(module: Scaled) -> None:
    module.linear.register_parameter("other", nn.UninitializedParameter())


@pytest.mark.parametrize("change", [_another_shape, _no_bias, _indescribable])
@pytest.mark.parametrize("meanwhile", [True, False])
def test_what_is_seen_meanwhile_comes_to_the_same_as_what_is_seen_before(
    library: GraphLibrary, change: Callable[[Scaled], None], meanwhile: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CompiledGraph, "returns_early", lambda _graph, _device: meanwhile)
    module = Scaled()
    served, x = Served(library, module), torch.randn(2, 4)
    for _ in range(2):
        assert served.matches(x)
    change(module)
    before = served.counts["served"]
    for _ in range(2):
        served.dispatcher.begin_run()
        for _ in range(2):
            assert served.matches(x)
    assert served.counts["served"] - before == (0 if change is _indescribable else 4)


def test_a_graph_that_fails_on_another_model_still_serves_its_own(
    library: GraphLibrary, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels assert the layout of what they are given."""
    run = EagerGraph.__call__

    def particular(self: EagerGraph, weights: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> Any:
        assert all(weight.is_contiguous() for weight in weights), "expected stride"
        return run(self, weights, tensors)

    module = Scaled()
    served, x = Served(library, module), torch.randn(2, 4)
    for _ in range(2):
        assert served.matches(x)
    monkeypatch.setattr(EagerGraph, "__call__", particular)
    weight = module.linear.weight
    for own in (False, True):
        module.linear.weight = weight if own else nn.Parameter(weight.detach().t().contiguous().t())
        served.dispatcher.begin_run()
        before = served.counts["served"]
        for _ in range(3):
            assert served.matches(x)
        if own:
            assert served.counts["served"] - before == 3


def test_a_run_of_one_call_counts_for_graphs_of_their_own(
    library: GraphLibrary, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A VAE's and a text encoder's runs are one call each."""
    begun: list[str] = []

    class OtherProcess(Background):
        def start(self, key: str, job: Job) -> bool:
            begun.append(key)
            return True

    library.background = OtherProcess("none", list)
    monkeypatch.setattr(EagerEngine, "specialises", lambda _engine, _device: True)
    served, x = Served(library, Scaled()), torch.randn(2, 4)
    for number in range(1, SPECIALISE_AFTER_RUNS + 1):
        served.dispatcher.begin_run()
        assert served.matches(x)
        assert len(begun) == (number == SPECIALISE_AFTER_RUNS)


@pytest.mark.parametrize("why", ["nothing computes meanwhile", "not proved", "to be timed"])
def test_a_model_is_looked_at_first_where_a_calls_output_could_not_be_thrown_away(
    library: GraphLibrary, why: str, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    served, x = Served(library, Scaled()), torch.randn(2, 4)
    for _ in range(1 if why == "to be timed" else 2):  # eager is timed again in the second call
        assert served.matches(x)
    served.dispatcher.begin_run()
    if why == "nothing computes meanwhile":
        monkeypatch.undo()
        monkeypatch.setattr(Target, "is_current", lambda _: (events.append("looked"), True)[1])
        run = EagerGraph.__call__
        monkeypatch.setattr(EagerGraph, "__call__", lambda *args: (events.append("computed"), run(*args))[1])
    elif why == "not proved":
        monkeypatch.setattr(library.verdicts, "is_proved", lambda *_: False)
    elif why == "to be timed":
        monkeypatch.setattr(EagerTimes, "due", lambda *_, **__: True)
    events.clear()
    served(x)
    assert events == ["looked", "computed"]


def test_a_bias_added_between_runs_changes_the_output(library: GraphLibrary) -> None:
    served = Served(library, Moded())
    served(torch.randn(2, 4))
    served.module.linear.bias = nn.Parameter(torch.ones(4))
    served.dispatcher.begin_run()
    assert served.matches(torch.randn(2, 4))


def test_a_tied_and_an_untied_module_do_not_share_a_graph(library: GraphLibrary) -> None:
    tied, untied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    x = torch.randn(2, 4)
    assert Served(library, tied).matches(x)
    assert Served(library, untied).matches(x)


def test_two_functions_of_one_module_do_not_share_a_graph(library: GraphLibrary) -> None:
    """A VAE's encode and decode, say."""

    class Codec(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)

        def decode(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * 2

    module, x = Codec(), torch.randn(2, 4)
    dispatcher = Dispatcher("eager", library, HOST)
    with torch.no_grad():
        for function in (module.encode, module.decode):
            torch.testing.assert_close(dispatcher(module, function, (x,), {}), function(x))


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
def test_a_call_that_needs_gradients_gets_them(library: GraphLibrary) -> None:
    """The host trains LoRAs through the same forward."""
    served = Served(library)
    x, timestep = inputs()
    x.requires_grad_()
    with torch.enable_grad():
        output = served.dispatcher(served.module, served.module.forward, (x, timestep), {})
        output.sum().backward()
    assert x.grad is not None


# -- eager, with a reason ----------------------------------------------------------------------


def test_an_uncovered_argument_runs_eager_counted_and_warned_once(
    library: GraphLibrary, caplog: pytest.LogCaptureFixture
) -> None:
    served = Served(library)
    x = inputs()
    for _ in range(3):
        assert served.matches(*x, patch=lambda: None)
    assert served.fallbacks == {"argument patch holds a function, which no graph can take": 3}
    assert "served" not in served.counts
    assert len(warnings(caplog)) == 1
    assert "Net runs without acceleration: argument patch holds a function" in warnings(caplog)[0]
    assert served.shown == ["not accelerated: argument patch holds a function, which no graph can take"]
    served(*x, other=object())
    assert len(warnings(caplog)) == 2
    assert served.matches(*x)
    assert served.counts["served"] == 1


@pytest.mark.usefixtures("no_oneflow")
@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("cudagraph", "the cudagraph engine is not available: CUDA graphs need an NVIDIA GPU"),
        ("oneflow", "the oneflow engine is not available: "),
        ("tensorrt", "there is no engine “tensorrt”; choose one of auto, inductor"),
    ],
)
def test_an_engine_that_cannot_run_here_says_so(engine: str, words: str, library: GraphLibrary) -> None:
    served = Served(library, engine=engine)
    for _ in range(2):
        assert served.matches(*inputs())
    assert words in served.only_reason
    assert served.fallbacks[served.only_reason] == 2
    assert served.counts == {}, "nothing was captured in vain"


def test_a_forward_that_cannot_be_captured_runs_eager_and_is_tried_once(library: GraphLibrary) -> None:
    class Dependent(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            RUNS["Dependent"] += 1
            return x if x.sum() > 0 else -x

    served = Served(library, Dependent())
    served(torch.ones(2))
    tried = RUNS["Dependent"]
    for _ in range(3):
        assert torch.equal(served(torch.ones(2)), torch.ones(2))
    assert RUNS["Dependent"] == tried + 3
    assert "cannot be captured" in served.only_reason


def test_a_host_that_refuses_the_layers_is_obeyed(library: GraphLibrary) -> None:
    seen = []

    def refuse(layers: Any) -> None:
        seen.append(list(layers))
        raise NotCovered("layers patch their weights")

    served = Served(library, refuse=refuse)
    assert served.matches(*inputs())
    assert served.only_reason == "layers patch their weights"
    assert seen == [list(served.module.modules())]


def test_arguments_that_do_not_fit_raise_the_models_own_error(library: GraphLibrary) -> None:
    with pytest.raises(TypeError, match="timestep"):
        Served(library)(torch.zeros(2, 4))


def test_a_call_without_tensors_runs_eager(library: GraphLibrary) -> None:
    class Constant(nn.Module):
        def forward(self, number: int) -> int:
            return number + 1

    served = Served(library, Constant())
    assert served(1) == 2
    assert served.only_reason == "the call has no tensors"


def test_options_may_be_none(library: GraphLibrary) -> None:
    class Optional(nn.Linear):
        def forward(self, x: torch.Tensor, transformer_options: dict[str, Any] | None = None) -> Any:
            return super().forward(x)

    served = Served(library, Optional(4, 4))
    assert served.matches(torch.zeros(2, 4), None)
    assert served.matches(torch.zeros(2, 4), {"a": 1})
    assert served.counts["served"] == 2


# -- engines that fail -------------------------------------------------------------------------


def failing(error: BaseException) -> FakeEngine:
    engine = FakeEngine()

    def compile_nothing(_capture: Capture) -> CompiledGraph:
        engine.compilations += 1
        raise error

    engine.compile = compile_nothing  # type: ignore[method-assign]
    return engine


def test_an_engine_error_runs_eager_and_is_not_tried_again(library: GraphLibrary, install: Any) -> None:
    engine = install(failing(EngineError("no compiler; install one")))
    served = Served(library)
    for _ in range(3):
        assert served.matches(*inputs())
    assert served.fallbacks == {"no compiler; install one": 3}
    assert engine.compilations == 1
    assert served.counts == {"captured": 1, "failed": 1}


def test_any_other_exception_of_an_engine_runs_eager_too(library: GraphLibrary, install: Any) -> None:
    engine = install(failing(RuntimeError("internal")))
    served = Served(library)
    for _ in range(3):
        assert served.matches(*inputs())
    assert "internal" in served.only_reason
    assert engine.compilations == 2, "for all sizes, then for these"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda output: output * 1.001,
        lambda output: output + torch.nan,
        lambda output: output[:1],
        lambda output: output.double(),
        lambda output: torch.zeros_like(output),
    ],
    ids=["slightly off", "nan", "shape", "dtype", "zeros"],
)
def test_a_graph_that_is_wrong_never_serves(
    spoil: Callable[[torch.Tensor], torch.Tensor], library: GraphLibrary, install: Any
) -> None:
    """Eager's result comes back, the graph is retired, nobody compiles it again.

    What is wrong for all sizes may be right for one, so a graph for these sizes alone is tried after it, once.
    """
    engine = install(FakeEngine(lambda run: lambda weights, tensors: [spoil(out) for out in run(weights, tensors)]))
    served, other = Served(library), Served(library)
    x = inputs()
    for _ in range(3):
        assert served.matches(*x)
        assert other.matches(*x)
    assert engine.compilations == len(set(engine.digests)) <= 2
    assert served.counts["retired"] == engine.compilations
    assert "served" not in served.counts
    assert "proved" not in served.counts
    assert "differed from eager by" in served.only_reason
    assert "was retired" in served.only_reason
    assert len(library.cache) == 0


def test_rounding_is_no_difference(library: GraphLibrary, install: Any) -> None:
    install(FakeEngine(lambda run: lambda weights, tensors: [out * (1 + 1e-6) for out in run(weights, tensors)]))
    served = Served(library)
    served(*inputs())
    assert served.counts["proved"] == 1


def test_one_wrong_output_of_several_is_enough(library: GraphLibrary, install: Any) -> None:
    class Pair(nn.Module):
        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            return [x * 2, x * 3]

    install(FakeEngine(lambda run: lambda weights, tensors: [run(weights, tensors)[0]] * 2))
    served = Served(library, Pair())
    assert served.matches(torch.ones(2))
    assert "retired" in served.only_reason


def test_a_proof_is_made_once_per_graph(library: GraphLibrary) -> None:
    first, second = Served(library), Served(library)
    first(*inputs())
    first(*inputs())
    runs = RUNS["Net"]
    second(*inputs())
    first(*inputs())
    assert RUNS["Net"] == runs


def test_a_graph_that_fails_while_running_gives_eagers_result_and_is_not_tried_again(
    library: GraphLibrary, install: Any
) -> None:
    calls = []

    def wrap(run: Any) -> Any:
        def fail(*_args: Any) -> Any:
            calls.append(1)
            raise RuntimeError("kernel launch failed\nand a long story")

        return fail

    install(FakeEngine(wrap))
    served = Served(library)
    for _ in range(3):
        assert served.matches(*inputs())
    assert served.fallbacks == {"the compiled graph failed (RuntimeError: kernel launch failed)": 3}
    assert len(calls) == 1


def test_out_of_memory_runs_eager_this_time_only(library: GraphLibrary, install: Any) -> None:
    fail = [False]

    def wrap(run: Any) -> Any:
        def sometimes(weights: Any, tensors: Any) -> Any:
            if fail[0]:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return run(weights, tensors)

        return sometimes

    engine = install(FakeEngine(wrap))
    served = Served(library)
    for fail[0] in (True, False, True, False):
        assert served.matches(*inputs())
    assert served.fallbacks == {"the compiled graph ran out of memory": 2}
    assert served.counts["served"] == 2
    assert engine.compilations == 1


def test_recordings_go_for_want_of_memory_once_nothing_holds_the_one_that_failed(
    library: GraphLibrary, install: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error holds what its frames hold. As long as it is handled, the driver keeps a recording's memory."""
    released, held = list[bool](), list[Any]()

    class Recording:
        pass

    def wrap(run: Any) -> Any:
        def runs_out(weights: Any, tensors: Any) -> Any:
            if held:
                return run(weights, tensors)
            recording = Recording()
            held.append(weakref.ref(recording))
            raise torch.OutOfMemoryError("CUDA out of memory")

        return runs_out

    def release(ran_out: bool = False) -> int:
        released.append(ran_out and held[0]() is None)
        return 0

    install(FakeEngine(wrap))
    monkeypatch.setattr(library.recordings, "release", release)
    served = Served(library)
    assert served.matches(*inputs())
    assert (released, served.fallbacks) == ([True], {})


# -- interruptions -----------------------------------------------------------------------------


def test_an_interruption_while_capturing_comes_out_and_a_later_call_is_served(library: GraphLibrary) -> None:
    interrupt, asked = [True], [0]

    def check() -> None:
        asked[0] += 1
        if interrupt[0] and asked[0] > 1:  # the first time before the call
            raise Interrupted

    served = Served(library, check_interrupted=check)
    with pytest.raises(Interrupted):
        served(*inputs())
    assert served.counts == {}
    interrupt[0] = False
    assert served.matches(*inputs())
    assert served.counts["served"] == 1
    assert served.fallbacks == {}


def test_a_call_that_a_graph_would_answer_is_not_begun_once_the_run_is_to_end(library: GraphLibrary) -> None:
    interrupt = [False]

    def check() -> None:
        if interrupt[0]:
            raise Interrupted

    served = Served(library, check_interrupted=check)
    for _ in range(3):
        assert served.matches(*inputs())
    interrupt[0], answered = True, served.counts["served"]
    with pytest.raises(Interrupted):
        served(*inputs())
    interrupt[0] = False
    assert served.counts["served"] == answered
    assert served.matches(*inputs())


def test_an_interruption_while_compiling_comes_out_and_the_work_is_kept(library: GraphLibrary, install: Any) -> None:
    compiling, may_end = threading.Event(), threading.Event()
    interrupt = [True]

    class Slow(FakeEngine):
        def compile(self, capture: Capture) -> CompiledGraph:
            compiling.set()
            assert may_end.wait(WAIT)
            return super().compile(capture)

    def check() -> None:
        if interrupt[0] and compiling.is_set():
            raise Interrupted

    engine = install(Slow())
    served = Served(library, check_interrupted=check)
    with pytest.raises(Interrupted):
        served(*inputs())
    interrupt[0] = False
    may_end.set()
    assert served.matches(*inputs())
    assert served.counts["served"] == 1
    assert served.fallbacks == {}
    assert engine.compilations == 1


def template(text: str) -> str:
    """What a text for people was made from: without the seconds in it, which are the machine's."""
    return text.template if isinstance(text, Message) else text


def test_a_person_sees_that_it_compiles(library: GraphLibrary, install: Any) -> None:
    may_end = threading.Event()

    class Slow(FakeEngine):
        def compile(self, capture: Capture) -> CompiledGraph:
            assert may_end.wait(WAIT)
            return super().compile(capture)

    install(Slow())
    served = Served(library, on_show=lambda shown: "compiling" in shown[-1] and may_end.set())
    begun = time.monotonic()
    served(*inputs())
    told = served.shown[[template(text) for text in served.shown].index("compiling, {seconds:.0f} s")]
    assert isinstance(told, Message)
    assert 0 < told.values["seconds"] < time.monotonic() - begun


class OfOther(Net):
    """Of another architecture than ``Net``."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, timestep: torch.Tensor, **kwargs: Any) -> Any:
        return super().forward(self.extra(x), timestep, **kwargs)


@pytest.fixture
def stopped(library: GraphLibrary, install: Any) -> Iterator[threading.Event]:
    """A person stopped waiting for a compilation, which goes on until this event is set."""
    compiling, may_end = threading.Event(), threading.Event()

    class Slow(FakeEngine):
        def compile(self, capture: Capture) -> CompiledGraph:
            compiling.set()
            assert may_end.wait(WAIT)
            return super().compile(capture)

    def check() -> None:
        if compiling.is_set():
            raise Interrupted

    install(Slow())
    with pytest.raises(Interrupted):
        Served(library, check_interrupted=check)(*inputs())
    yield may_end
    may_end.set()


def test_a_person_sees_that_another_graph_is_compiled_before_theirs(
    library: GraphLibrary, stopped: threading.Event
) -> None:
    served = Served(library, OfOther(), on_show=lambda shown: len(shown) > 2 and stopped.set())
    begun = time.monotonic()
    assert served.matches(*inputs())
    told = served.shown[:3]
    assert [template(text) for text in told] == ["waiting for a compilation that is under way, {seconds:.0f} s"] * 3
    assert isinstance(told[0], Message)
    assert 0 < told[0].values["seconds"] < time.monotonic() - begun


# -- runs and eviction -------------------------------------------------------------------------


def doubled(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def test_a_hook_added_between_runs_is_obeyed_and_one_that_went_is_forgotten(library: GraphLibrary) -> None:
    served = Served(library)
    x = inputs()
    before = served(*x)
    handle = served.module.linear.register_forward_hook(doubled)
    served.dispatcher.begin_run()
    assert served.matches(*x)
    assert served.only_reason == "layer linear has a forward hook from another extension"
    handle.remove()
    served.dispatcher.begin_run()
    torch.testing.assert_close(served(*x), before)
    assert served.counts == {"captured": 1, "compiled": 1, "proved": 1, "served": 2}


def test_a_replaced_layer_is_obeyed_in_the_next_run(library: GraphLibrary) -> None:
    served = Served(library)
    x = inputs()
    served(*x)
    served.module.norm = nn.LayerNorm(4, eps=10.0)
    served.dispatcher.begin_run()
    assert served.matches(*x)
    assert served.counts["compiled"] == 2


# Two calls that no graph serves both of.
KINDS = ((torch.ones(2, 4), torch.ones(2)), (torch.ones(2, 4), torch.ones(2), torch.ones(2, 4)))


def test_an_evicted_graph_is_made_again(library: GraphLibrary, install: Any) -> None:
    engine = install(FakeEngine(size=10))
    library.cache.budget = 15
    served = Served(library)
    for call in (*KINDS, KINDS[0], KINDS[0]):
        assert served.matches(*call)
    assert engine.compilations == 3
    assert served.counts["served"] == 4
    assert len(library.cache) == 1


def test_a_graph_made_again_is_proved_again(library: GraphLibrary, install: Any) -> None:
    install(FakeEngine(size=10))
    library.cache.budget = 15
    served = Served(library)
    for call in (*KINDS, KINDS[0]):
        served(*call)
    assert served.counts["proved"] == 3


def test_the_end_of_a_run_says_what_served_it(library: GraphLibrary, caplog: pytest.LogCaptureFixture) -> None:
    served = Served(library)
    served.dispatcher.begin_run()
    served(*inputs())
    served(*inputs(), patch=object())
    served.dispatcher.end_run(served.module)
    assert "1 of 2 model calls served by compiled graphs" in caplog.text


def test_calls_that_passed_by_are_counted_one_by_one(library: GraphLibrary) -> None:
    served = Served(library)
    served.dispatcher.begin_run()
    for calls in range(3):
        assert served.dispatcher.run.report.calls == calls
        served.dispatcher.passed_by(served.module, message("Another is faster"))
    served.dispatcher.end_run(served.module)
    assert served.fallbacks == {"Another is faster": 3}
    assert served.shown[-1] == "not accelerated: Another is faster"


def test_a_run_in_which_nothing_was_called_is_not_silent(
    library: GraphLibrary, caplog: pytest.LogCaptureFixture
) -> None:
    served = Served(library)
    served.dispatcher.begin_run()
    served.dispatcher.end_run(served.module)
    assert served.shown == ["the model was not called in this run"]
    assert served.fallbacks == {}, "no call, so none that ran eager"
    assert len(warnings(caplog)) == 1


def test_calls_from_many_threads_compile_once(library: GraphLibrary) -> None:
    served = Served(library)
    x = inputs()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(5):
                assert served.matches(*x)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert served.counts["compiled"] == 1
    assert served.fallbacks == {}


@since("2.11", "leaves cuDNN alone while it traces")
def test_a_graph_does_not_run_while_another_thread_captures(library: GraphLibrary, install: Any) -> None:
    """torch.export switches cuDNN off in the process: of two GPUs in a run, the one that was ready failed."""
    seen: list[bool] = []

    def looking(run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            seen.append(torch.backends.cudnn.enabled)
            return run(*args)

        return call

    install(FakeEngine(looking))
    ready, x = Served(library), inputs()
    for _ in range(3):
        assert ready.matches(*x)
    capturing, answered = threading.Event(), threading.Event()
    waited: list[bool] = []

    def check() -> None:  # called for every operator that is captured
        if not capturing.is_set() and not torch.backends.cudnn.enabled:
            capturing.set()
            waited.append(not answered.wait(0.5))

    thread = threading.Thread(target=Served(library, OfOther(), check_interrupted=check), args=x)
    thread.start()
    assert capturing.wait(WAIT), "PyTorch no longer switches cuDNN off: nobody need wait"
    seen.clear()
    assert ready.matches(*x)
    answered.set()
    thread.join(WAIT)
    assert waited == [True]
    assert seen == [True] * len(seen) != []
    assert ready.fallbacks == {}


def test_graphs_of_two_threads_run_at_the_same_time(library: GraphLibrary, install: Any) -> None:
    together = threading.Barrier(2)

    def meeting(run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if met:
                together.wait(WAIT)
            return run(*args)

        return call

    install(FakeEngine(meeting))
    met = list[bool]()
    served, x = [Served(library), Served(library)], inputs()
    for each in served:
        for _ in range(3):
            assert each.matches(*x)
    met.append(True)
    thread = threading.Thread(target=served[0], args=x)
    thread.start()
    assert served[1].matches(*x)
    thread.join(WAIT)
    assert not together.broken


def test_without_general_graphs_a_batch_is_served_by_graphs_of_other_batch_sizes(
    library: GraphLibrary, install: Any
) -> None:
    """3 runs as 4 and is cut, 6 as 4 and 2; 3 on graphs for 2 alone would cost too much and gets its own."""

    class OneSize(FakeEngine):
        general = False

    engine = install(OneSize())
    served = Served(library)
    for batch in (4, 2):
        assert served.matches(*inputs(batch))
    for batch in (3, 6, 6):
        assert served.matches(*inputs(batch))
    assert engine.compilations == 2
    assert served.counts == {"captured": 2, "compiled": 2, "proved": 2, "served": 2 + 1 + 2 + 2}
    assert served.matches(*inputs(1))
    assert engine.compilations == 3


def test_a_call_in_parts_does_not_take_the_step_cache_from_another_thread(library: GraphLibrary, install: Any) -> None:
    """ComfyUI has a thread for each GPU of a run over several; what belongs to the run is handed along."""

    class OneSize(FakeEngine):
        general = False

    inside, may_end = threading.Event(), threading.Event()

    def slow(run: Callable[..., Any]) -> Callable[..., Any]:
        def call(weights: Any, tensors: Any) -> Any:
            if threading.current_thread().name == "parts":
                inside.set()
                assert may_end.wait(WAIT)
            return run(weights, tensors)

        return call

    install(OneSize(slow))
    served, step_cache = Served(library), StepCache(0.1)
    served.dispatcher.begin_run(step_cache)
    for batch in (4, 2, 3):  # 3 runs as 4 from here on
        assert served.matches(*inputs(batch))
    before = sum(step_cache.others.values())
    thread = threading.Thread(target=served, args=inputs(3), name="parts")
    thread.start()
    assert inside.wait(WAIT)
    served(*inputs(2))
    assert sum(step_cache.others.values()) == before + 1, "the other thread's call had no step cache"
    may_end.set()
    thread.join(WAIT)
    assert sum(step_cache.others.values()) == before + 1, "a part is no call of the run's"


class Mixing(Net):
    """Samples of a batch see each other, as the frames of a video do."""

    def forward(self, x: torch.Tensor, timestep: torch.Tensor, **kwargs: Any) -> Any:
        return super().forward(x - x.mean(0), timestep, **kwargs)


def test_a_batch_whose_samples_see_each_other_is_never_cut(library: GraphLibrary, install: Any) -> None:
    class OneSize(FakeEngine):
        general = False

    engine = install(OneSize())
    served = Served(library, Mixing())
    for batch in (4, 3, 3, 6, 3):
        assert served.matches(*inputs(batch))
    assert engine.compilations == 3


# -- what changes between two calls of a run ---------------------------------------------------


class Windowed(nn.Module):
    """As extensions for videos do it: an attribute says which part of a table the next call is for."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(4, 4), nn.Buffer(torch.randn(32, 4))
        self.window = [0, 1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.table[self.window]


def test_an_attribute_that_is_set_in_the_middle_of_a_run_is_seen(library: GraphLibrary) -> None:
    served = Served(library, Windowed())
    served.dispatcher.begin_run()
    for window in ([0, 1], [2, 3], [0, 1], [4, 5]):
        served.module.window = window
        assert served.matches(torch.randn(2, 4))
    assert served.counts["captured"] == 3 and not served.fallbacks


def test_an_attribute_that_never_stays_the_same_is_not_captured_for_ever(library: GraphLibrary) -> None:
    served, too_many = Served(library, Windowed()), MOST_IDENTITIES + 4
    for number in range(too_many + MOST_IDENTITIES):
        served.dispatcher.begin_run()
        served.module.window = [0, number % too_many]
        assert served.matches(torch.randn(2, 4))
    assert served.counts["captured"] == MOST_IDENTITIES
    assert served.counts["served"] == 2 * MOST_IDENTITIES, "the first ones are known, and come again"
    assert served.fallbacks == {"attribute window of layer (root) changes again and again": 4}


def test_what_changes_from_call_to_call_of_a_run_is_not_looked_at_in_each(
    library: GraphLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As AnimateDiff sets it for each window of a video: a look at all code takes longer than the host's own call."""
    looks = list[int]()
    inspected = Target._inspect
    monkeypatch.setattr(Target, "_inspect", lambda target: looks.append(1) or inspected(target))
    served = Served(library, Windowed())

    def run(windows: Iterable[list[int]]) -> None:
        served.dispatcher.begin_run()
        for window in windows:
            served.module.window = window
            assert served.matches(torch.randn(2, 4))

    run([number, number + 1] for number in range(12))
    assert served.counts["captured"] == MOST_CHANGES, "with what it was at first"
    assert served.fallbacks == {"attribute window of layer (root) changes again and again": 12 - MOST_CHANGES}
    first = len(looks)
    run([number, number + 1] for number in range(16, 28))
    assert served.counts["captured"] == MOST_CHANGES and len(looks) - first <= 2 * MOST_CHANGES + 2
    for _ in range(2):
        run([[0, 9]] * 3)
    assert served.counts["captured"] == MOST_CHANGES + 1, "once it is what it was at the look before"
    before = served.counts["served"]
    run([[0, 9]] * 3)
    assert served.counts["served"] == before + 3


def test_code_that_never_stays_the_same_is_not_captured_for_ever(
    library: GraphLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served(library, Windowed())
    for number in range(MOST_IDENTITIES + 2):
        served.dispatcher.begin_run()
        monkeypatch.setattr(Windowed, "number", number, raising=False)
        assert served.matches(torch.randn(2, 4))
    assert served.counts["captured"] == MOST_IDENTITIES
    assert served.fallbacks == {"its code, layers or weights change again and again": 2}


class Noting(nn.Module):
    """As Cosmos Predict2 does it: each call leaves something on the module for nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.noted_for_nobody = y
        return y + 1


def test_what_each_eager_call_leaves_behind_is_no_reason_to_capture_again(library: GraphLibrary) -> None:
    served = Served(library, Noting())
    for _ in range(4):
        served.dispatcher.begin_run()
        for _ in range(2):
            served.module(torch.randn(2, 4))
            assert served.matches(torch.randn(2, 4))
    assert served.counts["captured"] == 1 and not served.fallbacks


def test_a_layer_that_is_swapped_in_the_middle_of_a_run_is_seen(library: GraphLibrary) -> None:
    served = Served(library)
    served.dispatcher.begin_run()
    x, timestep = inputs()
    assert served.matches(x, timestep)
    served.module.linear = nn.Linear(4, 4)
    assert served.matches(x, timestep)
    assert served.counts["captured"] == 1


def test_under_autocast_the_host_computes(library: GraphLibrary) -> None:
    served = Served(library)
    x, timestep = inputs()
    assert served.matches(x, timestep)
    with torch.autocast("cpu", torch.bfloat16):
        assert served(x, timestep).dtype == served.expected(x, timestep).dtype
    assert "autocast is on" in served.only_reason
    assert served.matches(x, timestep)


def test_whatever_goes_wrong_in_looking_for_a_graph_the_host_computes(
    library: GraphLibrary, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_layers: Any) -> None:
        raise ReferenceError("weakly-referenced object no longer exists")

    served = Served(library, refuse=broken)
    for _ in range(3):
        assert served.matches(*inputs())
    assert served.only_reason.startswith("looking for its graph failed (ReferenceError: weakly-referenced")
    assert len(warnings(caplog)) == 1


def test_a_stop_while_looking_for_a_graph_stops(library: GraphLibrary) -> None:
    class Stopped(Exception):
        pass

    def stop(_layers: Any) -> None:
        raise Stopped

    with pytest.raises(Stopped):
        Served(library, refuse=stop, interruption=Stopped)(*inputs())


# -- what failed once --------------------------------------------------------------------------


class Broken(EagerEngine):
    """A compiler with a fault of its own; counts how often it was asked."""

    asked = 0

    def compile(self, capture: Capture) -> CompiledGraph:
        type(self).asked += 1
        raise AssertionError("internal error")


def test_a_compiler_that_fails_is_asked_for_three_sizes_and_by_no_other_node(
    library: GraphLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(engines.ENGINES, "eager", Broken())
    monkeypatch.setattr(Broken, "asked", 0)
    module = Net()
    for _ in range(3):
        served = Served(library, module)
        for batch in (2, 3, 5, 7):
            assert served.matches(*inputs(batch))
        assert served.fallbacks.keys() == {"compiling failed (AssertionError: internal error)"}
    assert Broken.asked == 3, "for all sizes, and for two"
    assert library.metrics.snapshot()["captured"] <= 3


class CannotBeCaptured(Net):
    def forward(self, x: torch.Tensor, timestep: torch.Tensor, **options: Any) -> torch.Tensor:  # type: ignore[override]
        RUNS["CannotBeCaptured"] += 1
        return x * float(x.sum().item() > 0) + timestep[:, None]


def test_a_model_that_cannot_be_captured_is_not_tried_again_by_another_node(library: GraphLibrary) -> None:
    module = CannotBeCaptured()
    RUNS.clear()
    for _ in range(3):
        served = Served(library, module)
        for batch in (2, 3, 5, 7):
            assert served.matches(*inputs(batch))
    # Twice for each of 12 calls: eager, and what it is compared with. The rest were captures: of all sizes, and of two.
    assert RUNS["CannotBeCaptured"] - 2 * 12 <= 3


class OfTokens(nn.Module):
    """Takes an image of 4 channels, and a prompt of width 8."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.prompt = nn.Conv2d(4, 4, 1), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, context: torch.Tensor, **options: Any) -> torch.Tensor:
        return self.image(x) + self.prompt(context).mean(1)[:, :, None, None]


@pytest.mark.parametrize("wrong", ["another text encoder", "another VAE's latent"])
def test_calls_that_the_model_itself_cannot_compute_spoil_no_others(
    library: GraphLibrary, wrong: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A person connects the wrong node, twice, and mends it: every size is served by the one graph for all sizes."""
    module = OfTokens()
    served = Served(library, module)
    channels, width = (4, 12) if wrong == "another text encoder" else (16, 8)
    for tokens, side in ((5, 8), (7, 16)):
        with pytest.raises(RuntimeError):
            served(torch.randn(2, channels, side, side), torch.randn(2, tokens, width))
    for again in (served, Served(library, module), Served(library, OfTokens())):
        for tokens, side in ((5, 8), (6, 24), (7, 16)):
            assert again.matches(torch.randn(2, 4, side, side), torch.randn(2, tokens, 8))
    counts = library.metrics.snapshot()
    assert (counts["compiled"], counts["served"], sum(counts["fallbacks"].values())) == (1, 9, 2)
    assert {record.name.partition(".")[0] for record in caplog.records} == {"onediff_comfy"}, "tracebacks of a trace"


class CannotBeCapturedOfTokens(nn.Module):
    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        RUNS["CannotBeCapturedOfTokens"] += 1
        return (tokens * mask).sum(1) * float(tokens.sum().item() > 0)


def test_a_text_encoder_that_cannot_be_captured_is_not_tried_for_each_length(library: GraphLibrary) -> None:
    served = Served(library, CannotBeCapturedOfTokens())
    RUNS.clear()
    for length in range(5, 13):
        assert served.matches(torch.arange(1, length + 1)[None], torch.ones(1, length))
    assert RUNS["CannotBeCapturedOfTokens"] - 2 * 8 <= 3


def test_what_a_person_can_mend_is_tried_again(library: GraphLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_compiler(_engine: EagerEngine, _capture: Capture) -> CompiledGraph:
        raise EngineError("no compiler")

    module = Net()
    with monkeypatch.context() as broken:
        broken.setattr(EagerEngine, "compile", without_compiler)
        assert Served(library, module).matches(*inputs())
    again = Served(library, module)
    assert again.matches(*inputs())
    assert again.counts["served"] == 1
