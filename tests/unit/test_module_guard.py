"""serving/module_guard.py: a call's options, as far as its target reads them."""

from __future__ import annotations

import functools
import types
from typing import Any

import pytest
import torch
from torch import nn

from onediff_comfy.cache.call_index import reader_of
from onediff_comfy.cache.memory import GraphCache
from onediff_comfy.capture.call import NotCovered, split
from onediff_comfy.capture.parameters import OnCopies
from onediff_comfy.compilation.compile_graph import HostServices
from onediff_comfy.compilation.library import GraphLibrary
from onediff_comfy.metrics import Metrics
from onediff_comfy.serving.decision import Invocation, Request
from onediff_comfy.serving.module_guard import ModuleGuard
from onediff_comfy.serving.run import RunContext, RunReport

HOST = HostServices(
    identity="host",
    options_name="options",
    capture_options={},
    check_interrupted=lambda: None,
    refuse=lambda _layers: None,
)


class Net(nn.Module):
    def forward(self, x: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        return x


def test_each_of_two_requests_learns_what_the_other_found_to_be_read() -> None:
    """Both were made before. One that learnt nothing would be captured again and again."""
    library, module = GraphLibrary(GraphCache(1 << 30), Metrics()), Net()
    run = RunContext(RunReport(Metrics(), library.metrics, lambda _kind, _signature: None))
    guard = ModuleGuard(library, HOST)

    def request() -> Request:
        return guard.request(Invocation(module, module.forward, (torch.ones(1), {"scale": 2}), {}), run)

    first, second = request(), request()
    library.index.learn_option(first.target.fingerprint, "scale")
    assert "scale" not in str(request().call.signature.structure), "the index is not asked at every call"
    for made in (first, second):
        assert "scale" in str(guard.up_to_date(made).call.signature.structure)
    assert request().key == guard.up_to_date(first).key != first.key


def test_only_a_method_of_the_module_is_served() -> None:
    """Whatever else is called like it is no part of what the module's identity describes."""
    library, module, x = GraphLibrary(GraphCache(1 << 30), Metrics()), Net(), torch.ones(1)
    run = RunContext(RunReport(Metrics(), library.metrics, lambda _kind, _signature: None))
    guard = ModuleGuard(library, HOST)

    def request(forward: Any) -> Request:
        return guard.request(Invocation(module, forward, (x, {}), {}), run)

    def scaled(x: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        return module.forward(x, options) * 1.2

    own = request(module.forward)
    assert request(OnCopies(module.forward)).key == own.key
    for other in (functools.wraps(module.forward)(scaled), Net().forward, functools.partial(module.forward)):
        with pytest.raises(NotCovered, match="function of its own"):
            request(other)
        with pytest.raises(NotCovered, match="function of its own"):
            request(OnCopies(other))
    module.forward = types.MethodType(lambda self, x, options: x * 2, module)  # type: ignore[method-assign]
    guard.begin_run()
    with pytest.raises(NotCovered, match="replaced"):
        request(module.forward)


def test_where_another_dtype_is_the_usual_one_no_graph_answers() -> None:
    library, module = GraphLibrary(GraphCache(1 << 30), Metrics()), Net()
    run = RunContext(RunReport(Metrics(), library.metrics, lambda _kind, _signature: None))
    guard = ModuleGuard(library, HOST)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with pytest.raises(NotCovered, match="default dtype"):
            guard.request(Invocation(module, module.forward, (torch.ones(1), {}), {}), run)
    finally:
        torch.set_default_dtype(torch.float32)


def late(x: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    return x + 1 if options["sigmas"] else x


def always(x: torch.Tensor, _options: dict[str, Any]) -> torch.Tensor:
    return x + 2


class Guarded:
    """A guard that knows: the module reads ``patches``, and with ``late`` among them, ``sigmas``."""

    def __init__(self) -> None:
        library, self.module = GraphLibrary(GraphCache(1 << 30), Metrics()), Net()
        self.index = library.index
        self.run = RunContext(RunReport(Metrics(), library.metrics, lambda _kind, _signature: None))
        self.guard = ModuleGuard(library, HOST)
        fingerprint = self.request().target.fingerprint
        library.index.learn_option(fingerprint, "patches")
        request = self.guard.up_to_date(self.request(patches=[late], sigmas=3))
        self.reader = reader_of(fingerprint, request.call.code)
        library.index.learn_option(self.reader, "sigmas")

    def request(self, **options: Any) -> Request:
        invocation = Invocation(self.module, self.module.forward, (torch.ones(1), options), {})
        with torch.no_grad():
            return self.guard.request(invocation, self.run)


ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)
CALLS: list[dict[str, Any]] = [
    {"patches": [late], "sigmas": 3},
    {"sigmas": 3},
    {"patches": [late], "sigmas": 3},
    {"patches": [always], "sigmas": ENDLESS},  # which no graph can take, and which this function does not read
    {"patches": [late], "sigmas": 4},
    {"patches": [late, always], "sigmas": 4},
]


def test_a_call_has_the_same_name_whatever_the_call_before_it_was() -> None:
    guarded = Guarded()
    keys = [guarded.request(**options).key for options in CALLS]
    assert keys == [Guarded().request(**options).key for options in CALLS]
    assert keys[0] == keys[2] and len(set(keys)) == 5


def test_a_call_with_the_functions_of_the_one_before_is_split_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each step, that is. An image prompt has seventy functions, and their tensors are among what is split."""
    guarded, splits = Guarded(), list[Any]()

    def counted(*args: Any, **kwargs: Any) -> Any:
        splits.append(args)
        return split(*args, **kwargs)

    monkeypatch.setattr("onediff_comfy.serving.module_guard.split", counted)
    guarded.request(**CALLS[0])
    splits.clear()
    guarded.request(**CALLS[0])
    assert len(splits) == 1


def test_what_functions_are_found_to_read_counts_from_the_next_call_on() -> None:
    guarded = Guarded()
    before = guarded.request(**CALLS[0], cond=1)
    guarded.index.learn_option(guarded.reader, "cond")
    after = guarded.request(**CALLS[0], cond=1)
    assert "cond" in str(after.call.signature.structure) and "cond" not in str(before.call.signature.structure)
