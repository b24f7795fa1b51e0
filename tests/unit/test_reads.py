"""fingerprint/: whatever value code reads by a name is part of a model's identity, or the model is refused."""

from __future__ import annotations

import contextvars
import functools
import importlib
import random
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from settled import is_settled
from torch import nn

from onediff_comfy.capture.fingerprint.code_ownership import HostCode
from onediff_comfy.capture.target.target import Target

# A module of an extension, a second one that it uses, and what the forward of its layer returns besides x.
SETTINGS = """
import collections, dataclasses, enum, functools, threading, types
import numpy as np
import torch

class Config:
    scale = 1.0
    def __init__(self): self.offset = 0.0; self.lock = threading.Lock()
    def both(self): return self.offset + self.scale
    @property
    def doubled(self): return 2 * self.offset

class Slotted:
    __slots__ = ("scale",)

class Meta(type):
    def __getattr__(cls, name): return cls.values[name]

class OfMeta(metaclass=Meta):
    values = {"scale": 1.0}

class Dynamic:
    def __init__(self): self.values = {"scale": 1.0}
    def __getattr__(self, name): return self.values[name]

class Called:
    def __init__(self): self.scale = 1.0
    def __call__(self, x): return x * self.scale

class Attributes(dict):
    pass

@dataclasses.dataclass
class Data:
    scale: float = 1.0

class Mode(enum.Enum):
    FAST = [1.0]

class Base:
    shared = 1.0

class Derived(Base):
    pass

SCALE, LISTED, TABLE = 1.0, [1.0, 2.0], {"scale": 1.0, "other": {"deep": [1.0]}}
CONFIG, SLOTTED, DYNAMIC, CALLED, DATA = Config(), Slotted(), Dynamic(), Called(), Data()
SLOTTED.scale = 1.0
ATTRIBUTES = Attributes()
ATTRIBUTES.scale = 1.0
SPACE = types.SimpleNamespace(scale=1.0, inner=types.SimpleNamespace(scale=1.0))
TENSOR, SCALAR, ARRAY, NUMBER = torch.ones(3), torch.tensor(1.0), np.ones(3), np.float32(1)
BIG = {f"layer{n}": float(n) for n in range(1000)}
WITH_DEFAULT = collections.defaultdict(float, scale=1.0)
DEQUE, PAIR = collections.deque([1.0]), collections.namedtuple("Pair", "scale")(1.0)
BACKENDS = [torch.nn.attention.SDPBackend.MATH]
BOUND, GET, PARTIAL = DATA.__eq__, TABLE.get, functools.partial(max, 1.0)
ACTIVATION = torch.nn.LeakyReLU(0.1)
WHICH = "SCALE"

def helper(x): return x * helper.scale
helper.scale = 1.0

@torch.no_grad()
def decorated(x): return x * SCALE

@functools.lru_cache
def cached(): return SCALE

def generated():
    for value in LISTED: yield value

def __getattr__(name):
    if name == "LAZY": return TABLE["scale"]
    raise AttributeError(name)
"""
LAYER = """
import importlib, os, sys
import torch
from torch import nn
import settings
import settings as named
from settings import *
from settings import DATA as ALIAS

def closed_over(table, module):
    def inner(): return table["a"] * module.SCALE
    return inner

CLOSURE = closed_over({"a": 1.0}, settings)

def defaulted(by=[1.0]): return by[0]

class Net(nn.Module):
    of_class = {"scale": 1.0}
    def __init__(self):
        super().__init__()
        self.linear, self.held, self.kind, self.names = nn.Linear(2, 2), settings.DATA, Config, "SPACE"
    def forward(self, x):
        return self.linear(x) * self.value(x)
    def value(self, x):
        BODY
"""


def set_item(table: Any, key: Any) -> Callable[[Any], None]:
    def change(s: Any) -> None:
        functools.reduce(lambda value, name: getattr(value, name), table.split("."), s)[key] = 9.0

    return change


def set_attribute(path: str, value: Any = 9.0) -> Callable[[Any], None]:
    def change(s: Any) -> None:
        *inner, last = path.split(".")
        setattr(functools.reduce(getattr, inner, s), last, value)

    return change


def in_layer(path: str, key: str) -> Callable[[Any], None]:
    def change(_s: Any) -> None:
        *inner, last = path.split(".")
        functools.reduce(getattr, [*inner, last], sys.modules["a_layer"])[key] = 9.0  # type: ignore[index]

    return change


NOTICED: dict[str, tuple[str, Callable[[Any], None]]] = {
    "an attribute of an object": ("return CONFIG.offset", set_attribute("CONFIG.offset")),
    "one of another module's": ("return settings.CONFIG.offset", set_attribute("CONFIG.offset")),
    "by another name": ("return ALIAS.scale", set_attribute("DATA.scale")),
    "an item of a list": ("return LISTED[0]", set_item("LISTED", 0)),
    "an item of a table": ('return TABLE["scale"]', set_item("TABLE", "scale")),
    "deep in a table": ('return TABLE["other"]["deep"][0]', lambda s: s.TABLE["other"]["deep"].__setitem__(0, 9.0)),
    "a table as a whole": ("return sum(LISTED)", set_item("LISTED", 1)),
    "by a key that is computed": ("return BIG[f'layer{x.ndim}']", set_item("BIG", "layer2")),
    "a scalar tensor": ("return SCALAR", lambda s: s.SCALAR.fill_(9)),
    "a tensor behind its version counter": ("return TENSOR.sum()", lambda s: s.TENSOR.data.fill_(9)),
    "an array": ("return float(ARRAY.sum())", lambda s: s.ARRAY.fill(9)),
    "a number of numpy's": ("return float(NUMBER)", set_attribute("NUMBER", np.float32(9))),
    "an attribute of a class": ("return Config.scale", set_attribute("Config.scale")),
    "one that a class inherits": ("return Derived.shared", set_attribute("Base.shared")),
    "of a class, by an instance": ("return CONFIG.scale", set_attribute("Config.scale")),
    "of a class that a layer holds": ("return self.kind.scale", set_attribute("Config.scale")),
    "of an object that a layer holds": ("return self.held.scale", set_attribute("DATA.scale")),
    "a layer's class's table": ('return self.of_class["scale"]', in_layer("Net.of_class", "scale")),
    "a slot": ("return SLOTTED.scale", set_attribute("SLOTTED.scale")),
    "a dataclass": ("return DATA.scale", set_attribute("DATA.scale")),
    "a namespace in a namespace": ("return SPACE.inner.scale", set_attribute("SPACE.inner.scale")),
    "an attribute of a dict": ("return ATTRIBUTES.scale", set_attribute("ATTRIBUTES.scale")),
    "an enum of an extension in C++": (
        "return len(BACKENDS[0].name)",
        lambda s: s.BACKENDS.__setitem__(0, torch.nn.attention.SDPBackend.FLASH_ATTENTION),
    ),
    "a value of an enum": ("return Mode.FAST.value[0]", lambda s: s.Mode.FAST.value.__setitem__(0, 9.0)),
    "a method": ("return DATA.__dict__['scale']", set_attribute("DATA.scale")),
    "an object with __getattr__": ("return DYNAMIC.scale", set_item("DYNAMIC.values", "scale")),
    "a class with __getattr__": ("return OfMeta.scale", set_item("OfMeta.values", "scale")),
    "an object that is called": ("return CALLED(1)", set_attribute("CALLED.scale")),
    "an attribute of a function": ("return helper(1)", set_attribute("helper.scale")),
    "behind a decorator of torch": ("return decorated(1)", set_attribute("SCALE")),
    "behind a cache": ("return cached()", set_attribute("SCALE")),
    "behind a generator": ("return sum(settings.generated())", set_item("LISTED", 1)),
    "a bound method of an object": ("return BOUND(None) is None", set_attribute("DATA.scale")),
    "a bound method of a table": ('return GET("scale")', set_item("TABLE", "scale")),
    "a partial": ("return PARTIAL(0.5)", set_attribute("PARTIAL", functools.partial(max, 9.0))),
    "a default dict": ('return WITH_DEFAULT["scale"]', set_item("WITH_DEFAULT", "scale")),
    "a deque": ("return DEQUE[0]", set_item("DEQUE", 0)),
    "a layer outside of the tree": ("return ACTIVATION(x)", set_attribute("ACTIVATION.negative_slope")),
    "an attribute that a module makes up": ("return settings.LAZY", set_item("TABLE", "scale")),
    "getattr by a constant": ('return getattr(settings, "SCALE")', set_attribute("SCALE")),
    "getattr by a variable": ("return getattr(settings, WHICH)", set_attribute("SCALE")),
    "getattr by a layer's attribute": ("return getattr(self.module, self.names).scale", set_attribute("SPACE.scale")),
    "a module that a layer holds": ("return self.module.SCALE", set_attribute("SCALE")),
    "a module under a local name": ("s = settings; return s.SCALE", set_attribute("SCALE")),
    "an object under a local name": ("s = DATA; return s.scale", set_attribute("DATA.scale")),
    "globals": ('return globals()["TABLE"]["scale"]', set_item("TABLE", "scale")),
    "globals by a name put together": ('return globals()["TAB" + "LE".upper()]["scale"]', set_item("TABLE", "scale")),
    "eval": ('return eval("TABLE")["scale"]', set_item("TABLE", "scale")),
    "vars of a module": ("return vars(settings)[WHICH]", set_attribute("SCALE")),
    "an import": ("import settings as inside; return inside.DATA.scale", set_attribute("DATA.scale")),
    "an import of a name": ("from settings import TABLE as inside; return inside['scale']", set_item("TABLE", "scale")),
    "importlib": ('return importlib.import_module("settings").SCALE', set_attribute("SCALE")),
    "sys.modules": ('return sys.modules["settings"].SCALE', set_attribute("SCALE")),
    "a closure's module": ("return CLOSURE()", set_attribute("SCALE")),
    "a default": (
        "return defaulted()",
        lambda _s: sys.modules["a_layer"].defaulted.__defaults__[0].__setitem__(0, 9.0),
    ),
    "in a comprehension": ("return sum(TABLE[k] for k in ('scale',))", set_item("TABLE", "scale")),
    "in a lambda": ('return (lambda: TABLE["scale"])()', set_item("TABLE", "scale")),
    "which of two": ('return (LISTED if x.ndim else TABLE)["scale"]', set_item("TABLE", "scale")),
}
"""What the layer's code reads, and how that changes."""

UNREAD: dict[str, tuple[str, Callable[[Any], None]]] = {
    "another attribute": ("return SPACE.scale", set_attribute("SPACE.inner", 9.0)),
    "another key": ('return TABLE["other"]', set_item("TABLE", "scale")),
    "a counter in a table": ('TABLE["scale"] += 1; return 1.0', set_item("TABLE", "scale")),
    "a counter in an object": ("SPACE.scale += 1; return 1.0", set_attribute("SPACE.scale")),
    "what is only written": ("settings.CONFIG.offset = 1; return 1.0", set_attribute("CONFIG.offset")),
    "another variable of a module": ("return settings.SCALE", set_item("LISTED", 0)),
}

REFUSED: dict[str, tuple[Any, str]] = {
    "a context variable": (contextvars.ContextVar("v", default=1.0), "a _contextvars.ContextVar"),
    "a thread's variable": (threading.local(), "a _thread._local"),
    "a generator of random numbers": (torch.Generator(), "a torch._C.Generator"),
    "one of Python's": (random.Random(1), "a random.Random"),
    "a layer with weights": (nn.Linear(2, 2), "a Linear layer outside of its module tree"),
    "an iterator": (iter([1.0]), "a builtins.list_iterator"),
    "any of them, in a table": ({"a": iter([1.0])}, "a builtins.list_iterator"),
}


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The extension's second module, in a file of its own as the first will be."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "settings.py").write_text(SETTINGS)
    made: Any = importlib.import_module("settings")
    yield made
    for name in ("settings", "a_layer"):
        sys.modules.pop(name, None)


def net(body: str) -> nn.Module:
    sys.modules.pop("a_layer", None)
    file = Path(sys.modules["settings"].__file__ or "").with_name("a_layer.py")
    file.write_text(LAYER.replace("BODY", body))
    importlib.invalidate_caches()
    with mock.patch.object(sys, "dont_write_bytecode", True):  # two files of one size in one second
        made: nn.Module = importlib.import_module("a_layer").Net()
    return made


@pytest.mark.parametrize("what", NOTICED)
def test_a_value_that_code_reads_is_noticed(what: str, settings: Any) -> None:
    body, change = NOTICED[what]
    model = net(body)
    if "self.module" in body:
        model.module = settings
    target = Target(model)
    assert target.refusal is None and is_settled(target)
    change(settings)
    own = what in ("a partial", "a number of numpy's")  # by a name that the layer's module has taken for itself
    assert target.is_current() is own
    if own:
        model = net(body)
    changed = Target(model)
    assert changed.refusal is None and changed.fingerprint != target.fingerprint


@pytest.mark.parametrize("what", UNREAD)
def test_what_is_not_read_costs_no_capture(what: str, settings: Any) -> None:
    body, change = UNREAD[what]
    target = Target(net(body))
    assert is_settled(target)
    change(settings)
    assert target.refusal is None and is_settled(target)


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_described_is_refused_where_it_is_read(what: str, settings: Any) -> None:
    settings.HIDDEN, said = REFUSED[what]
    target = Target(net("return HIDDEN"))
    assert target.refusal is not None and f"reads a_layer.HIDDEN, which holds {said}" in target.refusal
    assert Target(net("return 1.0")).refusal is None


def test_a_variable_of_the_environment_counts(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = net('return float(os.environ.get("A_SCALE", "1")) + float(os.getenv("A_SECOND", "1"))')
    for name in ("A_SCALE", "A_SECOND"):
        target = Target(model)
        assert is_settled(target)
        monkeypatch.setenv(name, "2")
        assert not target.is_current()
    target = Target(model)
    monkeypatch.setenv("A_THIRD", "2")
    assert target.is_current()


def test_a_variable_of_the_host_counts_unless_it_is_of_its_machinery(settings: Any) -> None:
    model = net('return TABLE["scale"]')
    for machinery, current in ((frozenset(), False), (frozenset({"a_layer"}), True)):
        settings.TABLE["scale"] = 1.0
        target = Target(model, host=HostCode("a_layer", machinery))
        assert is_settled(target)
        settings.TABLE["scale"] = 2.0
        assert target.is_current() is current


def test_what_the_hosts_machinery_keeps_is_no_code_though_it_may_be_called(settings: Any) -> None:
    """It notes the largest layer that it has moved, say. What is called by a variable's name, others may put there."""
    noting = net('return 1.0 if settings.TABLE["largest"] is None else 2.0')
    calling = net("return settings.CALLED(x)")
    code = HostCode("settings", frozenset({"settings"}))
    prints: dict[nn.Module, set[str]] = {noting: set(), calling: set()}
    for largest, called in ((None, nn.Identity()), (nn.Linear(1, 1), settings.Called()), (nn.ReLU(), nn.ReLU())):
        settings.TABLE["largest"], settings.CALLED = largest, called
        for model, found in prints.items():
            found.add(Target(model, host=code).fingerprint)
    assert len(prints[noting]) == 1 and len(prints[calling]) == 3


def test_two_functions_in_each_others_place_are_noticed(settings: Any) -> None:
    """All that is reached is the same then."""

    def swapped(one: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, x: one(x) - other(x)

    def times(factor: float) -> Callable[..., Any]:
        return lambda x: x * factor

    prints = set()
    for one, other in ((2.0, 3.0), (3.0, 2.0)):
        model = net("return 1.0")
        type(model).value = swapped(times(one), times(other))  # type: ignore[method-assign]
        prints.add(Target(model).fingerprint)
    assert len(prints) == 2


def test_tensors_in_a_table_are_told_apart_by_their_values(settings: Any) -> None:
    model = net('return TABLE["scale"]')
    settings.TABLE["scale"] = torch.zeros(2)
    target = Target(model)
    assert is_settled(target)
    settings.TABLE["scale"][1] = 1
    assert not target.is_current()
