"""capture/target/target.py: the fingerprint is everything but weight values; weights are what is in place now."""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import importlib
import logging
import pickle
import random
import re
import sys
import threading
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from settled import is_settled
from torch import nn

from onediff_comfy.capture.call import NotCovered
from onediff_comfy.capture.fingerprint.code_ownership import HostCode
from onediff_comfy.capture.target.target import Target

CPU = torch.device("cpu")


class Kind(enum.Enum):
    FIRST = 1
    SECOND = 2


@dataclasses.dataclass
class Config:
    width: int = 4
    depths: tuple[int, ...] = (1, 2)


class Settings:
    """A plain object, with a default repr."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale


class Net(nn.Module):
    def __init__(self, channels: int = 4, kernel: int = 3, bias: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, channels, kernel, bias=bias)
        self.norm = nn.GroupNorm(2, channels)
        self.register_buffer("table", torch.zeros(channels))
        self.heads = 2
        self.scale = 0.5
        self.name: str | None = "net"
        self.flag = True
        self.kind = Kind.FIRST
        self.config = Config()
        self.settings = Settings()
        self.levels = [1, 2, 4]
        self.options = {"a": 1, "b": [1.0, None]}
        self.names = frozenset({"x", "y"})
        self.working_dtype = torch.float32
        self.where = torch.device("cpu")
        self.block_type: type = nn.Linear
        self.sigmas = torch.arange(3.0)
        self.activation: Callable[..., Any] = lambda x: x * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x))


def fingerprint(change: Callable[[Net], Any] = lambda net: None, **arguments: Any) -> str:
    net = Net(**arguments)
    change(net)
    return Target(net).fingerprint


def setting(name: str, value: Any) -> Callable[[Net], None]:
    def change(net: Net) -> None:
        *path, last = name.split(".")
        setattr(functools.reduce(getattr, path, net), last, value)

    return change


# -- fingerprint -------------------------------------------------------------------------------


def test_two_checkpoints_of_one_architecture_share_the_fingerprint() -> None:
    torch.manual_seed(0)
    first, second = Net(), Net()
    assert not torch.equal(first.conv.weight, second.conv.weight)
    assert Target(first).fingerprint == Target(second).fingerprint


def test_weight_values_never_count_however_they_got_there() -> None:
    def edit_in_place(net: Net) -> None:
        with torch.no_grad():
            net.conv.weight.mul_(2)
            net.table.add_(1)

    assert fingerprint(edit_in_place) == fingerprint()
    assert fingerprint(lambda net: net.requires_grad_(False)) == fingerprint()
    assert Target(copy.deepcopy(Net())).fingerprint == fingerprint()


def test_what_torch_compile_leaves_on_a_model_never_counts() -> None:
    """A workflow with ComfyUI's TorchCompileModel may have run before, on the same model."""
    net = Net()
    target = Target(net)
    assert is_settled(target)
    torch.compile(net, backend="eager")(torch.rand(1, 3, 8, 8))
    torch._dynamo.mark_static_address(net.sigmas)  # as it does where a forward reads a tensor that is no weight
    net._is_torch_compile = True  # PyTorch 2.11 has not set it
    assert vars(net.conv.weight) and vars(net.sigmas)
    again = Target(net)
    assert (again.refusal, again.fingerprint) == (None, target.fingerprint)
    assert target.is_current()


CHANGES: dict[str, Callable[[Net], Any]] = {
    "int attribute": setting("heads", 3),
    "int to bool": setting("heads", True),
    "int to float": setting("heads", 2.0),
    "float attribute": setting("scale", 0.5000000000000001),
    "str attribute": setting("name", "other"),
    "None attribute": setting("name", None),
    "bool attribute": setting("flag", False),
    "enum attribute": setting("kind", Kind.SECOND),
    "dtype attribute": setting("working_dtype", torch.float16),
    "device attribute": setting("where", torch.device("cuda")),
    "class attribute": setting("block_type", nn.Conv2d),
    "new attribute": setting("extra", 1),
    "list attribute": setting("levels", [1, 2, 3]),
    "list order": setting("levels", [2, 1, 4]),
    "dict value": setting("options", {"a": 2, "b": [1.0, None]}),
    "dict key": setting("options", {"c": 1, "b": [1.0, None]}),
    "deep in a dict": setting("options", {"a": 1, "b": [1.0, 0]}),
    "set attribute": setting("names", frozenset({"x", "z"})),
    "dataclass field": setting("config.width", 5),
    "tuple in a dataclass": setting("config.depths", (1, 3)),
    "object attribute": setting("settings.scale", 2.0),
    "tensor attribute's value": setting("sigmas", torch.tensor([0.0, 1.0, 3.0])),
    "tensor attribute's dtype": setting("sigmas", torch.zeros(3, dtype=torch.int32)),
    "tensor attribute's shape": setting("sigmas", torch.arange(3.0)[None]),
    "lambda's constant": setting("activation", lambda x: x * 3),
    "lambda's operator": setting("activation", lambda x: x + 2),
    "another function": setting("activation", nn.functional.silu),
    "attribute of a submodule": setting("norm.eps", 1e-6),
    "class of a submodule": setting("norm", nn.LayerNorm(4)),
    "eval": lambda net: net.eval(),
    "eval of a submodule": lambda net: net.norm.eval(),
    "dtype of all weights": lambda net: net.half(),
    "dtype of one weight": lambda net: net.norm.to(torch.float64),
    "dtype of a buffer": setting("table", torch.zeros(4, dtype=torch.float16)),
    "shape of a buffer": setting("table", torch.zeros(5)),
    "memory format of a conv weight": lambda net: net.conv.to(memory_format=torch.channels_last),
    "new weight": lambda net: net.register_parameter("more", nn.Parameter(torch.zeros(1))),
    "new buffer": lambda net: net.register_buffer("more", torch.zeros(1)),
    "weight gone": lambda net: net.conv.register_parameter("bias", None),
    "new submodule": lambda net: net.add_module("more", nn.Identity()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_can_change_the_computation_changes_the_fingerprint(change: str) -> None:
    assert fingerprint(CHANGES[change]) != fingerprint()


def test_every_two_changes_differ_from_each_other() -> None:
    prints = {name: fingerprint(change) for name, change in CHANGES.items()}
    assert len(set(prints.values())) == len(prints)


def test_shapes_count() -> None:
    assert len({fingerprint(), fingerprint(channels=8), fingerprint(kernel=1), fingerprint(bias=False)}) == 4


def test_the_name_of_a_weight_counts() -> None:
    def named(name: str) -> str:
        module = nn.Module()
        module.register_parameter(name, nn.Parameter(torch.zeros(1)))
        return Target(module).fingerprint

    assert named("a") != named("b")


def test_the_class_counts_though_everything_in_it_is_the_same() -> None:
    class Other(Net):
        pass

    assert Target(Other()).fingerprint != fingerprint()


def test_the_same_in_every_process(identities: list[dict[str, Any]]) -> None:
    """Two fresh processes with different hash seeds; sets, default reprs and lambdas among the attributes."""
    assert identities[0]["fingerprint"] == identities[1]["fingerprint"]


def test_a_set_in_a_functions_code_is_the_same_in_every_process(identities: list[dict[str, Any]]) -> None:
    assert identities[0]["set_in_code"] == identities[1]["set_in_code"]


def multiplied(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x * factor


def defaulted(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def function(x: torch.Tensor, by: float = factor) -> torch.Tensor:
        return x * by

    return function


class Attributed(dict[str, Any]):
    scale: float


def attributed(scale: float) -> Attributed:
    made = Attributed()
    made.scale = scale
    return made


class Slotted:
    __slots__ = ("scale",)

    def __init__(self, scale: float) -> None:
        self.scale = scale


DIFFERENT: dict[str, tuple[Any, Any]] = {
    "built-in functions": (torch.sin, torch.cos),
    "partials": (
        functools.partial(nn.functional.gelu, approximate="tanh"),
        functools.partial(nn.functional.gelu, approximate="none"),
    ),
    "closures": (multiplied(2.0), multiplied(3.0)),
    "defaults": (defaulted(2.0), defaulted(3.0)),
    "bound methods": (
        types.MethodType(lambda self, x: x * 2, object()),
        types.MethodType(lambda self, x: x * 3, object()),
    ),
    "nesting": ([1, [2, 3]], [[1, 2], 3]),
    "empty containers": ([], {}),
    "complex": (1j, 2j),
    "ranges": (range(2), range(3)),
    "slots": (Slotted(1.0), Slotted(2.0)),
    "deeper than six": ([[[[[[[[1]]]]]]]], [[[[[[[[2]]]]]]]]),
    "slices of lists": (slice([1]), slice([2])),
    "arrays": (np.ones(2), np.zeros(2)),
    "numbers of numpy's": (np.float32(1), np.float32(2)),
    "attributes of dicts": (attributed(1.0), attributed(2.0)),
    "attributes of functions": (attributed(1.0).get, attributed(2.0).get),
    "methods of lists": ([1].count, [2].count),
    "large tables": (dict.fromkeys(range(99), 1), {n: 1 + (n == 50) for n in range(99)}),
    "large tables' order": ([*range(99)], [1, 0, *range(2, 99)]),
    "deep structure": ([[[[[[[1, 2]]]]]]], [[[[[[[3]]]]]]]),
}


@pytest.mark.parametrize("difference", DIFFERENT)
def test_attributes_that_compute_different_things_are_told_apart(difference: str) -> None:
    one, other = DIFFERENT[difference]
    assert fingerprint(setting("activation", one)) != fingerprint(setting("activation", other))


def test_what_cannot_be_described_is_refused() -> None:
    """Left out of the fingerprint, it would let two different models pass for one."""
    for value, said in (([nn.Linear(1, 1)], "layer outside of its module tree"), (torch.Generator(), "Generator")):
        target = Target(_changed(value))
        assert target.refusal is not None and said in target.refusal


def test_a_layer_without_weights_outside_of_the_tree_is_part_of_what_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """ACE-Step's activation lies in a plain object."""
    held = [Settings(), nn.LeakyReLU(0.1)]
    target = Target(_changed(held))
    assert target.refusal is None
    held[1].negative_slope = 0.2  # type: ignore[union-attr]
    changed = Target(_changed(held))
    monkeypatch.setattr(nn.LeakyReLU, "forward", lambda self, x: x)
    replaced = Target(_changed(held))
    assert changed.refusal is replaced.refusal is None
    assert len({target.fingerprint, changed.fingerprint, replaced.fingerprint}) == 3


def test_a_lock_and_a_logger_are_no_part_of_what_is_computed() -> None:
    prints = {Target(_changed([threading.Lock(), logging.getLogger(name)])).fingerprint for name in "ab"}
    assert len(prints) == 1 and "" not in prints


def test_what_hides_state_is_refused_though_it_has_attributes_too() -> None:
    class Counted(random.Random):
        pass

    for value in (Counted(1), threading.local()):
        value.scale = 1.0  # type: ignore[union-attr]
        assert Target(_changed(value)).refusal is not None


def _changed(value: Any) -> Net:
    net = Net()
    net.activation = value
    return net


def test_a_replaced_method_or_function_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other extensions replace functions of the host while it runs."""
    net = Net()
    target = Target(net)
    monkeypatch.setattr(Net, "forward", lambda self, x: x)
    assert not target.is_current()
    monkeypatch.undo()
    assert target.is_current()


def test_tied_weights_count() -> None:
    tied, untied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    assert Target(tied).fingerprint != Target(untied).fingerprint


# -- weights -----------------------------------------------------------------------------------

NAMES = ("conv.weight", "norm.bias", "table")


def test_specs_and_layers_name_everything() -> None:
    net = Net()
    target = Target(net)
    assert set(target.specs) == {"conv.weight", "conv.bias", "norm.weight", "norm.bias", "table"}
    assert target.layers == (net, net.conv, net.norm)


def test_weights_come_in_the_order_asked_for() -> None:
    net = Net()
    given = Target(net).weights(NAMES, CPU)
    assert [id(weight) for weight in given] == [id(net.conv.weight), id(net.norm.bias), id(net.table)]


def test_weights_are_those_in_place_now() -> None:
    """A LoRA replaces parameters, another edits in place, a reload assigns a state dict."""
    net = Net()
    target = Target(net)
    replaced = nn.Parameter(torch.rand_like(net.conv.weight))
    net.conv.weight = replaced
    net.table = torch.ones(4)
    with torch.no_grad():
        net.norm.bias.fill_(7)
    weight, bias, table = target.weights(NAMES, CPU)
    assert weight is replaced
    assert bias.unique().tolist() == [7]
    assert table is net.table
    loaded = {name: torch.full_like(value, 3) for name, value in net.state_dict().items()}
    net.load_state_dict(loaded, assign=True)
    assert all(weight.unique().tolist() == [3] for weight in target.weights(NAMES, CPU))


class QuantisedParameter(nn.Parameter):
    pass


UNFIT: dict[str, tuple[Callable[[Net], Any], str]] = {
    "dtype": (lambda net: net.conv.half(), "shape or dtype"),
    "shape": (setting("conv.weight", nn.Parameter(torch.zeros(4, 3, 1, 1))), "shape or dtype"),
    "device": (lambda net: net.conv.to("meta"), "not resident on cpu"),
    "buffer on another device": (setting("table", torch.zeros(4, device="meta")), "not resident on cpu"),
    "set to None": (setting("conv.weight", None), "replaced"),
    "removed": (lambda net: delattr(net.conv, "weight"), "removed"),
    "subclass": (setting("conv.weight", QuantisedParameter(torch.zeros(4, 3, 3, 3))), "of a tests checkpoint"),
    "tensor subclass in a buffer": (
        setting("table", torch.zeros(4).as_subclass(type("Fancy", (torch.Tensor,), {}))),
        "of a tests checkpoint",
    ),
}


@pytest.mark.parametrize("taken_before", [False, True])
@pytest.mark.parametrize("unfit", UNFIT)
def test_weights_that_a_graph_cannot_take_are_refused(unfit: str, taken_before: bool) -> None:
    change, message = UNFIT[unfit]
    net = Net()
    target = Target(net)
    if taken_before:
        target.weights(NAMES, CPU)
    change(net)
    with pytest.raises(NotCovered, match=message):
        target.weights(NAMES, CPU)


def test_weights_of_one_device_are_not_those_of_another() -> None:
    net = Net()
    target = Target(net)
    target.weights(NAMES, CPU)
    with pytest.raises(NotCovered, match="not resident on meta"):
        target.weights(NAMES, torch.device("meta"))


def test_in_another_run_weights_are_looked_at_again_wherever_they_are() -> None:
    """What is made anew may lie where something else did."""
    net = Net()
    target = Target(net)
    target.weights(NAMES, CPU)
    net.conv.weight.data = net.conv.weight.data.as_strided((2, 3, 3, 3), (27, 9, 3, 1))
    target.forget_addresses()
    with pytest.raises(NotCovered, match="shape or dtype"):
        target.weights(NAMES, CPU)


def test_where_weights_move_another_object_in_the_place_of_one_is_looked_at() -> None:
    """Blocks of a model that does not fit take turns, and their weights lie where others' did."""
    net = Net()
    target, own = Target(net), net.conv.weight
    target.placed_weights(NAMES, CPU, moving=True)
    net.conv.weight = torch.nn.Parameter(own.data.as_strided((2, 3, 3, 3), (27, 9, 3, 1)))
    with pytest.raises(NotCovered, match="shape or dtype"):
        target.placed_weights(NAMES, CPU, moving=True)
    net.conv.weight = own
    assert target.placed_weights(NAMES, CPU, moving=True).tensors[0] is own


def test_a_weight_that_was_not_asked_for_may_be_anywhere() -> None:
    net = Net()
    target = Target(net)
    net.conv.to("meta")
    assert len(target.weights(("norm.bias",), CPU)) == 1


# -- is_current and refusal --------------------------------------------------------------------


def hook(*_args: Any) -> None: ...


NOTICED: dict[str, Callable[[Net], Any]] = {
    "submodule replaced": setting("norm", nn.GroupNorm(2, 4)),
    "submodule added": lambda net: net.add_module("more", nn.Identity()),
    "submodule removed": lambda net: delattr(net, "norm"),
    "forward overridden": setting("forward", lambda x: x),
    "forward of a layer overridden": setting("conv.forward", lambda x: x),
    "forward hook": lambda net: net.norm.register_forward_hook(hook),
    "forward pre-hook": lambda net: net.register_forward_pre_hook(hook),
    "new attribute": setting("conv.extra", 1),
    "attribute removed": lambda net: delattr(net, "heads"),
}


@pytest.mark.parametrize("change", NOTICED)
def test_is_current_notices(change: str) -> None:
    net = Net()
    target = Target(net)
    assert is_settled(target)
    NOTICED[change](net)
    assert not target.is_current()


def test_is_current_notices_a_hook_that_went() -> None:
    net = Net()
    handle = net.norm.register_forward_hook(hook)
    target = Target(net)
    handle.remove()
    assert not target.is_current()


TOUCHED: dict[str, Callable[[Net], Any]] = {
    "attribute changed": setting("heads", 3),
    "attribute replaced by an equal one": setting("levels", [1, 2, 4]),
    "new attribute": setting("extra", 1),
    "attribute gone": lambda net: delattr(net, "heads"),
    "layer swapped": lambda net: net._modules.update(norm=nn.GroupNorm(2, 4)),
    "forward hook": lambda net: net.conv.register_forward_hook(hook),
    "forward replaced": lambda net: setattr(net.conv, "forward", hook),
    "eval of a submodule": lambda net: net.norm.eval(),
}


@pytest.mark.parametrize("change", TOUCHED)
def test_what_is_put_into_a_layer_is_noticed_at_the_next_call(change: str) -> None:
    net = Net()
    target = Target(net)
    assert target.guard_holds()
    TOUCHED[change](net)
    assert not target.guard_holds()


def test_weights_may_be_replaced_at_any_call() -> None:
    net = Net()
    target = Target(net)
    net.conv.weight = nn.Parameter(torch.rand_like(net.conv.weight))
    net.table = torch.ones(4)
    assert target.guard_holds()


def test_which_weights_there_are_is_noticed_at_the_next_call() -> None:
    """A graph takes those that were there when it was captured."""
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2), nn.Linear(2, 2))
    net[2].weight = net[1].weight
    net[2].register_buffer("table", None)
    changes: list[Callable[[], Any]] = [
        lambda: setattr(net[0], "bias", nn.Parameter(torch.ones(2))),
        lambda: setattr(net[2], "table", torch.ones(2)),
        lambda: setattr(net[2], "weight", nn.Parameter(torch.ones(2, 2))),
        lambda: net[0].register_buffer("other", torch.ones(1)),
    ]
    for change in changes:
        target = Target(net)
        assert target.guard_holds()
        change()
        assert not target.guard_holds()
        assert not target.is_current()


def test_either_place_of_a_tied_weight_is_noticed() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].weight = net[0].weight
    target = Target(net)
    net[0].weight = nn.Parameter(torch.ones(2, 2))
    assert not target.guard_holds()
    net[1].weight = net[0].weight
    assert target.guard_holds() and target.is_current(), "tied again, to another weight"


def test_an_attribute_of_a_weight_is_refused_for_no_trace_would_see_it() -> None:
    net = Net()
    target = Target(net)
    net.conv.weight.gain = 2.0  # type: ignore[attr-defined]
    assert not target.is_current()
    refusal = Target(net).refusal
    assert refusal is not None and "gain" in refusal
    assert Target(nn.Sequential(nn.Linear(2, 2))).refusal is None


def test_an_attribute_that_says_what_its_class_says_counts_as_none() -> None:
    """ComfyUI notes so that weights are not offloaded any more."""
    net, noted, other = Classy(), Classy(), Classy()
    noted.cast, other.cast = False, True
    target = Target(noted)
    assert target.fingerprint == Target(net).fingerprint != Target(other).fingerprint
    noted.cast = 0  # type: ignore[assignment]
    assert not target.is_current()


class Classy(nn.Linear):
    cast = False

    def __init__(self) -> None:
        super().__init__(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2 if self.cast else 1)


def test_an_equal_attribute_is_looked_at_once() -> None:
    net = Net()
    target = Target(net)
    net.levels = list(net.levels)
    assert not target.guard_holds() and target.is_current() and target.guard_holds()


class _Thing:
    pass


ODD: dict[str, Callable[[], Any]] = {
    "a proxy of something that is gone": lambda: [weakref.proxy(_Thing())],
    "a sparse tensor": lambda: torch.eye(3).to_sparse(),
    "a conjugate": lambda: torch.tensor([1j]).conj(),
}


@pytest.mark.parametrize("odd", ODD)
def test_what_raises_when_it_is_looked_at_ends_no_picture(odd: str) -> None:
    refusal = Target(_changed(ODD[odd]())).refusal
    assert refusal is None or "which cannot be part of a graph's identity" in refusal


def test_a_hook_on_all_layers_is_refused() -> None:
    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        assert "on all layers" in str(Target(Net()).refusal)
    finally:
        handle.remove()
    assert Target(Net()).refusal is None


class Strength(float):
    """A number with a name."""

    name = "strength"


def test_a_number_that_has_attributes_counts_as_a_number() -> None:
    assert fingerprint(setting("scale", Strength(0.5))) != fingerprint(setting("scale", Strength(0.75)))


def test_replaced_weights_leave_the_target_current() -> None:
    """Otherwise a LoRA would cost a new fingerprint."""
    net = Net()
    target = Target(net)
    net.conv.weight = nn.Parameter(torch.rand_like(net.conv.weight))
    net.table = torch.ones(4)
    assert target.is_current()


class Recast(nn.GroupNorm):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


CHANGED: dict[str, Callable[[Net], Any]] = {
    "attribute changed": setting("heads", 3),
    "function attribute changed": setting("activation", lambda x: x * 3),
    "nested attribute changed": setting("config.width", 5),
    "tensor attribute replaced": setting("sigmas", torch.ones(3)),
    "training mode": lambda net: net.eval(),
    "class of a layer": lambda net: setattr(net.norm, "__class__", Recast),
    "bias where none was": lambda net: setattr(net.conv, "bias", nn.Parameter(torch.ones(4))),
}


@pytest.mark.parametrize("change", CHANGED)
def test_is_current_notices_what_the_fingerprint_holds(change: str) -> None:
    net = Net(bias=False)
    target = Target(net)
    assert is_settled(target)
    CHANGED[change](net)
    assert Target(net).fingerprint != target.fingerprint
    assert not target.is_current()


def test_a_plain_module_is_not_refused() -> None:
    assert Target(Net()).refusal is None


def test_a_forward_that_was_put_back_is_as_good_as_new() -> None:
    """The host takes an object patch off by setting what was there before, which leaves it on the instance."""
    net = Net()
    fingerprint = Target(net).fingerprint
    setting("conv.forward", net.conv.forward)(net)
    assert (Target(net).refusal, Target(net).fingerprint) == (None, fingerprint)


def test_the_forward_of_another_layer_is_no_layers_own() -> None:
    net = Net()
    setting("conv.forward", net.norm.forward)(net)
    assert "forward of layer conv was replaced" in str(Target(net).refusal)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (setting("forward", lambda x: x), r"forward of layer \(root\) was replaced"),
        (setting("conv.forward", lambda x: x), "forward of layer conv was replaced"),
        (lambda net: net.norm.register_forward_hook(hook), "layer norm has a forward hook"),
        (lambda net: net.register_forward_pre_hook(hook), r"layer \(root\) has a forward hook"),
    ],
    ids=["forward", "layer's forward", "hook", "pre-hook"],
)
def test_a_module_that_does_not_run_its_own_code_is_refused(change: Callable[[Net], Any], message: str) -> None:
    net = Net()
    change(net)
    refusal = Target(net).refusal
    assert refusal is not None
    assert re.search(message, refusal)


# -- what a forward leaves behind ------------------------------------------------------------------

HEAD = """
import functools
import operator
from torch import nn

class Noting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        {construct}

    def forward(self, x):
        y = self.linear(x)
        {before}
        self.left_over = y
        return y
"""
BEHIND: dict[str, tuple[str, str, str]] = {
    "only set": ("pass", "pass", ""),
    "also at construction": ("self.left_over = None", "pass", ""),
    "a local of that name": ("pass", "left_over = y", ""),
    "one name in __dict__": ("pass", "self.__dict__.get('another')", ""),
    "a library imported late": ("pass", "import math", ""),
    "other names put together": ("pass", "getattr(self, f'right{x.ndim}', getattr(self, 'ove', 0))", ""),
}
READ: dict[str, tuple[str, str, str]] = {
    "by a later call": ("self.left_over = 0", "y = y + self.left_over", ""),
    "by augmenting": ("self.left_over = 0", "self.left_over += 1", ""),
    "deleted": ("self.left_over = 0", "del self.left_over", ""),
    "by hasattr": ("pass", "y = y + 1 if hasattr(self, 'left_over') else y", ""),
    "by getattr": ("pass", "y = y + getattr(self, 'left_over', 0)", ""),
    "by attrgetter": ("pass", "operator.attrgetter('linear.left_over')", ""),
    "by a name put together": ("pass", "getattr(self, f'left_{x.dtype}', 0)", ""),
    "by a name put together of attributes": ("self.which = 'left'", "getattr(self, f'{self.which}_{x.dtype}', 0)", ""),
    "by a formatted name": ("pass", "getattr(self, 'left_%s' % x.dtype, 0)", ""),
    "by a formatted middle": ("pass", "getattr(self, '{}ft_ov{}'.format(x.dtype, x.ndim), 0)", ""),
    "by a pattern": ("pass", "match self:\n            case Noting(left_over=_): y = y + 1", ""),
    "by a pattern's position": (
        "pass",
        "match self:\n            case Noting(_): y = y + 1",
        "Noting.__match_args__ = ('left_over',)",
    ),
    "by a name that an attribute holds": ("self.which = ['left_over']", "getattr(self, self.which[0], 0)", ""),
    "by a name in a table": ("pass", "[getattr(self, name, 0) for name in NAMES]", "NAMES = ['left_over']"),
    "by a name that the class holds": (
        "pass",
        "[getattr(self, name, 0) for name in self.names]",
        "Noting.names = ('left_over',)",
    ),
    "by a function that is called": (
        "pass",
        "read(self)",
        "def read(layer): return getattr(layer, NAME)\nNAME = 'left_over'",
    ),
    "by a method of a helper": (
        "self.help = Helper()",
        "self.help(self)",
        "class Helper:\n  def __call__(self, of): of.left_over",
    ),
    "by a function in a table": ("pass", "TABLE[0](self)", "TABLE = [lambda layer: layer.left_over]"),
    "by a default": ("pass", "read(self)", "def read(of, name='left_over'): return getattr(of, name)"),
    "by a closure": (
        "pass",
        "read(self)",
        "def made(name):\n  return lambda of: getattr(of, name)\nread = made('left_over')",
    ),
    "by vars": ("pass", "list(vars(self).values())", ""),
    "by __dict__": ("pass", "list(self.__dict__.values())", ""),
    "by a __getattr__": ("pass", "pass", "Noting.__getattr__ = lambda self, name: nn.Module.__getattr__(self, name)"),
}


def noting(construct: str, before: str, more: str) -> nn.Module:
    scope = imported("noting", HEAD.format(construct=construct, before=before) + "\n" + more)
    module: nn.Module = scope["Noting"]()
    return module


@dataclasses.dataclass(frozen=True, eq=False)
class _Loader:
    code: types.CodeType

    def get_code(self, _name: str) -> types.CodeType:
        return self.code


def imported(name: str, text: str) -> dict[str, Any]:
    """The globals of a module of this text, as if it had been imported from a file."""
    code = compile(text, f"{name}.py", "exec")
    scope: dict[str, Any] = {"__name__": name, "__spec__": types.SimpleNamespace(loader=_Loader(code))}
    exec(code, scope)
    return scope


@pytest.mark.parametrize("how", BEHIND)
def test_what_a_forward_only_leaves_behind_is_no_part_of_the_model(how: str) -> None:
    module = noting(*BEHIND[how])
    target = Target(module)
    for _ in range(3):
        module.left_over = torch.randn(2)
        assert target.guard_holds() or target.is_current()
        assert Target(module).fingerprint == target.fingerprint
    module.left_over = torch.randn(2)
    assert target.guard_holds(), "known by now, and not looked at again"
    module.another = 1
    assert not target.guard_holds() and not target.is_current()


@pytest.mark.parametrize("how", READ)
def test_what_may_be_read_again_counts(how: str) -> None:
    module = noting(*READ[how])
    module.left_over = torch.ones(2)
    target = Target(module)
    assert target.refusal is None and target.is_current()
    module.left_over = torch.zeros(2)
    assert not target.guard_holds() and not target.is_current()


NOTED = HostCode(notes=frozenset({"left_over"}))
TOGETHER = {
    how for how in READ if how.startswith(("by a name put", "by a formatted", "by vars", "by __dict__", "by a __"))
}


@pytest.mark.parametrize("how", [*BEHIND, *sorted(TOGETHER)])
def test_what_the_host_notes_on_a_module_counts_only_if_code_names_it(how: str) -> None:
    """Whatever it is: what an image of the module would not have."""
    module = noting(*(BEHIND | READ)[how])
    module.__dict__.pop("left_over", None)
    target = Target(module, NOTED)
    fingerprint = target.fingerprint
    for note in ({"pages": object()}, threading.Lock(), 3, None):
        module.left_over = note
        assert target.guard_holds() or target.is_current()
        assert Target(module, NOTED).fingerprint == fingerprint and target.refusal is None
    module.left_over = [object()]
    assert target.guard_holds(), "known by now, and not looked at again"
    with target.attributes_unchanged():
        module.left_over = 4
    module.another = 1
    assert not target.guard_holds() and not target.is_current()


@pytest.mark.parametrize("how", sorted(READ.keys() - TOGETHER))
def test_a_note_that_code_names_counts(how: str) -> None:
    module = noting(*READ[how])
    module.left_over = 1
    target = Target(module, NOTED)
    assert target.refusal is None and target.is_current()
    module.left_over = 2
    assert not target.guard_holds() and not target.is_current()


def test_what_was_left_behind_before_is_known_after_one_look() -> None:
    module = noting(*BEHIND["only set"])
    module.left_over = torch.ones(2)
    target = Target(module)
    module.left_over = torch.zeros(2)
    assert not target.guard_holds() and target.is_current()
    module.left_over = {"nested": [torch.ones(2), None]}
    assert target.guard_holds() and target.is_current()


@pytest.mark.parametrize("switch", [True, 2, "high", [torch.ones(2), 1], {"scale": 0.5}])
def test_what_is_more_than_tensors_counts_though_nothing_reads_it(switch: Any) -> None:
    """A method that sets a switch, and a way to read it that nobody has thought of."""
    module = noting(*BEHIND["only set"])
    module.left_over = torch.ones(2)
    target = Target(module)
    assert target.is_current() and target.guard_holds()
    module.left_over = switch
    assert not target.guard_holds() and not target.is_current()
    assert Target(module).fingerprint != target.fingerprint


def test_without_its_source_a_module_may_read_everything() -> None:
    module = noting(*BEHIND["only set"])
    del type(module).forward.__globals__["__spec__"]
    module.left_over = torch.ones(2)
    target = Target(module)
    module.left_over = torch.zeros(2)
    assert not target.is_current()


@pytest.mark.parametrize("how", ["from helping import read", "import helping; read = helping.read"])
def test_what_a_forward_imports_itself_may_read_everything(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    helping = types.ModuleType("helping")
    helping.__dict__.update(imported("helping", "def read(layer): return layer.left_over"))
    monkeypatch.setitem(sys.modules, "helping", helping)
    module = noting("self.left_over = None", f"{how}; read(self)", "")
    module.left_over = torch.ones(2)
    target = Target(module)
    module.left_over = torch.zeros(2)
    assert not target.is_current()


@pytest.mark.parametrize("how", ["from package import part", "import package.part", "from package.part import other"])
def test_what_a_forward_imports_itself_reads_nothing_that_it_does_not_name(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As einops does, whose layers Cosmos has: it was another model after each call."""
    package, part = types.ModuleType("package"), types.ModuleType("package.part")
    package.__dict__.update(imported("package", "import sys"), part=part)
    part.__dict__.update(imported("package.part", "def other(layer): return layer.other"))
    monkeypatch.setitem(sys.modules, "package", package)
    monkeypatch.setitem(sys.modules, "package.part", part)
    module = noting("pass", how, "")
    module.left_over = torch.ones(2)
    target = Target(module)
    module.left_over = torch.zeros(2)
    assert target.is_current()


@pytest.mark.parametrize(("text", "read"), [("def f(of): return of.another", False), ("def f(of): of.left_over", True)])
def test_what_was_not_imported_yet_is_read_from_its_file(
    text: str, read: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same model is the same before the import and after it."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "imported_late.py").write_text(text)
    module = noting("pass", "if x.ndim > 9: import imported_late", "")
    module.left_over = torch.ones(2)
    target = Target(module)
    assert "imported_late" not in sys.modules
    importlib.import_module("imported_late")
    assert target.fingerprint == Target(module).fingerprint
    module.left_over = torch.zeros(2)
    assert target.is_current() is not read
    sys.modules.pop("imported_late")


@pytest.mark.parametrize("how", ["import not_there", "from package import not_there"])
def test_what_cannot_be_found_may_read_everything(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = types.ModuleType("package")
    package.__dict__.update(imported("package", "def another(layer): return layer.another"))
    monkeypatch.setitem(sys.modules, "package", package)
    module = noting("pass", f"if x.ndim > 9: {how}", "")
    module.left_over = torch.ones(2)
    target = Target(module)
    module.left_over = torch.zeros(2)
    assert not target.is_current()


def test_functions_of_other_files_in_a_table_count(monkeypatch: pytest.MonkeyPatch) -> None:
    helping = types.ModuleType("helping")
    text = "def read(layer): return deeper(layer)\ndef deeper(layer): return layer.left_over\nTABLE = {'a': [read]}"
    helping.__dict__.update(imported("helping", text))
    monkeypatch.setitem(sys.modules, "helping", helping)
    module = noting("pass", "TABLE['a'][0](self)", "from helping import TABLE")
    module.left_over = torch.ones(2)
    target = Target(module)
    module.left_over = torch.zeros(2)
    assert not target.is_current()


def test_an_attribute_that_no_method_sets_counts_though_nothing_reads_it() -> None:
    module = noting(*BEHIND["only set"])
    target = Target(module)
    module.set_by_somebody = 1
    assert not target.guard_holds() and not target.is_current()


class _Settings:
    scale = 1.0


def test_a_model_that_was_pickled_or_copied_is_what_it_was() -> None:
    """Python notes on a class what an object of it has to be copied: in one process, and not in another."""

    class Holding(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.settings = _Settings()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.settings.scale

    net = Holding()
    target = Target(net)
    pickle.dumps(_Settings())
    assert "__slotnames__" in vars(_Settings), "Python no longer notes it"
    assert target.is_current() and Target(net).fingerprint == target.fingerprint
