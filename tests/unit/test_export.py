"""capture/tracing/: a capture computes what the module computes, for any weights, and holds none of them."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import inspect
import operator
import queue
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.nn.modules.module as module_hooks
from torch import nn

from onediff_comfy.capture import graph_text, shape_range
from onediff_comfy.capture.call import NotCovered
from onediff_comfy.capture.graph_text import target_text
from onediff_comfy.capture.option_probe import OptionRead
from onediff_comfy.capture.target.target import Target

OPTIONS = "transformer_options"


def tensor(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


class Block(nn.Module):
    """Convolution, normalisation, attention: what diffusion models are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, timestep: torch.Tensor, context: torch.Tensor | None = None) -> torch.Tensor:
        hidden = F.silu(self.norm(self.conv(x))) * timestep[:, None, None, None]
        tokens = hidden.flatten(2).transpose(1, 2)
        query, key, value = self.qkv(tokens).chunk(3, dim=-1)
        if context is not None:
            key = torch.cat([key, context], dim=1)
            value = torch.cat([value, context], dim=1)
        tokens = self.out(F.scaled_dot_product_attention(query, key, value))
        return tokens.transpose(1, 2).reshape(hidden.shape) + hidden


class Simple(nn.Module):
    """One linear layer and whatever ``body`` does with its output."""

    def __init__(self, body: Callable[[Simple, torch.Tensor], Any] = lambda self, x: x) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.body = body

    def forward(self, x: torch.Tensor, transformer_options: dict[str, Any] = {}) -> Any:  # noqa: B006
        hidden = self.linear(x)
        return self.with_options(hidden, transformer_options) if transformer_options else self.body(self, hidden)

    def with_options(self, hidden: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        if options.get("double"):
            hidden = hidden * 2
        if options.get("sigmas") is not None:
            hidden = hidden + options["sigmas"].sum()
        return hidden


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("kept", torch.rand(4))
        self.register_buffer("unsaved", torch.rand(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.kept + self.unsaved


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.relu(self.first(x)))


def autocast(self: Simple, hidden: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = self.linear(hidden)
    return hidden.float() * 3


def regions(self: Simple, hidden: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        hidden = hidden + 1
    with torch.enable_grad():
        hidden = hidden * 2
    with torch.inference_mode():
        return hidden - 3


def nested(self: Simple, hidden: torch.Tensor) -> Any:
    return {"output": [hidden, hidden + 1], "middle": (hidden * 2, {"deep": hidden - 1})}


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]] = {
    "block": (Block, lambda: (tensor(2, 4, 6, 6), tensor(2), tensor(2, 5, 8))),
    "half": (lambda: Block().half(), lambda: (tensor(1, 4, 4, 4).half(), tensor(1).half())),
    "dict and list output": (lambda: Simple(nested), lambda: (tensor(2, 4),)),
    "buffers": (Buffers, lambda: (tensor(2, 4),)),
    "tied": (Tied, lambda: (tensor(2, 4),)),
    "inline constant": (
        lambda: Simple(lambda self, x: x * torch.tensor([1.0, 2.0, 3.0, 4.0]) + torch.arange(4)),
        lambda: (tensor(2, 4),),
    ),
    "autocast region": (lambda: Simple(autocast), lambda: (tensor(2, 4),)),
    "grad regions": (lambda: Simple(regions), lambda: (tensor(2, 4),)),
    "in-place on an intermediate": (lambda: Simple(lambda self, x: x.add_(1).mul_(2)), lambda: (tensor(2, 4),)),
    "output twice": (lambda: Simple(lambda self, x: [x, x]), lambda: (tensor(2, 4),)),
    "None and numbers in the output": (lambda: Simple(lambda self, x: (x, None, 3)), lambda: (tensor(2, 4),)),
}


def other_weights(module: nn.Module) -> nn.Module:
    """Another checkpoint of the same architecture, as a loader or a LoRA would put it in place."""
    other = copy.deepcopy(module)
    for owner in other.modules():
        for holder in (owner._parameters, owner._buffers):
            for value in holder.values():
                if value is not None:
                    value.data.copy_(torch.randn_like(value.float()) * 0.3)
    return other


def assert_same(actual: Any, expected: Any) -> None:
    if expected is None or isinstance(expected, int):
        assert actual == expected
    elif isinstance(expected, torch.Tensor):
        tolerance = 2e-2 if expected.dtype in (torch.float16, torch.bfloat16) else 1e-6
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    elif isinstance(expected, dict):
        assert list(actual) == list(expected)
        for key, value in expected.items():
            assert_same(actual[key], value)
    else:
        assert type(actual) is type(expected)
        assert len(actual) == len(expected)
        for left, right in zip(actual, expected, strict=True):
            assert_same(left, right)


@pytest.fixture(scope="module")
def captured(capture_of: Any) -> Callable[[str], Any]:
    """The capture of one of ``MODULES``, made once."""
    return functools.cache(lambda name: capture_of(MODULES[name][0](), *MODULES[name][1]()))


@pytest.mark.parametrize("name", MODULES)
def test_a_capture_computes_what_the_module_computes_for_other_weights_and_inputs(
    name: str, captured: Callable[[str], Any]
) -> None:
    make, inputs = MODULES[name]
    other, given = other_weights(make()), inputs()
    names = inspect.signature(other.forward).parameters
    by_name = [tensor for _, tensor in sorted(zip(names, given, strict=False))]
    with torch.no_grad():
        assert_same(captured(name).run(*by_name, target=Target(other)), other(*given))


@pytest.mark.parametrize("name", MODULES)
def test_no_weight_value_is_in_a_capture(name: str, captured: Callable[[str], Any], capture_of: Any) -> None:
    """The same digest for other weights; no constant that could be one; no tensor kept on the graph."""
    make, inputs = MODULES[name]
    first, second = captured(name), capture_of(other_weights(make()), *inputs())
    assert first.digest == second.digest
    assert first.capture.binding.inputs == second.capture.binding.inputs
    assert bool(first.capture.binding.constants) == (name == "inline constant")
    graph = first.capture.graph
    assert not list(graph.parameters())
    assert not list(graph.buffers())
    assert not [value for value in vars(graph).values() if isinstance(value, torch.Tensor)]


def test_every_weight_is_an_input_by_its_own_name(capture_of: Any) -> None:
    assert set(capture_of(Buffers(), tensor(2, 4)).capture.binding.weight_names) == {
        "linear.weight",
        "linear.bias",
        "kept",
        "unsaved",
    }


def test_untying_two_weights_is_noticed(capture_of: Any) -> None:
    """A LoRA on one of them unties them: the capture stands for the tied module only."""
    module = Tied()
    captured = capture_of(module, tensor(2, 4))
    assert captured.target.is_current()
    module.second.weight = nn.Parameter(torch.randn(4, 4))
    assert not captured.target.is_current()


# -- digest ------------------------------------------------------------------------------------


def scaled(factor: float) -> Callable[[Simple, torch.Tensor], torch.Tensor]:
    return lambda self, x: x * factor


def shifted(*values: float) -> Callable[[Simple, torch.Tensor], torch.Tensor]:
    return lambda self, x: x + torch.tensor(values)


def autocast_scaled(factor: float) -> Callable[[Simple, torch.Tensor], torch.Tensor]:
    def body(self: Simple, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.linear(x) * factor

    return body


def digest_of(capture_of: Any, body: Any = None, x: torch.Tensor | None = None) -> str:
    given = tensor(2, 4) if x is None else x
    return capture_of(Simple(body or (lambda self, x: x)).to(given.dtype), given).digest


def test_every_change_of_what_is_computed_changes_the_digest(capture_of: Any) -> None:
    digests = [
        digest_of(capture_of),
        digest_of(capture_of, scaled(2.0)),
        digest_of(capture_of, scaled(2)),
        digest_of(capture_of, scaled(2.0000000000000004)),
        digest_of(capture_of, lambda self, x: x / 2.0),
        digest_of(capture_of, lambda self, x: x + 2.0),
        digest_of(capture_of, shifted(1.0, 2.0, 3.0, 4.0)),
        digest_of(capture_of, shifted(1.0, 2.0, 3.0, 5.0)),
        digest_of(capture_of, shifted(1.0)),
        digest_of(capture_of, autocast_scaled(2.0)),
        digest_of(capture_of, autocast_scaled(3.0)),
        digest_of(capture_of, lambda self, x: F.gelu(x)),
        digest_of(capture_of, lambda self, x: F.gelu(x, approximate="tanh")),
        digest_of(capture_of, lambda self, x: x.sum(0)),
        digest_of(capture_of, lambda self, x: x.sum(1)),
        digest_of(capture_of, lambda self, x: [x]),
        digest_of(capture_of, lambda self, x: (x,)),
        digest_of(capture_of, lambda self, x: {"a": x}),
        digest_of(capture_of, lambda self, x: {"b": x}),
        digest_of(capture_of, lambda self, x: (x, x)),
        digest_of(capture_of, lambda self, x: (x, None)),
        digest_of(capture_of, lambda self, x: (x + 1, x)),
        digest_of(capture_of, lambda self, x: (x, x + 1)),
        digest_of(capture_of, x=tensor(3, 4)),
        digest_of(capture_of, x=tensor(2, 1, 4)),
        digest_of(capture_of, x=tensor(2, 4).to(torch.float64)),
        digest_of(capture_of, x=tensor(2, 4).to(torch.bfloat16)),
    ]
    assert len(set(digests)) == len(digests)


def test_the_layout_of_a_weight_changes_the_digest(capture_of: Any) -> None:
    """Compiled code assumes strides."""
    module = nn.Conv2d(4, 4, 3)
    plain = capture_of(module, tensor(1, 4, 5, 5)).digest
    assert capture_of(module.to(memory_format=torch.channels_last), tensor(1, 4, 5, 5)).digest != plain


def test_which_weight_feeds_which_operator_changes_the_digest(capture_of: Any) -> None:
    class Two(nn.Module):
        def __init__(self, swap: bool) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
            self.swap = swap

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.b) + self.a if self.swap else (x * self.a) + self.b

    assert capture_of(Two(True), tensor(4)).digest != capture_of(Two(False), tensor(4)).digest


def test_the_names_of_weights_change_the_digest(capture_of: Any) -> None:
    """A compiled graph asks for its weights by name."""

    class Named(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.register_parameter(name, nn.Parameter(torch.zeros(4)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            (weight,) = self.parameters()
            return x * weight

    assert capture_of(Named("a"), tensor(4)).digest != capture_of(Named("b"), tensor(4)).digest


def test_the_class_does_not_change_the_digest(capture_of: Any) -> None:
    """The graph key is about what is computed: another class with the same forward shares the graph."""

    class Other(Simple):
        pass

    assert capture_of(Other(), tensor(2, 4)).digest == digest_of(capture_of)


def test_the_digest_is_the_same_in_every_process(identities: list[dict[str, Any]]) -> None:
    assert identities[0]["capture"] == identities[1]["capture"]


def test_how_conditions_on_sizes_are_written_is_no_part_of_the_digest(
    capture_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sympy writes those of Cosmos Predict2 otherwise in each process; the computation is the same."""

    class ByHeight(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.shape[2] > x.shape[3] else x * 3

    net, x = ByHeight(), tensor(1, 4, 64, 96)
    written = capture_of(net, x, general=True).capture
    as_written = written.shapes.conditions
    conditions = shape_range._Symbols.conditions
    monkeypatch.setattr(shape_range._Symbols, "conditions", lambda found: [f"0 < {c}" for c in conditions(found)])
    otherwise = capture_of(net, x, general=True).capture
    assert as_written != otherwise.shapes.conditions
    assert written.digest == otherwise.digest


def test_a_graph_that_calls_python_functions_has_the_same_digest_in_every_process(
    identities: list[dict[str, Any]],
) -> None:
    """``torch.sym_max``: half of the model families have it in their graphs."""
    assert identities[0]["general"] == identities[1]["general"]


def test_what_a_node_calls_is_named_as_before_unless_that_is_an_address() -> None:
    texts = map(target_text, (torch.ops.aten.add.Tensor, operator.getitem, "method", torch.sym_max))
    assert list(texts) == ["aten.add.Tensor", "<built-in function getitem>", "method", "torch.sym_max"]


@pytest.mark.parametrize("draw", [random.random, lambda: float(np.random.rand())])
def test_random_numbers_of_python_are_refused(capture_of: Callable[..., Any], draw: Callable[[], float]) -> None:
    """They would be constants of the graph: the same in every image."""

    class Noisy(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * draw()

    with pytest.raises(NotCovered, match="draws random numbers"):
        capture_of(Noisy(2, 2), tensor(1, 2))


def test_a_text_that_holds_an_address_is_no_identity(
    capture_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_text, "target_text", lambda _target: str(tensor))
    with pytest.raises(NotCovered, match="by its address in memory") as refused:
        capture_of(nn.Linear(2, 2), tensor(1, 2))
    assert "0x" not in str(refused.value)


# -- options -----------------------------------------------------------------------------------


def test_reading_a_probed_option_names_it(capture_of: Any) -> None:
    with pytest.raises(OptionRead) as read:
        capture_of(Simple(), tensor(2, 4), {"unused": object(), "double": True})
    assert read.value.name == "double"


def test_an_option_that_is_none_is_not_probed(capture_of: Any) -> None:
    capture_of(Simple(), tensor(2, 4), {"double": None, "unused": object()})


def test_a_revealed_option_is_computed_with(capture_of: Any) -> None:
    x = tensor(2, 4)
    digests = set()
    for double in (True, False):
        module = Simple()
        captured = capture_of(module, x, {"double": double, "unused": object()}, read=("double",))
        with torch.no_grad():
            assert_same(captured.run(), module(x, {"double": double}))
        digests.add(captured.digest)
    assert len(digests) == 2


def test_a_tensor_in_an_option_is_an_input_like_any_other(capture_of: Any) -> None:
    """Its values may differ on every call, as sigmas do."""
    module, x = Simple(), tensor(2, 4)
    captured = capture_of(module, x, {"sigmas": tensor(3), "unused": 1}, read=("sigmas", "double"))
    sigmas = tensor(3)
    with torch.no_grad():
        assert_same(captured.run(sigmas, x), module(x, {"sigmas": sigmas}))


def test_overrides_are_seen_by_the_trace_alone(capture_of: Any) -> None:
    module, x = Simple(), tensor(2, 4)
    options = {"other": 1}
    captured = capture_of(module, x, options, overrides={"double": True})
    with torch.no_grad():
        assert_same(captured.run(), module(x) * 2)
    assert options == {"other": 1}


def test_an_override_never_replaces_what_the_call_brings(capture_of: Any) -> None:
    """Somebody put it there to change the picture; replaced in the export, it would be lost in silence."""
    module, x = Simple(), tensor(2, 4)
    with pytest.raises(OptionRead, match="double"):
        capture_of(module, x, {"double": object()}, overrides={"double": True})
    captured = capture_of(module, x, {"double": False}, read=("double",), overrides={"double": True})
    with torch.no_grad():
        assert_same(captured.run(), module(x))


# -- not covered -------------------------------------------------------------------------------

UNCOVERED: dict[str, tuple[Callable[[Simple, torch.Tensor], Any], str]] = {
    "data-dependent control flow": (lambda self, x: x if x.sum() > 0 else -x, "cannot be captured"),
    "an item": (lambda self, x: x * int(x.sum().item()), "cannot be captured"),
    "an exception": (lambda self, x: x.view(3), "cannot be captured"),
    "numpy": (lambda self, x: torch.from_numpy(x.numpy()), "cannot be captured"),
    "an output no graph gives": (lambda self, x: object(), "cannot be captured"),
}


@pytest.mark.parametrize("name", UNCOVERED)
def test_what_cannot_be_captured_says_so(name: str, capture_of: Any) -> None:
    body, message = UNCOVERED[name]
    with pytest.raises(NotCovered, match=message) as refusal:
        capture_of(Simple(body), tensor(2, 4))
    assert "\n" not in refusal.value.reason


def test_random_numbers_are_not_covered_and_dropout_that_is_off_is(capture_of: Any) -> None:
    with pytest.raises(NotCovered, match=r"random numbers \(aten.randn_like"):
        capture_of(Simple(lambda _self, x: x + torch.randn_like(x)), tensor(2, 4))
    module = Simple(lambda _self, x: torch.nn.functional.dropout(x, 0.5, training=False)).eval()
    x = tensor(2, 4)
    assert_same(capture_of(module, x).run(x), module(x))


def test_a_forward_that_writes_to_its_input_is_not_covered(capture_of: Any) -> None:
    class Writes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.add_(1) * 2

    with pytest.raises(NotCovered, match="writes to its inputs"):
        capture_of(Writes(), tensor(2, 4))


def test_a_forward_that_writes_to_its_buffer_is_not_covered(capture_of: Any) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x * self.calls

    module = Counts()
    with pytest.raises(NotCovered, match="writes to its inputs"):
        capture_of(module, tensor(2, 4))
    assert module.calls.item() == 0


def test_a_weight_outside_the_module_tree_is_not_baked_in() -> None:
    class Hides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.hidden = [nn.Linear(4, 4)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.hidden[0](self.linear(x))

    assert "outside of its module tree" in str(Target(Hides()).refusal)


# -- what a capture leaves behind --------------------------------------------------------------


class Interrupted(BaseException):
    """As the host's: no Exception."""


def state_of(module: nn.Module) -> dict[str, Any]:
    """What hangs on a module: the identity of each object, the value of plain data."""
    state: dict[str, Any] = {}
    for path, owner in module.named_modules():
        for name, value in vars(owner).items():
            state[f"{path}.{name}"] = (
                {key: id(child) for key, child in value.items()}
                if name in ("_parameters", "_buffers", "_modules")
                else (value if isinstance(value, (bool, int, float, str, list, tuple, dict)) else id(value))
            )
    return state


@pytest.mark.parametrize("after", [1, 5, 20])
def test_an_interruption_comes_out_and_leaves_the_module_as_it_was(after: int, capture_of: Any) -> None:
    module = Block()
    before = state_of(module)
    calls = 0

    def check() -> None:
        nonlocal calls
        calls += 1
        if calls >= after:
            raise Interrupted

    with pytest.raises(Interrupted):
        capture_of(module, tensor(2, 4, 6, 6), tensor(2), check=check)
    assert calls == after
    assert state_of(module) == before
    capture_of(module, tensor(2, 4, 6, 6), tensor(2))


@pytest.mark.parametrize("body", [lambda self, x: x, lambda self, x: x.view(3)], ids=["captured", "not covered"])
def test_a_capture_leaves_the_module_and_the_options_as_they_were(body: Any, capture_of: Any) -> None:
    module = Simple(body).eval()
    options: dict[str, Any] = {}
    before, values = state_of(module), {name: value.clone() for name, value in module.state_dict().items()}
    with contextlib.suppress(NotCovered):
        capture_of(module, tensor(2, 4), options)
    assert state_of(module) == before
    assert not options
    assert all(torch.equal(value, values[name]) for name, value in module.state_dict().items())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in module.parameters())


class Doing(nn.Module):
    """Gives what it is given, and does something meanwhile."""

    def __init__(self, what: Callable[[], Any]) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.what()
        return x


def test_a_thread_that_runs_modules_meanwhile_is_no_part_of_a_capture(capture_of: Any) -> None:
    """ComfyUI runs a model split over two GPUs in a thread for each. Either is within layers when the other's end."""
    given = tensor(2, 4)
    within, go_on = threading.Event(), threading.Event()
    ran: list[Any] = []

    def run() -> None:
        running = Simple(lambda self, hidden: self.within(hidden))
        running.within = Doing(lambda: (within.set(), go_on.wait(10)))
        with torch.no_grad():
            ran.append((running(given), running.linear, F.linear(given, running.linear.weight, running.linear.bias)))

    thread = threading.Thread(target=run)

    def begin() -> None:
        thread.start()
        assert within.wait(10)

    def end() -> None:
        go_on.set()
        thread.join(10)

    def body(self: Simple, hidden: torch.Tensor) -> torch.Tensor:
        return self.linear(self.ending(self.beginning(hidden))) * 2

    module = Simple(body)
    module.beginning, module.ending = Doing(begin), Doing(end)
    module.same = module.linear  # where a layer has two names torch.export follows every attribute of every module
    capture = capture_of(module, given)
    ((output, layer, expected),) = ran
    assert_same(output, expected)
    assert type(layer) is nn.Linear
    module.beginning = module.ending = Doing(lambda: None)
    assert capture.digest == capture_of(module, given).digest


def test_the_options_dict_is_not_written_to_though_the_forward_does(capture_of: Any) -> None:
    class Notes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, transformer_options: dict[str, Any]) -> torch.Tensor:
            transformer_options["block"] = 3
            transformer_options.pop("old")
            return self.linear(x)

    marker = object()
    options = {"old": marker}
    capture_of(Notes(), tensor(2, 4), options)
    assert options == {"old": marker}


def test_a_capture_leaves_each_layers_training_mode_alone_where_all_agree(capture_of: Any) -> None:
    for mode in (True, False):
        module = Buffers().train(mode)
        capture_of(module, tensor(2, 4))
        assert all(layer.training is mode for layer in module.modules())


def test_a_capture_leaves_each_layers_training_mode_alone(capture_of: Any) -> None:
    module = Block().train()
    module.norm.eval()
    capture_of(module, tensor(2, 4, 6, 6), tensor(2))
    assert not module.norm.training


def test_works_under_inference_mode_with_weights_made_there(capture_of: Any) -> None:
    """The host loads and samples under inference_mode."""
    with torch.inference_mode():
        module, x, timestep = Block().requires_grad_(False), tensor(2, 4, 6, 6), tensor(2)
        assert module.conv.weight.is_inference()
        before = state_of(module)
        captured = capture_of(module, x, timestep)
        assert_same(captured.run(timestep, x), module(x, timestep))
        assert torch.is_inference_mode_enabled()
    assert state_of(module) == before


def test_weights_made_under_inference_mode_may_ask_for_gradients(capture_of: Any) -> None:
    """Those of older hosts do, though they cannot have any; they go on asking."""
    with torch.inference_mode():
        module, x = Simple(), tensor(2, 4)
        module.linear.bias.requires_grad_(False)
        before = state_of(module)
        captured = capture_of(module, x)
        assert_same(captured.run(x), module(x))
        assert [weight.requires_grad for weight in module.parameters()] == [True, False]
    assert state_of(module) == before


def test_a_failed_capture_leaves_weights_asking_for_gradients(capture_of: Any) -> None:
    with torch.inference_mode():
        module = Simple(lambda _self, x: x * float(x.sum()))
        with pytest.raises(NotCovered):
            capture_of(module, tensor(2, 4))
        assert all(weight.requires_grad for weight in module.parameters())


def test_a_forward_that_raises_is_held_by_nothing_afterwards(capture_of: Any) -> None:
    """PyTorch 2.11 left a hook for all modules' buffers, which held the model."""
    module = Simple()
    hooks, held = dict(module_hooks._global_buffer_registration_hooks), weakref.ref(module)
    with pytest.raises(OptionRead):
        capture_of(module, tensor(2, 4), transformer_options={"double": True})
    assert dict(module_hooks._global_buffer_registration_hooks) == hooks
    module.register_buffer("later", tensor(2))
    del module
    gc.collect()
    assert held() is None


def test_a_hook_that_another_thread_registers_meanwhile_stays(capture_of: Any) -> None:
    registered = queue.SimpleQueue[Any]()  # a list would be put back

    def body(_: Simple, x: torch.Tensor) -> torch.Tensor:
        registered.put(module_hooks.register_module_buffer_registration_hook(lambda *_: None))
        return x

    capture_of(Simple(body), tensor(2, 4))
    handles = [registered.get_nowait() for _ in range(registered.qsize())]
    try:
        assert handles and all(handle.id in module_hooks._global_buffer_registration_hooks for handle in handles)
    finally:
        for handle in handles:
            handle.remove()


def test_a_capture_leaves_the_modules_own_containers_in_place(capture_of: Any) -> None:
    """Somebody else may hold the same list, and write to it."""
    module, shared = Simple(), {"a": [1]}
    module.shared = shared
    capture_of(module, tensor(2, 4))
    assert module.shared is shared


def test_grad_mode_is_as_it_was_after_a_capture(capture_of: Any) -> None:
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            capture_of(Simple(), tensor(2, 4))
            assert torch.is_grad_enabled() is enabled


def test_examples_are_one_fake_tensor_per_input(capture_of: Any) -> None:
    captured = capture_of(Buffers(), tensor(2, 4))
    examples = captured.capture.examples()
    assert len(examples) == len(captured.capture.binding.inputs)
    assert all(isinstance(example, torch._subclasses.FakeTensor) for example in examples)
