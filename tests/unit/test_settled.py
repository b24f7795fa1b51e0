"""A module that was looked at is compared by identity from then on, and whatever changes in it is still noticed."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from settled import is_settled
from test_tensor_parts import Eighths
from torch import nn

from onediff_comfy.capture.target import target as target_module
from onediff_comfy.capture.target.target import Target

SOURCE = """
import functools
import importlib
import sys
import numpy as np
import torch
from torch import nn

def keyed(x, *, by={"a": [1.0]}):
    return x * by["a"][0]

def closed(factor):
    def inner(x):
        return x * factor
    return inner

def added(factor):
    def inner(x):
        return x + factor
    return inner

def other(x):
    return x + 1

class Helper:
    def __init__(self):
        self.scale, self.table, self.masked = 1.0, np.ones(3), np.ma.array([1.0, 2.0], mask=[0, 1])

    @property
    def doubled(self):
        return self.scale * 2

    @functools.cached_property
    def kept(self):
        return self.scale

    @staticmethod
    def static(x):
        return x

    @classmethod
    def of_class(cls, x):
        return x

class Meta(type):
    def __call__(cls, x):
        return x

class OtherMeta(type):
    def __call__(cls, x):
        return x + 1

class OfMeta(metaclass=Meta):
    pass

Norm = nn.GroupNorm

def __getattr__(name):
    if name == "LAZY":
        return 1.0
    raise AttributeError(name)

class Outside(nn.Module):
    def forward(self, x):
        return x

NESTED = [[float(n)] for n in range(100)]
ARRAYS = [np.ones(2) for _ in range(100)]
BYTES = [bytearray(b"1") if sys.version_info >= (3, 11) else b"1" for _ in range(100)]
TENSOR = torch.ones(4)
NAMED = {f"n{n}": [float(n)] for n in range(100)}
CLOSED = closed(2.0)
BOUND = functools.partial(max, 1.0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.helper, self.outside = nn.Linear(4, 4), Helper(), [Outside()]
        self.register_buffer("table", torch.ones(4))
        self.norm, self.held = Norm(2, 4), lambda x, *, by=1.0: x * by
        self.twin = Norm(2, 4)

    def forward(self, x):
        import json as inside
        import an_extension as extension
        x = keyed(CLOSED(self.linear(x))) + self.helper.doubled + self.helper.kept + BOUND(0.5)
        x = self.norm(self.held(OfMeta(x))) + extension.LAZY + importlib.import_module("a_helper").SCALE
        x = Helper.static(Helper.of_class(x)) + self.helper.table.sum() + abs(1.0)
        x = self.twin(x) + len(ARRAYS) + len(BYTES) + TENSOR.sum()
        return self.outside[0](x) + sum(map(len, NESTED)) + sum(map(len, NAMED.values())) + inside.loads("1.0")
"""


@pytest.fixture
def code(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made: Any = types.ModuleType("an_extension")
    for name, of in {"an_extension": made, "a_helper": _helper(1.0), "json": json}.items():
        monkeypatch.setitem(sys.modules, name, of)
    of_torch, on_all = nn.GroupNorm.forward.__code__, nn.modules.module._global_forward_hooks
    exec(compile(SOURCE, "an_extension.py", "exec"), vars(made))
    yield made
    nn.GroupNorm.forward.__code__ = of_torch
    on_all.clear()


def _helper(scale: float) -> types.ModuleType:
    made: Any = types.ModuleType("a_helper")
    made.SCALE = scale
    return made


@pytest.fixture
def net(code: Any) -> nn.Module:
    made: nn.Module = code.Net()
    return made


def _retyped(net: nn.Module) -> None:
    net.linear.weight.data = net.linear.weight.data.double()  # type: ignore[union-attr]


def _other_dict(net: nn.Module) -> None:
    net.linear.__dict__ = {**vars(net.linear), "out_features": 5}


def _exchanged(net: nn.Module, one: str, other: str) -> None:
    """Each child under the other one's name, in the order in which they were."""
    names = {one: other, other: one}
    children = [(names.get(name, name), child) for name, child in net._modules.items()]
    net._modules.clear()
    net._modules.update(children)


class Cut(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).relu()


def _other_json() -> types.ModuleType:
    made = types.ModuleType("json")
    made.__file__, made.loads = "/an/extension/json.py", lambda text: 2.0  # type: ignore[attr-defined]
    return made


CHANGED: dict[str, Callable[[nn.Module, Any], Any]] = {
    "a closure's variable": lambda _net, code: setattr(code.CLOSED.__closure__[0], "cell_contents", 3.0),
    "in a default that is a table": lambda _net, code: code.keyed.__kwdefaults__["by"]["a"].__setitem__(0, 9.0),
    "a default": lambda _net, code: setattr(code.keyed, "__kwdefaults__", {"by": {"a": [2.0]}}),
    "a function's code": lambda _net, code: setattr(code.CLOSED, "__code__", code.added(2.0).__code__),
    "a variable before one of Python's": lambda _net, code: setattr(code, "abs", code.other),
    "in a list in a large list": lambda _net, code: code.NESTED[50].append(1.0),
    "in a list in a large table": lambda _net, code: code.NAMED["n50"].append(1.0),
    "what a partial is bound to": lambda _net, code: code.BOUND.__setstate__((max, (9.0,), {}, None)),
    "a default in a table of defaults": lambda _net, code: code.keyed.__kwdefaults__.update(by={"a": [2.0]}),
    "a default in a table of them, of a function that a layer holds": lambda net, _code: net.held.__kwdefaults__.update(  # type: ignore
        by=2.0
    ),
    "the code of a method of one of torch's layers": lambda _net, code: setattr(
        code.Norm.forward, "__code__", (lambda self, input: input * 2).__code__
    ),
    "the class of a class": lambda _net, code: setattr(code.OfMeta, "__class__", code.OtherMeta),
    "how a module makes up what it lacks": lambda _net, code: setattr(code, "__getattr__", code.other),
    "a property": lambda _net, code: setattr(code.Helper, "doubled", property(lambda self: 3.0)),
    "the code of a property": lambda _net, code: setattr(
        code.Helper.doubled.fget, "__code__", (lambda self: self.scale * 3).__code__
    ),
    "what a cached property runs": lambda _net, code: setattr(vars(code.Helper)["kept"], "func", lambda self: 5.0),
    "the code of a static method": lambda _net, code: setattr(code.Helper.static, "__code__", code.other.__code__),
    "the code of a class method": lambda _net, code: setattr(
        code.Helper.of_class.__func__, "__code__", (lambda cls, x: x + 1).__code__
    ),
    "an array that a layer's object holds": lambda net, _code: net.helper.table.fill(2.0),  # type: ignore[union-attr]
    "the class of a layer": lambda net, _code: setattr(net.linear, "__class__", Cut),
    "all of a layer's attributes at once": lambda net, _code: _other_dict(net),
    "the class of an object": lambda net, _code: setattr(net.helper, "__class__", type("Helper", (), {"doubled": 1})),
    "weights of a layer outside": lambda net, _code: net.outside[0].register_buffer("b", torch.ones(1)),  # type: ignore
    "a hook of a layer outside": lambda net, _code: net.outside[0].register_forward_hook(print),  # type: ignore
    "a weight's dtype, in place": lambda net, _code: _retyped(net),
    "a buffer's size": lambda net, _code: setattr(net, "table", torch.ones(5)),
    "a weight for two layers": lambda net, _code: net.add_module("again", net.linear),  # type: ignore[arg-type]
    "the module of an import": lambda _net, _code: sys.modules.__setitem__("json", _other_json()),
    "the module of an import by a string": lambda _net, _code: sys.modules.__setitem__("a_helper", _helper(2.0)),
    "the names of two children": lambda net, _code: _exchanged(net, "norm", "twin"),
    "the name of a child": lambda net, _code: net._modules.update(other=net._modules.pop("twin")),
    "an array's shape": lambda net, _code: setattr(net.helper.table, "shape", (3, 1)),  # type: ignore[union-attr]
    "an array's dtype": lambda net, _code: setattr(net.helper.table, "dtype", np.int64),  # type: ignore[union-attr]
    "a masked array": lambda net, _code: net.helper.masked.__setitem__(0, 5.0),  # type: ignore[union-attr]
    "an array in a large list": lambda _net, code: code.ARRAYS[50].fill(9.0),
    "a constant's shape": lambda _net, code: code.TENSOR.unsqueeze_(0),
    "a constant's dtype": lambda _net, code: setattr(code.TENSOR, "data", code.TENSOR.data.view(torch.int32)),
    "what a property is made of": lambda _net, code: vars(code.Helper)["doubled"].__init__(lambda self: 3.0),
    "what a static method is made of": lambda _net, code: vars(code.Helper)["static"].__init__(code.other),
    "a hook on all layers": lambda _net, _code: nn.modules.module.register_module_forward_hook(print),
    "a base's method": lambda _net, code: setattr(code.Outside, "forward", lambda self, x: x * 2),
    "what modules find attributes by": lambda _net, code: setattr(code.Net, "__getattr__", lambda self, name: None),
}
if sys.version_info >= (3, 11):  # older Pythons marshal sets in no order, and such a list is refused there
    CHANGED["bytes in a large list"] = lambda _net, code: code.BYTES[50].append(1)


@pytest.mark.parametrize("what", CHANGED)
def test_what_changes_is_noticed(what: str, net: nn.Module, code: Any) -> None:
    target = Target(net)
    assert target.refusal is None and is_settled(target)
    CHANGED[what](net, code)
    assert not target.is_current()
    again = Target(net)
    assert again.refusal is not None or again.fingerprint != target.fingerprint


def test_a_weight_of_another_class_is_noticed_though_it_is_called_alike(net: nn.Module) -> None:
    other = type("Eighths", (Eighths,), {"__module__": Eighths.__module__, "plain": lambda self: self.data8})
    net.linear.weight = nn.Parameter(Eighths.of(torch.rand(4, 4)), requires_grad=False)  # type: ignore[union-attr]
    target = Target(net)
    assert target.refusal is None and is_settled(target)
    net.linear.weight = nn.Parameter(other.of(torch.rand(4, 4)), requires_grad=False)  # type: ignore[union-attr]
    assert not target.is_current()


def test_what_cannot_be_looked_at_any_more_is_another(net: nn.Module) -> None:
    net.linear.weight = nn.Parameter(Eighths.of(torch.rand(4, 4)), requires_grad=False)  # type: ignore[union-attr]
    target = Target(net)
    assert target.refusal is None and is_settled(target)
    net.linear.weight.doubled = iter([])  # type: ignore[union-attr]
    assert not target.is_current()


def test_a_child_under_another_name_is_noticed_at_the_next_call(net: nn.Module) -> None:
    target = Target(net)
    assert target.guard_holds()
    _exchanged(net, "norm", "twin")
    assert not target.guard_holds()


def test_nothing_is_described_again_and_again(net: nn.Module) -> None:
    target = Target(net)
    with mock.patch.object(target_module, "inspect", side_effect=target_module.inspect) as inspected:
        assert [(target.is_current(), inspected.call_count) for _ in range(4)] == [(True, 1)] * 4


def test_a_change_between_two_looks_is_described_until_it_is_relied_on(net: nn.Module, code: Any) -> None:
    """What is another object but says the same costs one more look, and then another before that is relied on."""
    target = Target(net)
    assert is_settled(target)
    code.NESTED = [list(part) for part in code.NESTED]
    with mock.patch.object(target_module, "inspect", side_effect=target_module.inspect) as inspected:
        assert [(target.is_current(), inspected.call_count) for _ in range(3)] == [(True, 1), (True, 2), (True, 2)]


def test_what_changes_while_a_module_is_looked_at_is_noticed(net: nn.Module, code: Any) -> None:
    """By another thread: the text that counts was made of what was there before."""
    inspect = target_module.inspect

    def interrupted(*arguments: Any) -> Any:
        found = inspect(*arguments)
        code.keyed.__kwdefaults__["by"]["a"][0] = 9.0
        return found._replace(seen=inspect(*arguments).seen)  # as if it had been noted down a moment later

    with mock.patch.object(target_module, "inspect", side_effect=interrupted):
        target = Target(net)
    assert not target.is_current()


def test_an_array_of_another_size_is_noticed() -> None:
    net = nn.Module()
    net.held = np.ones(3)  # type: ignore[assignment]
    target = Target(net)
    assert is_settled(target)
    net.held.resize(4, refcheck=False)  # type: ignore[union-attr, operator]
    assert not target.is_current()
