"""target.py and trace_forward.py: a forward that keeps something from call to call is no graph's, and is not disturbed.

A trace runs a forward once. What it counts meanwhile is put back, and what stands in for tensors does not stay behind.
"""

from __future__ import annotations

import functools
import sys
import types
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

from onediff_comfy.capture.target.target import KeepsState, Target
from onediff_comfy.compilation import compile_graph
from onediff_comfy.compilation.compile_graph import HostServices
from onediff_comfy.compilation.library import GraphLibrary
from onediff_comfy.serving.dispatcher import Dispatcher

HOST = HostServices("host", "transformer_options", {}, lambda: None, lambda _layers: None)
COUNTED = {"calls": 0}
calls = 0


class Counter:
    def __init__(self) -> None:
        self.calls = 0


class Scaled(nn.Module):
    """Each call gives more than the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.begin()

    def begin(self) -> None:
        """As a new process would."""

    def forward(self, x: torch.Tensor, transformer_options: dict[str, Any] = {}) -> torch.Tensor:  # noqa: B006
        return self.linear(x) * (1 + 0.1 * self.counted())

    def counted(self) -> int:
        raise NotImplementedError


class ByAttribute(Scaled):
    def begin(self) -> None:
        self.calls = 0

    def counted(self) -> int:
        self.calls += 1
        return self.calls


class ByDict(Scaled):
    """As extensions that leave out steps do."""

    def begin(self) -> None:
        self.state = {"calls": 0}

    def counted(self) -> int:
        self.state["calls"] += 1
        return self.state["calls"]


class ByObject(Scaled):
    def begin(self) -> None:
        self.counter = Counter()

    def counted(self) -> int:
        self.counter.calls += 1
        return self.counter.calls


class ByVariable(Scaled):
    def begin(self) -> None:
        COUNTED["calls"] = 0

    def counted(self) -> int:
        COUNTED["calls"] += 1
        return COUNTED["calls"]


class ByGlobal(Scaled):
    def begin(self) -> None:
        global calls
        calls = 0

    def counted(self) -> int:
        global calls
        calls += 1
        return calls


class ByClosure(Scaled):
    def begin(self) -> None:
        calls = 0

        def count() -> int:
            nonlocal calls
            calls += 1
            return calls

        self.count = count

    def counted(self) -> int:
        return self.count()


class KeepingTensor(Scaled):
    def begin(self) -> None:
        self.state = {"before": torch.zeros(2, 4)}

    def forward(self, x: torch.Tensor, transformer_options: dict[str, Any] = {}) -> torch.Tensor:  # noqa: B006
        self.state["before"] = self.linear(x) + 0.5 * self.state["before"]
        return self.state["before"]


class ByBuffer(Scaled):
    def begin(self) -> None:
        self.register_buffer("calls", torch.zeros(()))

    def counted(self) -> Any:
        self.calls = self.calls + 1
        return self.calls


class ByParameter(Scaled):
    def begin(self) -> None:
        self.calls = nn.Parameter(torch.zeros(()), requires_grad=False)

    def counted(self) -> Any:
        self.calls = nn.Parameter(self.calls + 1, requires_grad=False)
        return self.calls


class ByLayers(Scaled):
    def begin(self) -> None:
        for name in [name for name in self._modules if name.startswith("call")]:
            delattr(self, name)

    def counted(self) -> int:
        self.add_module(f"call{len(self._modules)}", nn.Identity())
        return len(self._modules)


class Slotted:
    __slots__ = ("calls", "kept")

    def __init__(self) -> None:
        self.calls, self.kept = 0, None


COUNTER, SLOTTED, TABLE = Counter(), Slotted(), Slotted()


class BySlot(Scaled):
    def begin(self) -> None:
        self.counter = Slotted()

    def counted(self) -> int:
        self.counter.calls += 1
        return self.counter.calls


class OnItsClass(Scaled):
    """As extensions that leave out steps count: by ``self.__class__.cnt``."""

    calls = 0

    def begin(self) -> None:
        type(self).calls = 0

    def counted(self) -> int:
        type(self).calls += 1
        return type(self).calls


class OnAnotherKind(Scaled):
    def begin(self) -> None:
        Elsewhere.calls = 0

    def counted(self) -> int:
        Elsewhere.calls += 1
        return Elsewhere.calls


def _count() -> int:
    count: Any = _count
    count.calls += 1
    return count.calls  # type: ignore[no-any-return]


class OnFunction(Scaled):
    def begin(self) -> None:
        count: Any = _count
        count.calls = 0

    def counted(self) -> int:
        return _count()


class OnObject(Scaled):
    def begin(self) -> None:
        COUNTER.calls = 0

    def counted(self) -> int:
        COUNTER.calls += 1
        return COUNTER.calls


class OnSlot(Scaled):
    def begin(self) -> None:
        SLOTTED.calls = 0

    def counted(self) -> int:
        SLOTTED.calls += 1
        return SLOTTED.calls


class ByTensor(Scaled):
    """Not a buffer: to a trace it is a constant, which a forward may write to."""

    def begin(self) -> None:
        self.state = [torch.zeros(())]

    def counted(self) -> Any:
        return self.state[0].add_(1)


class Tabled(nn.Module):
    """Has a table that is made in its first call, and kept somewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, transformer_options: dict[str, Any] = {}) -> torch.Tensor:  # noqa: B006
        return self.linear(x) * self.table(x)

    def table(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Shaped(Tabled):
    """Keeps a tensor for its sizes alone, which has no values to be put back."""

    def __init__(self) -> None:
        super().__init__()
        self.like = torch.empty(4, device="meta")

    def table(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_ones(self.like.shape)


class OnClass(Tabled):
    kept: Any = None

    def table(self, x: torch.Tensor) -> torch.Tensor:
        if type(self).kept is None:
            type(self).kept = torch.arange(x.shape[-1], dtype=x.dtype)
        return type(self).kept  # type: ignore[no-any-return]


class OnMethod(Tabled):
    def table(self, x: torch.Tensor) -> torch.Tensor:
        method: Any = OnMethod.table
        if not hasattr(method, "kept"):
            method.kept = torch.arange(x.shape[-1], dtype=x.dtype)
        return method.kept  # type: ignore[no-any-return]


class Kind(type):
    @property
    def kept(cls) -> torch.Tensor:
        if "_kept" not in vars(cls):
            cls._kept = torch.arange(4.0)
        return cls._kept  # type: ignore[no-any-return, has-type]


class Elsewhere(metaclass=Kind):
    """No class of a layer's."""

    calls = 0


class OnAnotherClass(Tabled):
    def table(self, x: torch.Tensor) -> torch.Tensor:
        return Elsewhere.kept + x.new_zeros(4)


class InSlot(Tabled):
    def table(self, x: torch.Tensor) -> torch.Tensor:
        if TABLE.kept is None:
            TABLE.kept = torch.arange(x.shape[-1], dtype=x.dtype)
        return TABLE.kept


class OnTensor(Tabled):
    def __init__(self) -> None:
        super().__init__()
        self.like: list[Any] = [torch.zeros(4)]

    def table(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self.like[0], "kept"):
            self.like[0].kept = torch.arange(x.shape[-1], dtype=x.dtype)
        return self.like[0].kept  # type: ignore[no-any-return]


class InAModule(Tabled):
    def table(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(torch, "_kept_for_this_test"):
            torch._kept_for_this_test = torch.arange(x.shape[-1], dtype=x.dtype)
        return torch._kept_for_this_test  # type: ignore[no-any-return]


@functools.lru_cache
def _few(size: int) -> torch.Tensor:
    return torch.arange(size, dtype=torch.float32)


@functools.cache
def _pair(size: int) -> dict[str, list[torch.Tensor]]:
    return {"both": [torch.arange(size, dtype=torch.float32), torch.ones(size)]}


class Remembered(Tabled):
    def table(self, x: torch.Tensor) -> torch.Tensor:
        return _few(x.shape[-1]) + sum(_pair(x.shape[-1])["both"])  # type: ignore[return-value]


@pytest.mark.parametrize("kind", [OnClass, OnMethod, OnAnotherClass, InSlot, OnTensor, InAModule, Remembered, Shaped])
def test_tables_of_a_process_hold_numbers_after_a_trace(kind: type[Tabled], library: GraphLibrary) -> None:
    """Extensions keep them on classes, on functions and by functools.lru_cache, for all models."""
    module, x = kind(), torch.randn(2, 4)
    for _process in range(2):
        dispatcher = Dispatcher("eager", library, HOST)
        for given in _three(lambda x: dispatcher(module, module.forward, (x,), {}), x):  # noqa: B023
            assert type(given) is torch.Tensor and type(module.table(x)) is torch.Tensor
            torch.testing.assert_close(given, module(x))
        assert dispatcher.metrics.snapshot()["served"] or not isinstance(module, Shaped)


class Lazy:
    """Imports what it stands for as soon as anything is asked of it, and cannot: like ``six.moves.dbm_gnu``."""

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise ModuleNotFoundError("No module named '_gdbm'")

    def __getattr__(self, name: str) -> NoReturn:
        raise ModuleNotFoundError("No module named '_gdbm'")


class LazyKind(type):
    def __getattribute__(cls, name: str) -> NoReturn:
        raise ModuleNotFoundError("No module named '_gdbm'")


class LazyModule(types.ModuleType):
    dbm_gnu = Lazy()

    def __getattribute__(self, name: str) -> Any:
        if name in {"__spec__", "__file__"}:  # Python's own import asks
            return object.__getattribute__(self, name)
        raise ModuleNotFoundError("No module named '_gdbm'")


def test_modules_that_import_when_they_are_asked_for_something_are_not_asked(
    library: GraphLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the process holds beside the model. A trace looks through all of it for tensors of its own."""
    lazy = LazyModule("lazy_moves")
    object.__getattribute__(lazy, "__dict__").update(
        LazyModule=LazyModule, dbm_gnu=Lazy(), Kind=LazyKind("Kind", (), {"dbm_gnu": Lazy()})
    )
    monkeypatch.setitem(sys.modules, "lazy_moves", lazy)
    module, dispatcher, x = Remembered(), Dispatcher("eager", library, HOST), torch.randn(2, 4)
    for given in _three(lambda x: dispatcher(module, module.forward, (x,), {}), x):
        torch.testing.assert_close(given, module(x))
    assert dispatcher.metrics.snapshot()["served"] == 3


class Making(nn.Module):
    """Makes a layer and a table when it is called first, of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, transformer_options: dict[str, Any] = {}) -> torch.Tensor:  # noqa: B006
        if not hasattr(self, "made"):
            self.made = nn.Linear(x.shape[-1], 4)
            self.register_buffer("table", torch.arange(x.shape[-1], dtype=x.dtype) * x.abs().max(), persistent=False)
        return self.made(self.linear(x)) + self.table


def test_what_a_first_call_makes_is_made_of_numbers_and_served_from_then_on(library: GraphLibrary) -> None:
    """Not by a trace, whose tensors hold none: the model would give such tensors ever after."""
    module, dispatcher, x = Making(), Dispatcher("eager", library, HOST), torch.randn(2, 4)
    given = _three(lambda x: dispatcher(module, module.forward, (x,), {}), x)
    assert {type(each) for each in (*module.parameters(), *module.buffers())} <= {nn.Parameter, torch.Tensor}
    for each in given:
        torch.testing.assert_close(each, module(x))
    assert dispatcher.metrics.snapshot()["served"] == 2


class PuttingBack(Scaled):
    """Takes a buffer away for a moment: afterwards it is behind another."""

    def begin(self) -> None:
        self.register_buffer("one", torch.ones(()))
        self.register_buffer("other", torch.ones(()))

    def counted(self) -> Any:
        one = self.one
        del self.one
        self.register_buffer("one", one)
        return self.other


def test_a_forward_that_changes_the_order_of_buffers_is_said_to_change_them(library: GraphLibrary) -> None:
    module, dispatcher, x = PuttingBack(), Dispatcher("eager", library, HOST), torch.randn(2, 4)
    for given in _three(lambda x: dispatcher(module, module.forward, (x,), {}), x):
        torch.testing.assert_close(given, module(x))
    assert {"one", "other"} & {word for reason in library.metrics.snapshot()["fallbacks"] for word in reason.split()}


def _three(call: Any, x: torch.Tensor) -> list[torch.Tensor]:
    with torch.no_grad():
        return [call(x) for _ in range(3)]


class InOptions(nn.Module):
    """Writes into what an option holds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, transformer_options: dict[str, Any] = {}) -> torch.Tensor:  # noqa: B006
        for memo in transformer_options.get("memo", []):
            memo["count"] = memo.get("count", 0) + 1
            x = x * memo["count"] + memo.get("last", 0.0)
            memo["last"] = x
        transformer_options["block"] = 0  # as the host's models do, of an option itself
        return self.linear(x)


@pytest.mark.parametrize("memos", [0, 1])
def test_what_a_forward_writes_into_an_option_is_there_in_the_next_call(memos: int, library: GraphLibrary) -> None:
    """A trace writes to a copy of it. Setting options themselves keeps no graph away."""
    module, x = InOptions(), torch.randn(2, 4)
    options, ours = ({"memo": [{} for _ in range(memos)]} for _ in range(2))
    dispatcher = Dispatcher("eager", library, HOST)
    expected = _three(lambda x: module(x, options), x)
    given = _three(lambda x: dispatcher(module, module.forward, (x, ours), {}), x)
    torch.testing.assert_close(given, expected)
    assert library.metrics.snapshot()["served"] == (0 if memos else 3)


KINDS = [
    *(ByAttribute, ByDict, ByObject, ByVariable, ByGlobal, ByClosure, KeepingTensor),
    *(ByBuffer, ByParameter, ByLayers, BySlot, ByTensor, OnItsClass, OnAnotherKind, OnFunction, OnObject, OnSlot),
]


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_forward_counts_goes_on(kind: type[Scaled], library: GraphLibrary) -> None:
    """In a first process and in one that finds what the first has made and proved."""
    module, x = kind(), torch.randn(2, 4)
    expected = _three(module, x)
    for _process in range(2):
        module.begin()
        dispatcher = Dispatcher("eager", library, HOST)
        for turn, call in enumerate(_three(lambda x: dispatcher(module, module.forward, (x,), {}), x)):  # noqa: B023
            torch.testing.assert_close(call, expected[turn])
        torch.testing.assert_close(_three(module, x)[0], _three_after(kind, module, x))
    assert any("changes" in reason or "is mutated" in reason for reason in library.metrics.snapshot()["fallbacks"])


def _three_after(kind: type[Scaled], module: Scaled, x: torch.Tensor) -> torch.Tensor:
    """Return what a module gives after three calls, if it was called by nobody else."""
    alone = kind()
    alone.linear = module.linear
    _three(alone, x)
    return _three(alone, x)[0]


def _image(dispatcher: Dispatcher, module: Any, x: torch.Tensor) -> Any:
    """A run of one call."""
    dispatcher.begin_run()
    with torch.no_grad():
        return dispatcher(module, module.forward, (x,), {})


class Noting(nn.Module):
    """As Cosmos Predict2 does it: each call leaves something on the module that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, transformer_options: dict[str, Any] = {}) -> torch.Tensor:  # noqa: B006
        self.noted_for_nobody = [x]
        return self.linear(x)


def test_what_a_first_call_notes_for_nobody_keeps_no_graph_away(library: GraphLibrary) -> None:
    module, x = Noting(), torch.randn(2, 4)
    dispatcher = Dispatcher("eager", library, HOST)
    for _run in range(2):
        torch.testing.assert_close(_image(dispatcher, module, x), module.linear(x))
    snapshot = library.metrics.snapshot()
    assert (snapshot["captured"], snapshot["served"], snapshot["fallbacks"]) == (1, 2, {})


class Remembering(nn.Module):
    """Fills a table once."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(4, 4), dict[int, torch.Tensor]()

    def forward(self, x: torch.Tensor, transformer_options: dict[str, Any] = {}) -> torch.Tensor:  # noqa: B006
        if x.shape[1] not in self.table:
            self.table[x.shape[1]] = torch.arange(x.shape[1]) * 0.1
        return self.linear(x) + self.table[x.shape[1]]


def test_a_table_that_is_filled_once_is_served_when_it_is_full(library: GraphLibrary) -> None:
    module, x = Remembering(), torch.randn(2, 4)
    dispatcher = Dispatcher("eager", library, HOST)
    for _run in range(3):
        output = _image(dispatcher, module, x)
        assert type(module.table[4]) is torch.Tensor, "what stood in for it stayed behind"
        torch.testing.assert_close(output, module.linear(x) + module.table[4])
    assert library.metrics.snapshot()["served"] == 2


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The fingerprint of each target that is traced, in order."""
    fingerprints, trace = list[str](), compile_graph.capture

    def noted(target: Any, *arguments: Any) -> Any:
        fingerprints.append(target.fingerprint)
        return trace(target, *arguments)

    monkeypatch.setattr(compile_graph, "capture", noted)
    return fingerprints


def test_what_counts_in_every_image_is_not_traced_in_every_image(library: GraphLibrary, traced: list[str]) -> None:
    module, x, dispatcher = ByDict(), torch.randn(2, 4), Dispatcher("eager", library, HOST)
    for _run in range(8):
        _image(dispatcher, module, x)
    assert len(traced) == 3 == len(set(traced)), "a table that is filled once makes one"


def test_one_image_is_not_traced_again_and_again_when_that_is_known(library: GraphLibrary, traced: list[str]) -> None:
    module, x, dispatcher = ByDict(), torch.randn(2, 4), Dispatcher("eager", library, HOST)
    for _run in range(4):
        _image(dispatcher, module, x)
        with torch.no_grad():
            for _step in range(3):
                dispatcher(module, module.forward, (x,), {})
    assert len(traced) == 3


class Caching(nn.Module):
    """As extensions that leave out steps do it: with their node it keeps what it computed, and without it nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.kept = nn.Linear(4, 4), dict[str, Any]()
        self.settings = {"number": 0}  # of their node; none at 0

    def forward(self, x: torch.Tensor, transformer_options: dict[str, Any] = {}) -> torch.Tensor:  # noqa: B006
        if not self.settings["number"]:
            return self.linear(x)
        output = self.linear(x) + sum(self.kept.get("before", [torch.zeros(4)]))
        self.kept.setdefault("before", [output])[:] = [output * self.settings["number"]]
        return output


@pytest.mark.parametrize("before", [True, False])
def test_a_model_is_served_again_once_it_keeps_nothing(before: bool, library: GraphLibrary) -> None:
    """At once if it was served so before, else from the second image."""
    module, x, dispatcher = Caching(), torch.randn(2, 4), Dispatcher("eager", library, HOST)
    for number in (*([0] if before else []), 1, 2, 3, 4, 5):
        module.settings["number"] = number
        _image(dispatcher, module, x)
    assert library.metrics.snapshot()["served"] == before
    module.settings["number"] = 0
    module.kept.clear()
    for _run in range(3):
        torch.testing.assert_close(_image(dispatcher, module, x), module.linear(x))
    assert library.metrics.snapshot()["served"] == (4 if before else 2)


def test_what_a_call_has_made_since_the_model_was_described_is_no_traces_to_write(library: GraphLibrary) -> None:
    """A call that is eager makes a list, and the next one, which is traced, would have put a fake tensor into it."""
    module, x = Caching(), torch.randn(2, 4)
    module.settings["number"] = 1
    target = Target(module)
    with torch.no_grad():
        module(x)
        (kept,) = module.kept["before"]
        with pytest.raises(KeepsState), target.unchanged():
            module(x)
    assert module.kept["before"][0] is kept


def test_a_module_that_is_another_by_now_is_not_traced_under_the_name_of_what_it_was() -> None:
    module = Caching()
    target = Target(module)
    module.settings["number"] = 1
    for _trace in range(2):
        with pytest.raises(KeepsState), target.unchanged():
            pytest.fail("it was traced")
    assert not target.is_current()


class Telling(nn.Module):
    """Leaves a tensor in the options, for whoever called it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, transformer_options: dict[str, Any] = {}) -> torch.Tensor:  # noqa: B006
        transformer_options["hidden"] = self.linear(x)
        return transformer_options["hidden"] * 2


def test_a_tensor_that_a_forward_leaves_in_the_options_is_found_there(library: GraphLibrary) -> None:
    module, x, dispatcher = Telling(), torch.randn(2, 4), Dispatcher("eager", library, HOST)
    dispatcher.begin_run()
    for _step in range(3):
        options = dict[str, Any]()
        with torch.no_grad():
            output = dispatcher(module, module.forward, (x,), {"transformer_options": options})
        torch.testing.assert_close(options["hidden"] * 2, output)
