"""fingerprint/: what an extension replaces, however far the model's own code is from it, is noticed."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from settled import is_settled
from torch import nn

from onediff_comfy.capture.fingerprint.code_ownership import HostCode
from onediff_comfy.capture.target.target import Target

DEEP = """
import functools
import torch

FACTOR, TABLE, LIMITS = 2.0, {"a": 1}, (1, 2)

def rotated(x):
    return turned(x) * FACTOR

def turned(x):
    return x.flip(-1)

@functools.lru_cache
def remembered(n):
    return n + one()

def one():
    return 1

def even(n):
    return n == 0 or odd(n - 1)

def odd(n):
    return n != 0 and even(n - 1)

def unrelated(x):
    return x

class Helper:
    def shifted(self, x):
        return x + self.amount(x)

    @staticmethod
    def amount(x):
        return LIMITS[0]
"""
MODEL = """
import deep
from deep import Helper
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.helper = nn.Linear(4, 4), nn.GroupNorm(2, 4), Helper()

    def forward(self, x, scale=1.0):
        def inner(y):
            return deep.rotated(y)
        return self.helper.shifted(inner(self.norm(self.linear(x)))) * deep.remembered(1) * deep.even(4) * scale
"""


def module(name: str, source: str) -> types.ModuleType:
    made = types.ModuleType(name)
    sys.modules[name] = made
    exec(compile(source, f"{name}.py", "exec"), vars(made))
    return made


@pytest.fixture
def deep() -> Iterator[types.ModuleType]:
    yield module("deep", DEEP)
    del sys.modules["deep"]


@pytest.fixture
def net(deep: types.ModuleType) -> Iterator[nn.Module]:
    made: nn.Module = module("a_model", MODEL).Net()
    yield made
    del sys.modules["a_model"]


def other(*_: Any, **__: Any) -> Any:
    return 0


REPLACED: dict[str, tuple[str, Any]] = {
    "a function called by its module": ("deep.rotated", other),
    "a function that this one calls": ("deep.turned", other),
    "a function behind a cache": ("deep.one", other),
    "one of two that call each other": ("deep.odd", other),
    "a number of another module": ("deep.FACTOR", 3.0),
    "a tuple of another module": ("deep.LIMITS", (2, 2)),
    "a method of an object that a layer holds": ("deep.Helper.shifted", other),
    "a static method": ("deep.Helper.amount", staticmethod(other)),
    "the forward of one of torch's layers": ("torch.nn.GroupNorm.forward", other),
    "a function of torch that a layer of torch calls": ("torch.nn.functional.linear", other),
    "a default": ("a_model.Net.forward.__defaults__", (2.0,)),
}


def put(monkeypatch: pytest.MonkeyPatch, place: str, value: Any) -> None:
    path, _, name = place.rpartition(".")
    monkeypatch.setattr(found(path), name, value)


def found(path: str) -> Any:
    head, *rest = path.split(".")
    holder: Any = sys.modules[head]
    for name in rest:
        holder = getattr(holder, name)
    return holder


@pytest.mark.parametrize("what", REPLACED)
def test_what_is_replaced_is_noticed(what: str, net: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(net)
    assert target.refusal is None and is_settled(target)
    put(monkeypatch, *REPLACED[what])
    assert not target.is_current()
    monkeypatch.undo()
    assert target.is_current()


def test_every_two_replacements_differ(net: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    prints = [Target(net).fingerprint]
    for place, value in REPLACED.values():
        put(monkeypatch, place, value)
        prints.append(Target(net).fingerprint)
        monkeypatch.undo()
    assert len(set(prints)) == len(prints)


@pytest.mark.parametrize("place", ["deep.unrelated", "torch.nn.functional.conv3d"])
def test_what_the_model_does_not_call_costs_no_capture(
    place: str, net: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Target(net)
    put(monkeypatch, place, other)
    assert target.is_current()


def test_variables_and_functions_of_the_host_count(net: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    for place, value in (("deep.FACTOR", 3.0), ("deep.turned", other)):
        target = Target(net, host=HostCode("deep"))
        assert is_settled(target)
        monkeypatch.setattr(place, value)
        assert not target.is_current()


HOLDING = """
from torch import nn

class Holding(nn.Module):
    def __init__(self, held):
        super().__init__()
        self.held = held

    def forward(self, x):
        return self.held.rotated(x)
"""


@pytest.fixture
def holding(deep: types.ModuleType) -> Iterator[nn.Module]:
    """A layer that has a module of the host at hand, whose functions it calls."""
    yield module("a_holder", HOLDING).Holding(deep)
    del sys.modules["a_holder"]


@pytest.mark.parametrize("place", ["deep.rotated", "deep.turned"])
def test_what_is_replaced_in_a_module_of_the_host_that_a_layer_holds_is_noticed(
    place: str, holding: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Target(holding, host=HostCode("deep"))
    assert target.refusal is None and is_settled(target)
    monkeypatch.setattr(place, other)
    assert not target.is_current()


def test_what_such_a_module_keeps_costs_no_capture(holding: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(holding, host=HostCode("deep"))
    monkeypatch.setattr("deep.TABLE", {"b": 2})  # bookkeeping, most likely
    assert target.is_current()


def closure(factor: float, held: Any, code: int = 0) -> Callable[..., Any]:
    """As extensions replace a method: with a lock or a logger beside what matters."""

    def one(self: Any, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x * factor if held else x

    def another(self: Any, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x - factor if held else x

    return (one, another)[code]


def test_what_cannot_be_described_does_not_hide_what_is_beside_it(
    net: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    prints = set()
    for factor, code in ((1.0, 0), (2.0, 0), (1.0, 1)):
        monkeypatch.setattr(type(net), "forward", closure(factor, threading.Lock(), code))
        target = Target(net)
        assert target.refusal is None
        prints.add(target.fingerprint)
    assert len(prints) == 3


def test_the_text_is_the_same_for_the_same_code(net: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """A counter or a time in a closure would be another model in every run."""
    prints = set()
    for _ in range(2):
        monkeypatch.setattr("deep.turned", closure(1.0, threading.Lock()))
        prints.add(Target(net).fingerprint)
    assert len(prints) == 1


def test_a_function_put_into_torch_by_an_extension_is_followed(
    net: nn.Module, deep: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(F, "linear", deep.rotated)
    target = Target(net)
    assert is_settled(target)
    monkeypatch.setattr(deep, "turned", other)
    assert not target.is_current()
