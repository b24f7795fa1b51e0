"""What the fingerprint takes on trust by its name: a class's bookkeeping, and what libraries have. A stranger looks."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F
from torch import nn

from onediff_comfy.capture.target.target import Target

EXTENSION = '''
import dataclasses, math, string
import einops
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

class Config:
    """1.0"""

@dataclasses.dataclass
class Data:
    a: int = 1

class Hashed:
    def __hash__(self): return 3

class Net(nn.Module):
    """1.0"""
    __constants__ = [1.0]
    __match_args__ = (1.0,)
    __orig_bases__ = (1.0,)
    __firstlineno__ = 1
    scale: 1.0
    config, data, hashed = Config(), Data(), Hashed()

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x):
        {body}
'''

Change = tuple[str, str, Any]


def extension(name: str, value: Any) -> Change:
    return ("extension", name, value)


READS: dict[str, tuple[str, Change]] = {
    "the text of its own class": ("return x * float(self.__doc__)", extension("Net.__doc__", "2.0")),
    "the text of another class": ("return x * float(Config.__doc__)", extension("Config.__doc__", "2.0")),
    "it by getattr": ("return x * float(getattr(self.config, '__doc__'))", extension("Config.__doc__", "2.0")),
    "what is for TorchScript": ("return x * self.__constants__[0]", extension("Net.__constants__", [2.0])),
    "annotations": ("return x * self.__annotations__['scale']", extension("Net.__annotations__", {"scale": 2.0})),
    "them of the class": ("return x * type(self).__annotations__['scale']", extension("Net.__annotations__", {})),
    "what a pattern matches": ("return x * self.__match_args__[0]", extension("Net.__match_args__", (2.0,))),
    "generic bases": ("return x * self.__orig_bases__[0]", extension("Net.__orig_bases__", (2.0,))),
    "where it was defined": ("return x * self.__firstlineno__", extension("Net.__firstlineno__", 2)),
    "fields": (
        "return x * self.data.__dataclass_fields__['a'].default",
        extension("Data.__dataclass_fields__.a.default", 2),
    ),
    "a hash": ("return x * hash(self.hashed)", extension("Hashed.__hash__", lambda _self: 9)),
    "a constant of Python's": ("return x * math.pi", ("math", "pi", 3.0)),
    "a string of Python's": ("return x * len(string.digits)", ("string", "digits", "01")),
    "a constant of torch's": ("return x * torch.pi", ("torch", "pi", 3.0)),
    "a constant of numpy's": ("return x * np.pi", ("numpy", "pi", 3.0)),
    "a constant of another library": ("return x * float(einops.__version__[0])", ("einops", "__version__", "7")),
    "a default of a function of torch's": (
        "return F.hardtanh(x)",
        ("torch.nn.functional", "hardtanh.__defaults__", (-5.0, 5.0, False)),
    ),
    "the code of a function of torch's": (
        "return F.hardtanh(x)",
        ("torch.nn.functional", "hardtanh.__code__", (lambda x, a=-1.0, b=1.0, inplace=False: x * 5).__code__),
    ),
    "the code of one that a layer of torch's calls": (
        "return self.norm(x)",
        ("torch.nn.functional", "layer_norm.__code__", (lambda x, shape, weight=None, bias=None, eps=1: x).__code__),
    ),
    "the code of a layer of torch's": (
        "return self.norm(x)",
        ("torch.nn", "LayerNorm.forward.__code__", (lambda self, x: x).__code__),
    ),
    "what is for TorchScript in a layer of torch's": (
        "return x * len(self.norm.__constants__)",
        ("torch.nn", "LayerNorm.__constants__", ["a"]),
    ),
    "a constant of a layer's class of torch's": ("return x * self.linear._version", ("torch.nn", "Linear._version", 9)),
}


@pytest.fixture
def module(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[nn.Module]:
    """A layer with this forward, of an extension that was imported from a file."""
    (tmp_path / "extension.py").write_text(EXTENSION.replace("{body}", request.param))
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("extension", None)
    made: nn.Module = importlib.import_module("extension").Net()
    yield made
    sys.modules.pop("extension", None)


@contextlib.contextmanager
def changed(module: str, path: str, value: Any) -> Iterator[None]:
    """Inside, an attribute, or an item of a table, is another."""
    *way, last = path.split(".")
    of: Any = importlib.import_module(module)
    for step in way:
        of = of[step] if isinstance(of, dict) else vars(of).get(step) or getattr(of, step)
    inherited, before = isinstance(of, type) and last not in vars(of), getattr(of, last)
    setattr(of, last, value)
    try:
        yield
    finally:
        delattr(of, last) if inherited else setattr(of, last, before)


@pytest.mark.parametrize(
    ("module", "change"), [pytest.param(*case, id=what) for what, case in READS.items()], indirect=["module"]
)
def test_what_is_read_by_a_trusted_name_is_noticed(module: nn.Module, change: Change) -> None:
    before = Target(module)
    assert before.refusal is None
    assert Target(module).fingerprint == before.fingerprint
    with changed(*change):
        assert Target(module).fingerprint != before.fingerprint
    assert Target(module).fingerprint == before.fingerprint


@pytest.mark.parametrize("module", ["return F.silu(x)"], indirect=True)
def test_a_function_that_pretends_to_be_a_librarys_is_noticed(
    module: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has torch's module and name, and torch's variables; only its code is from elsewhere."""
    before = Target(module).fingerprint
    monkeypatch.setattr(F, "silu", F.silu)  # puts it back afterwards
    exec("def silu(input, inplace=False): return input * 3", vars(F))
    assert (F.silu.__module__, F.silu.__qualname__) == ("torch.nn.functional", "silu")
    assert Target(module).fingerprint != before


@pytest.mark.parametrize("module", ["import trace; return x * trace.SCALE"], indirect=True)
@pytest.mark.parametrize("name", ["trace", "torchvision"])
def test_a_module_that_is_called_like_a_librarys_is_none(
    module: nn.Module, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's own ``trace`` is imported by nobody, so that an extension's file of this name is found first."""
    (tmp_path / "trace.py").write_text("SCALE = [1.0]\n")
    monkeypatch.delitem(sys.modules, "trace", raising=False)
    found: Any = importlib.import_module("trace")
    found.__name__ = name
    before = Target(module).fingerprint
    found.SCALE[0] = 2.0
    assert Target(module).fingerprint != before
    sys.modules.pop("trace")


@pytest.mark.parametrize("module", ["return F.silu(self.linear(self.norm(x)))"], indirect=True)
@pytest.mark.parametrize(
    "change",
    [extension("Config.__doc__", "2.0"), extension("Net.__constants__", [2.0]), ("math", "pi", 3.0)],
    ids=["a text", "for TorchScript", "a constant"],
)
def test_what_is_not_read_costs_no_capture(module: nn.Module, change: Change) -> None:
    before = Target(module).fingerprint
    with changed(*change):
        assert Target(module).fingerprint == before
