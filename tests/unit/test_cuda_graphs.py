"""cuda_graphs.py: what is replayed is what a direct call gives, and memory comes back. Most of it needs a GPU."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from onediff_comfy.capture.export import Binding
from onediff_comfy.capture.shape_range import ShapeRange
from onediff_comfy.engines.base import CompiledGraph
from onediff_comfy.engines.eager import EagerGraph
from onediff_comfy.runtime import cuda_graphs, device_memory, launch_bound, recording, recording_pool, stream_capture
from onediff_comfy.runtime.cuda_graphs import MOST_RECORDINGS, RecordedGraph
from onediff_comfy.runtime.device_memory import HostMemory, memory_errors, wants_memory
from onediff_comfy.runtime.launch_bound import Backlog, Idling, Launching, MovingWeights, RecordWhen, When
from onediff_comfy.runtime.recording_pool import RecordingPool

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
MANY = 1 << 40  # bytes
MB = 1 << 20


class Function(CompiledGraph):
    """A graph that runs ``function(weight, x)``, and counts how often its Python runs: not in a replay."""

    def __init__(self, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], size: int = 7) -> None:
        tree = torch.utils._pytree.tree_structure([0])
        super().__init__(Binding((), {}, tree), ShapeRange(((4,),), {}))
        self.function, self.code_bytes = function, size
        self.calls = 0

    def __call__(self, weights: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        self.calls += 1
        return [self.function(weights[0], tensors[0])]


class Recorded:
    """A recorded graph, called with one weight and one tensor."""

    def __init__(
        self,
        function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda w, x: torch.tanh(x @ w) * 3,
        pool: RecordingPool | None = None,
    ) -> None:
        self.pool = pool if pool is not None else RecordingPool(lambda: MANY)
        self.inner = Function(function)
        self.made = 0
        self.graph = RecordedGraph(self.inner, self.pool, self._count)

    def _count(self) -> None:
        self.made += 1

    def __call__(self, weight: torch.Tensor, x: torch.Tensor, when: When = RecordWhen.ALWAYS) -> torch.Tensor:
        (output,) = self.graph.run([weight], [weight.data_ptr()], [x], when)
        return output

    def right(self, weight: torch.Tensor, x: torch.Tensor) -> bool:
        """Whether one call gives what a direct one gives."""
        torch.testing.assert_close(self(weight, x), self.inner.function(weight, x))
        return True


def on_gpu(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda")


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# -- without a GPU -----------------------------------------------------------------------------


def test_calls_on_the_cpu_are_handed_on() -> None:
    run = Recorded()
    weight = torch.randn(4, 4)
    for batch in (2, 2, 2, 3):
        assert run.right(weight, torch.randn(batch, 4))
    assert (run.inner.calls, run.made, run.graph.recordings, run.pool.nbytes) == (4, 0, 0, 0)


def test_the_inner_graphs_own_outputs_are_handed_on() -> None:
    """Nothing is copied where nothing is recorded."""
    x = torch.randn(2, 4)
    assert Recorded(lambda _w, x: x)(torch.randn(4, 4), x) is x


def test_it_is_called_like_the_graph_inside(capture_of: Any) -> None:
    captured = capture_of(nn.Linear(4, 4), torch.randn(2, 4), general=True)
    inner = EagerGraph(captured.capture)
    graph = RecordedGraph(inner, RecordingPool(lambda: MANY), lambda: None)
    assert (graph.binding, graph.shapes) == (inner.binding, inner.shapes)
    assert graph.shapes.general, "the cache lets graphs for one set of sizes go before it"


def test_its_size_is_that_of_the_graph_inside_as_it_is_now() -> None:
    """Recordings are counted by their pool, which is shared."""
    run = Recorded()
    assert run.graph.nbytes == 7
    run.inner.code_bytes = 9
    assert run.graph.nbytes == 9


def test_releasing_what_is_not_there_gives_nothing_back() -> None:
    run = Recorded()
    assert run.pool.release() == 0
    assert run.right(torch.randn(4, 4), torch.randn(2, 4))


def test_an_error_of_the_graph_inside_comes_out() -> None:
    def fail(_weight: torch.Tensor, _x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no kernel")

    with pytest.raises(RuntimeError, match="no kernel"):
        Recorded(fail)(torch.randn(4, 4), torch.randn(2, 4))


def test_a_pool_does_not_keep_graphs_alive() -> None:
    """An evicted graph is gone, with its recordings."""
    run = Recorded()
    graph = weakref.ref(run.graph)
    del run.graph
    gc.collect()
    assert graph() is None
    run.pool.budget_changed()  # which asks all that are there


class Stream:
    """A stream there, which others it has waited for, and how often the CPU has waited for it."""

    def __init__(self) -> None:
        self.waited_for: list[Stream] = []
        self.awaited = 0

    def synchronize(self) -> None:
        self.awaited += 1

    def wait_stream(self, other: Stream) -> None:
        self.waited_for.append(other)


class Card:
    """In the place of ``torch``: a GPU whose memory is a number, on which recording takes what a graph is said to need.

    Attributes:
        copied: how many tensors were copied at once, each time.
        least: how many bytes each recording's buffers were to be at least.
        kept: bytes that PyTorch has and no tensor uses.
        free: bytes that nobody has, where a test says so.
        given_back: how often PyTorch gave back what it kept.
        stream: that kernels are launched on.
        needs: bytes that the call takes which is being recorded.
        fails: what a replay raises, if anything.
        fails_to_begin: what the beginning of a recording raises, if anything.
        fails_to_end: what its end raises, if anything.
        told_before: PyTorch has told its allocator of that end by then.
        records: what PyTorch's allocator believes.
        released: how often a pool was given back without a recording.
        asked_for: told how many bytes somebody allocates for nothing but room.
    """

    OutOfMemoryError = torch.OutOfMemoryError

    def __init__(self) -> None:
        self.needs = self.held = self.kept = self.free = self.given_back = 0
        self.fails: Exception | None = None
        self.fails_to_begin: Exception | None = None
        self.fails_to_end: Exception | None = None
        self.told_before = self.records = False
        self.released = 0
        self.copied, self.least = list[int](), list[int]()
        self.asked_for: Callable[[int], None] = lambda _nbytes: None
        self.uint8 = torch.uint8
        self.stream = Stream()
        nothing = contextlib.nullcontext()
        stream = Stream()
        self.cuda = SimpleNamespace(
            CUDAGraph=lambda: SimpleNamespace(capture_begin=self._begin, capture_end=self._take, replay=self._replay),
            Stream=lambda _device: stream,
            current_stream=lambda _device: self.stream,
            device=lambda _device: nothing,
            empty_cache=self._give_back,
            get_allocator_backend=lambda: "native",
            get_rng_state=lambda _device: None,
            graph_pool_handle=object,
            mem_get_info=lambda _device: (MANY - self.held, MANY),
            memory_allocated=lambda _device: 0,
            memory_reserved=lambda _device: self.kept,
            stream=lambda _stream: nothing,
            synchronize=lambda _device: None,
        )
        self.inference_mode = torch.inference_mode
        self.addmm = lambda *_matrices: None
        self.cuda.default_generators = [SimpleNamespace(graphsafe_set_state=lambda _state: None)]
        self.Generator = lambda _device: SimpleNamespace(set_state=lambda _state: None)
        self._C = SimpleNamespace(
            _cuda_clearCublasWorkspaces=lambda: None,
            _cuda_endAllocateToPool=lambda _index, _handle: self._end(),
            _cuda_releasePool=self._release,
        )

    def empty(self, shape: Any, device: object, dtype: object = None) -> Any:
        if dtype is not None:
            self.asked_for(shape)
        return (None, None)

    def empty_like(self, tensor: Any, device: object) -> Any:
        return tensor.clone()

    def buffers(self, likes: Sequence[Any], least: int) -> tuple[None, list[Any]]:
        self.least.append(least)
        return None, list(map(_like, likes))

    def _foreach_copy_(self, into: Sequence[OnCard], given: Sequence[OnCard]) -> None:
        self.copied.append(len(given))

    def _begin(self, **_options: Any) -> None:
        assert not self.records
        self.records = True
        if self.fails_to_begin is not None:
            raise self.fails_to_begin

    def _end(self) -> None:
        if not self.records:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.records = False

    def _release(self, _index: int, _handle: object) -> None:
        self.released += 1

    def _take(self) -> None:
        if self.fails_to_end is None or self.told_before:
            self._end()
        if self.fails_to_end is not None:
            raise self.fails_to_end
        self.held += self.needs

    def _replay(self) -> None:
        if self.fails is not None:
            raise self.fails

    def _give_back(self) -> None:
        self.held = 0
        self.given_back += 1


class OnCard:
    """A tensor of one row there, without values."""

    device = torch.device("cuda")

    def __init__(self, columns: int, dtype: torch.dtype = torch.float16) -> None:
        self.shape, self.dtype, self.nbytes = (1, columns), dtype, columns * dtype.itemsize

    def copy_(self, other: OnCard) -> OnCard:
        self.copied_from = other
        return self

    def clone(self) -> OnCard:
        return OnCard(self.shape[1], self.dtype)

    def to(self, _device: str) -> OnCard:
        return self

    def data_ptr(self) -> int:
        return 0


class Part:
    """A model's part on the card: the graph, what its recording needs there, and how often it was recorded."""

    def __init__(self, card: Card, pool: RecordingPool, nbytes: int) -> None:
        def run(_weight: Any, x: Any) -> Any:
            card.needs = nbytes
            return x

        self._run, self.pool = Recorded(run, pool), pool

    @property
    def made(self) -> int:
        return self._run.made

    @property
    def recordings(self) -> int:
        return self._run.graph.recordings

    def calls(self, count: int = 1, columns: int = 4) -> None:
        for _ in range(count):
            self._run.graph.run([OnCard(1)], [0], [OnCard(columns)])  # type: ignore[list-item]

    def replays(self, columns: int = 4) -> bool:
        """Whether a call launches nothing kernel by kernel."""
        before = self._run.inner.calls
        self.calls(columns=columns)
        return self._run.inner.calls == before


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    card = Card()
    for module in (cuda_graphs, device_memory, recording, recording_pool, stream_capture):
        monkeypatch.setattr(module, "torch", card)
    monkeypatch.setattr(Launching, "measured", lambda *_args: contextlib.nullcontext())
    monkeypatch.setattr(recording_pool.DevicePool, "buffers", lambda _self, *asked: card.buffers(*asked))
    return card


def _like(tensor: Any) -> Any:
    with torch.inference_mode(False):
        return None if tensor is None else tensor.clone()


def test_the_addresses_of_weights_are_not_read_again(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call has read those of a thousand weights, to see whether they are the same."""
    run = Recorded(lambda _weight, x: x, RecordingPool(lambda: MANY))
    monkeypatch.setattr(OnCard, "data_ptr", lambda _self: pytest.fail("read again"))
    for address in (1, 1, 1, 2, 2):
        run.graph.run([OnCard(1)], [address], [OnCard(4)])  # type: ignore[list-item]
    assert (run.made, run.inner.calls) == (2, 4), "weights at another address are another recording"


def test_a_number_in_ram_is_not_recorded(card: Card, caplog: pytest.LogCaptureFixture) -> None:
    """Kernels are given it by value: a replay would compute with the one that was recorded."""
    run, number = Recorded(lambda _weight, x: x, RecordingPool(lambda: MANY)), OnCard(1)
    number.device = torch.device("cpu")  # type: ignore[misc]
    for _ in range(4):
        run.graph.run([number], [0], [OnCard(4)])  # type: ignore[list-item]
    assert (run.made, run.inner.calls) == (0, 4)
    (warning,) = warnings(caplog)
    assert "a weight is not on the device" in warning


def test_nothing_is_recorded_while_the_host_may_have_to_find_memory(
    card: Card, caplog: pytest.LogCaptureFixture
) -> None:
    """It waits for the device then, in the middle of the recording, and the process ends."""
    part = Part(card, RecordingPool(lambda: MANY, HostMemory(lambda: 500 * MB)), 100 * MB)
    card.kept = 200 * MB  # what a call has used
    card.cuda.mem_get_info = lambda _device: (card.free, MANY)
    card.free = 699 * MB
    part.calls(30)
    assert part.made == 0 and card.given_back == 0
    (warning,) = warnings(caplog)
    assert "while memory is short" in warning
    card.free, card.kept = 599 * MB, 100 * MB  # what it has used alone: more was kept of others' calls
    part.calls(42)
    assert part.made == 0
    card.free = 600 * MB
    part.calls(30)
    assert part.made == 1 and part.replays()
    card.free = 0
    assert part.replays(), "what there is goes on"


def test_where_the_host_listens_to_no_allocation_memory_may_be_short(card: Card) -> None:
    part = Part(card, RecordingPool(lambda: MANY), 100 * MB)
    card.kept = MANY
    part.calls(2)
    assert part.made == 1


def test_an_output_may_be_none(card: Card) -> None:
    """As a text encoder's for a layer in between, which nobody asked for."""
    run = Recorded(lambda _weight, _x: None, RecordingPool(lambda: MANY))  # type: ignore[arg-type,return-value]
    for when in (*[RecordWhen.ALWAYS] * 3, RecordWhen.LAUNCH_BOUND):
        outputs = run.graph.run([OnCard(1)], [0], [OnCard(4)], when)  # type: ignore[list-item]
        assert outputs == [None]
    assert (run.made, run.inner.calls) == (1, 2)


def test_a_replay_waits_for_what_is_asked_once_its_inputs_are_in_place(card: Card) -> None:
    run, asked = Recorded(lambda _weight, x: x, RecordingPool(lambda: MANY)), [False, True, True, False, True]

    def called() -> bool:
        def confirmed() -> bool:
            copies.append(list(card.copied))
            return asked.pop(0)

        card.copied.clear()
        copies: list[list[int]] = []
        wanted = asked[0]
        outputs = run.graph.run([OnCard(1)], [0], [OnCard(4)], confirmed=confirmed)  # type: ignore[list-item]
        assert (outputs is not None) == wanted
        return copies == [[1]]

    assert [called() for _ in range(5)] == [False, False, False, True, True], "only a replay has inputs to be copied"
    assert (run.made, run.inner.calls) == (1, 2), "what is not wanted is not launched, nor recorded"


def test_a_replay_leaves_outputs_where_they_are_asked_for_once_all_others_are_copied(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For want of memory it may be done again, with what it was given."""
    both = Function(lambda _weight, x: x)
    monkeypatch.setattr(Function, "__call__", lambda _self, _weights, tensors: [tensors[0], tensors[0]])
    graph, places = RecordedGraph(both, RecordingPool(lambda: MANY), lambda: None), [OnCard(4) for _ in range(4)]

    def run(place: OnCard) -> Any:
        return graph.run([OnCard(1)], [0], [OnCard(4)], into={1: place})  # type: ignore[list-item,dict-item]

    *launched, (copy, left) = [run(place) for place in places[:3]]
    assert all(place not in outputs for place, outputs in zip(places, launched, strict=False))
    assert left is places[2] and copy is not left
    monkeypatch.setattr(OnCard, "clone", lambda _self: (_ for _ in ()).throw(torch.OutOfMemoryError))
    with pytest.raises(torch.OutOfMemoryError):
        run(places[3])
    assert [hasattr(place, "copied_from") for place in places] == [False, False, True, False]


def test_inputs_of_one_type_are_copied_at_once(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for types that PyTorch has no such kernel for."""
    alone: list[torch.dtype] = []
    monkeypatch.setattr(OnCard, "copy_", lambda own, _given: alone.append(own.dtype), raising=False)
    graph = RecordedGraph(Function(lambda _weight, x: x), RecordingPool(lambda: MANY), lambda: None)
    several = [*(OnCard(n) for n in (1, 2, 3)), *(OnCard(n, torch.float64) for n in (4, 5)), OnCard(6, torch.uint16)]
    for _ in range(3):
        card.copied.clear()
        alone.clear()
        graph.run([OnCard(1)], [0], several)  # type: ignore[list-item,arg-type]
    assert (card.copied, alone) == ([3, 2], [torch.uint16])


def test_a_replay_on_another_stream_waits_for_the_one_before(card: Card) -> None:
    """They share inputs, outputs and memory: two of them at once would write into each other's picture."""
    part = Part(card, RecordingPool(lambda: 1000 * MB), 100 * MB)
    part.calls(3)
    first, card.stream = card.stream, Stream()
    assert part.replays() and part.replays()
    second, card.stream = card.stream, first
    before = len(first.waited_for)
    assert part.replays()
    assert second.waited_for == [first] and first.waited_for[before:] == [second]


def test_a_model_may_die_in_a_replay_while_another_thread_records(card: Card) -> None:
    pool, stream = RecordingPool(lambda: MANY), torch.device("cuda")
    part, models = Part(card, pool, 100 * MB), [nn.Module()]
    part.calls(2)
    pool.release_with(models[0])
    replays, records = threading.Event(), threading.Event()

    def record() -> None:
        replays.wait(5)
        records.set()
        with pool.recording(stream), pool.on_device(stream).replaying():
            pass

    def replay() -> None:
        with pool.on_device(stream).replaying():
            replays.set()
            records.wait(5)
            time.sleep(0.05)  # the other is at its lock
            models.clear()

    threads = [threading.Thread(target=does, daemon=True) for does in (record, replay)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert not any(thread.is_alive() for thread in threads)
    assert pool.nbytes == 0


def test_a_release_in_the_middle_of_a_recording_is_made_after_it(card: Card) -> None:
    """A garbage collection may find a dead model at any time."""
    pool = RecordingPool(lambda: 1000 * MB)
    dies: list[int] = []

    def run(_weight: Any, x: Any) -> Any:
        card.needs = 100 * MB
        if dies:
            dies.pop()
            assert pool.release() == 0
            assert pool.nbytes == 100 * MB, "memory of the other is given back while this one is recorded"
        return x

    other, part = Part(card, pool, 100 * MB), Recorded(run, pool)
    other.calls(2)
    assert pool.nbytes == 100 * MB
    for _ in range(2):  # the second is recorded
        dies += [1] * (part.inner.calls == 1)
        part.graph.run([OnCard(1)], [0], [OnCard(4)])  # type: ignore[list-item]
    assert (part.made, part.graph.recordings, pool.nbytes) == (1, 0, 0)
    other.calls()
    assert other.replays()


# -- threads of other GPUs ---------------------------------------------------------------------


@pytest.fixture
def one_records() -> RecordingPool:
    """A pool that this thread alone records in, as that of a host."""
    pool = RecordingPool(lambda: 1000 * MB)
    pool.turns.record_on_this_thread()
    return pool


def elsewhere(does: Callable[[], object]) -> Any:
    """What something gives in another thread, which is gone then."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(does).result()


def test_what_other_threads_call_is_recorded_when_they_are_gone(card: Card, one_records: RecordingPool) -> None:
    before, new = Part(card, one_records, 100 * MB), Part(card, one_records, 100 * MB)
    before.calls(2)
    assert elsewhere(lambda: (new.calls(5), before.replays())) == (None, True)
    assert (new.made, one_records.nbytes) == (0, 100 * MB)
    assert one_records.turns.record_what_was_left()
    assert (new.made, one_records.nbytes) == (1, 200 * MB)
    assert elsewhere(new.replays) and new.replays()
    assert one_records.turns.record_what_was_left() and new.made == 1, "nothing is left"


def test_what_was_left_is_not_recorded_if_memory_is_short_by_then(card: Card) -> None:
    pool = RecordingPool(lambda: MANY, HostMemory(lambda: 500 * MB))
    pool.turns.record_on_this_thread()
    card.free = 600 * MB
    card.cuda.mem_get_info = lambda _device: (card.free, MANY)
    part = Part(card, pool, 100 * MB)
    elsewhere(lambda: part.calls(3))
    card.free = 499 * MB
    assert pool.turns.record_what_was_left() and part.made == 0
    card.free = 600 * MB
    elsewhere(lambda: part.calls(3))
    assert pool.turns.record_what_was_left() and part.made == 1


def test_nothing_is_recorded_while_a_thread_that_left_something_lives(card: Card, one_records: RecordingPool) -> None:
    part = Part(card, one_records, 100 * MB)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(part.calls, 3).result()
        assert one_records.turns.record_what_was_left() and part.made == 0
    assert one_records.turns.record_what_was_left() and part.made == 0, "it was dropped, and comes with the next run"
    elsewhere(lambda: part.calls(1))
    assert one_records.turns.record_what_was_left() and part.made == 1


def test_another_thread_records_nothing_for_others(card: Card, one_records: RecordingPool) -> None:
    part = Part(card, one_records, 100 * MB)
    elsewhere(lambda: part.calls(3))
    assert elsewhere(one_records.turns.record_what_was_left) and part.made == 0


def test_what_a_model_that_goes_has_left_goes_along(card: Card, one_records: RecordingPool) -> None:
    part = Part(card, one_records, 100 * MB)
    elsewhere(lambda: part.calls(3))
    one_records.release()
    assert one_records.turns.record_what_was_left() and part.made == 0


def test_weights_that_moved_after_a_call_was_left_are_not_recorded_where_they_were(
    card: Card, one_records: RecordingPool
) -> None:
    run = Recorded(lambda _weight, x: x, one_records)

    def calls(address: int) -> None:
        run.graph.run([OnCard(1)], [address], [OnCard(4)])  # type: ignore[list-item]

    elsewhere(lambda: [calls(address) for address in (1, 1, 1, 2)])
    assert one_records.turns.record_what_was_left() and run.made == 0
    elsewhere(lambda: [calls(2) for _ in range(2)])
    assert one_records.turns.record_what_was_left() and run.made == 1


def test_want_of_memory_and_errors_are_nothing_to_the_picture(card: Card, one_records: RecordingPool) -> None:
    """It is there when its run is recorded."""
    part = Part(card, one_records, 100 * MB)
    for error, enough in ((torch.OutOfMemoryError("none"), False), (RuntimeError("no kernel image"), True)):
        elsewhere(lambda: part.calls(3))
        card.fails = error
        assert one_records.turns.record_what_was_left() is enough
        assert part.recordings == 0
        card.fails = None
        one_records.release()


class Moving:
    """A block whose weight is at another address in each call, on a card where the host takes weights off for room.

    Attributes:
        waits: whether the device waits for such calls.
        taken: how many bytes the host made room for, each time.
        held: how often weights were held while something was recorded, and let go.
    """

    def __init__(self, card: Card, monkeypatch: pytest.MonkeyPatch, can_hold: bool = True) -> None:
        self.card, self.waits, self.taken, self.held = card, True, list[int](), list[str]()
        monkeypatch.setattr(Idling, "noted", lambda *_args: contextlib.nullcontext())
        monkeypatch.setattr(Idling, "waits", lambda *_args: self.waits)
        monkeypatch.setattr(Idling, "start_over", lambda _notes: setattr(self, "waits", False))
        card.asked_for = self._make_way
        card.cuda.mem_get_info = lambda _device: (card.free, MANY)
        host = HostMemory(lambda: 500 * MB, self._held if can_hold else None)
        self.run = Recorded(self._compute, RecordingPool(lambda: MANY, host))
        self.inner, self.address = self.run.inner, 0

    def _compute(self, weight: Any, x: Any) -> Any:
        if self.held[-1:] == ["held"]:
            assert weight is not self.weight, "its own copy is what a recording reads"
        return x

    def _make_way(self, nbytes: int) -> None:
        self.taken.append(nbytes)
        self.card.free = max(self.card.free, nbytes)

    @contextlib.contextmanager
    def _held(self, _device: object) -> Any:
        self.held.append("held")
        yield
        self.held.append("let go")

    def calls(self, count: int) -> None:
        when = MovingWeights()
        for _ in range(count):
            self.weight, self.address = OnCard(8, torch.float8_e4m3fn), self.address + 512
            self.run.graph.run([self.weight], [self.address], [OnCard(4)], when)  # type: ignore[list-item]


def test_weights_that_are_copied_are_replayed_as_others(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    block = Moving(card, monkeypatch)
    block.calls(3)
    (recording,) = block.run.graph.by_name.values()
    before = recording.replays
    block.calls(2)
    assert (block.run.made, recording.replays - before) == (1, 2)
    assert list(block.run.graph.by_name.values()) == [recording]


def test_weights_that_move_are_copied_for_a_recording(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the call itself takes is measured before, so that no more weights make way than have to."""
    block, card.kept = Moving(card, monkeypatch), 100 * MB
    block.calls(1)
    assert card.given_back == 0
    block.calls(1)
    assert (card.given_back, block.run.made) == (1, 0), "this call is measured, with nothing kept of others"
    assert card.stream.awaited == 1, "and in full"
    card.kept = 300 * MB  # by others, since
    block.calls(1)
    assert block.run.made == 1 and block.taken == [(100 + 96) * MB + 3 * 512]
    assert block.held == ["held", "let go"]
    launched = block.inner.calls
    block.calls(5)
    assert block.inner.calls == launched, "wherever its weights are"
    (made,) = block.run.graph.by_name.values()
    assert made.inputs.tensors[0].copied_from is block.weight  # type: ignore[union-attr]


class Blocks:
    """Blocks of one graph, each with a weight at its own place and another that is brought anew in each call."""

    def __init__(self, card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
        self.moving = Moving(card, monkeypatch)
        self.run, self.read = self.moving.run, list[Any]()
        self.graph, self.inner = self.run.graph, self.moving.inner
        self.own = [OnCard(8) for _ in range(4)]
        self.inner.function = lambda weight, x: x
        monkeypatch.setattr(type(self.inner), "__call__", self._compute)

    def _compute(self, weights: Any, tensors: Any) -> Any:
        self.inner.calls += 1
        self.read.append(list(weights))
        return [tensors[0]]

    def call(self, block: int, away: bool = False, columns: int = 8) -> Any:
        """Call a block; where its weight is ``away`` from its place, the host has brought it to where it had room."""
        brought, address = OnCard(columns, torch.float8_e4m3fn), 4096 + len(self.read)
        addresses = [address + 1 if away else 100 + block, address]
        self.graph.run([self.own[block], brought], addresses, [OnCard(4)], MovingWeights(range(100, 104)))  # type: ignore[list-item]
        return brought


def test_weights_at_their_own_places_are_read_there(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """So each block has a recording, in the memory of the first, and what is copied is what was brought."""
    blocks = Blocks(card, monkeypatch)
    for _ in range(4):
        for block in range(3):
            blocks.call(block)
    assert (blocks.run.made, blocks.graph.recordings) == (3, 3)
    assert len(blocks.moving.taken) == 1, "one block's room is the others', too"
    assert card.given_back == 3, "for the call that is measured, and for that room"
    launched = blocks.inner.calls
    for block, ((_, addresses), made) in enumerate(list(blocks.graph.by_name.items())):
        assert addresses == (100 + block, 0) and made.weights_move
        before, brought = made.replays, blocks.call(block)
        assert made.replays == before + 1
        assert made.inputs.tensors[0].copied_from is brought  # type: ignore[union-attr]
        assert len(made.inputs.tensors) == 2
    assert blocks.inner.calls == launched


def test_a_recording_reads_the_weight_at_its_place_and_a_copy_of_the_other(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = Blocks(card, monkeypatch)
    for _ in range(4):
        brought = blocks.call(1)
    assert blocks.run.made == 1
    in_place, copied = blocks.read[-1]
    assert in_place is blocks.own[1] and copied is not brought


def test_where_weights_are_for_one_call_alone_is_not_recorded(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """When an image begins, they are on their way back to their places."""
    blocks = Blocks(card, monkeypatch)
    for _ in range(4):
        blocks.call(0)
    for block in range(1, 4):
        blocks.call(block, away=True)
    assert blocks.run.made == 2, "what copies both is of any block"
    blocks.call(1)
    assert blocks.run.made == 2
    blocks.call(1)
    assert blocks.run.made == 3


def test_the_last_blocks_are_recorded_with_the_others_though_nothing_waits_for_them_any_more(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is launched takes memory beside that of recordings, and as many weights would have to be brought."""
    blocks = Blocks(card, monkeypatch)
    for _ in range(4):
        blocks.call(0)
    assert blocks.run.made == 1
    blocks.moving.waits = False
    for _ in range(3):
        for block in range(4):
            blocks.call(block)
    assert (blocks.run.made, blocks.graph.recordings) == (4, 4)
    assert len(blocks.moving.taken) == 1, "in the first one's memory"
    for _ in range(4):
        blocks.call(0, away=True)
    assert blocks.run.made == 5, "wherever they stay"
    blocks.graph.forget_recordings()
    for _ in range(4):
        blocks.call(0)
    assert blocks.graph.recordings == 0, "it is decided anew once they have gone"


@pytest.mark.parametrize(("evictable", "stay"), [(8, True), (7, False), (0, False)])
def test_recordings_stay_where_weights_make_way_for_what_comes_next(
    card: Card, monkeypatch: pytest.MonkeyPatch, evictable: int, stay: bool
) -> None:
    """Of a model that does not fit, memory is short after each image, and to record each block anew takes a step."""
    host = HostMemory(lambda: 500 * MB, evictable=lambda _device: evictable * 100 * MB)
    part = Part(card, RecordingPool(lambda: MANY, host), 100 * MB)
    part.calls(2)
    assert part.recordings == 1
    monkeypatch.setattr(recording_pool, "memory_is_short", lambda *_args: True)
    part.pool.release_if_short()
    assert (part.recordings == 1) is stay


class Sharing:
    """A recording, as far as others share its bytes."""

    def __init__(self, shared: torch.Tensor) -> None:
        self.shared = shared


def test_recordings_of_a_device_share_what_they_are_given_and_give() -> None:
    """Each replay fills it anew. A tensor there is like the one that it stands for, down to its strides."""
    pool = recording_pool.DevicePool(torch.device("cpu"), stream=None)  # type: ignore[arg-type]
    strided = torch.randn(3, 5, dtype=torch.float16).t()
    with torch.inference_mode():
        likes = [torch.ones(7), None, strided, torch.zeros((), dtype=torch.int64), torch.ones(0), torch.ones(2).bool()]
        shared, first = pool.buffers(likes)
    recording = Sharing(shared)
    pool.alive.add(recording)
    for like, own in zip(likes, first, strict=True):
        if like is None or own is None:
            assert like is own
            continue
        assert (own.shape, own.dtype, own.stride()) == (like.shape, like.dtype, like.stride())
        assert own.data_ptr() % 64 == 0 and not own.is_inference()
        own.copy_(like)
    assert all(torch.equal(own, like) for like, own in zip(likes, first, strict=True) if like is not None)  # type: ignore[arg-type]
    larger, _ = pool.buffers([torch.ones(9000)])
    assert pool.buffers([torch.ones(9)])[0] is shared is not larger
    del recording
    assert pool.buffers([torch.ones(9)])[0] is not shared, "it goes with the last recording that has it"


def test_what_recordings_are_given_has_room_for_the_largest_of_the_last_calls() -> None:
    """So blocks that are recorded one after another share one. Each that was larger would take as much beside it."""
    pool = recording_pool.DevicePool(torch.device("cpu"), stream=None)  # type: ignore[arg-type]
    assert pool.copied.most == 0
    pool.copied.note([torch.ones(90_000)])  # when an image begins
    for _ in range(16):
        for count in (100, 9000, 200, 4000):
            pool.copied.note([torch.ones(count), None, torch.ones(1)])
    assert pool.copied.most == 9000 * 4 // 512 * 512 + 512 + 512
    shared, (own,) = pool.buffers([torch.ones(100)], pool.copied.most)
    pool.alive.add(recording := Sharing(shared))
    assert shared.nbytes == pool.copied.most and own is not None and own.shape == (100,)
    assert pool.buffers([torch.ones(9000), torch.ones(1)], pool.copied.most)[0] is recording.shared


def test_blocks_tell_what_they_would_have_copied(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = Blocks(card, monkeypatch)
    blocks.moving.waits = False
    for _ in range(3):
        blocks.call(1)
        blocks.call(2, columns=3000)
    blocks.moving.waits = True
    for _ in range(3):
        blocks.call(1)
    most = (6 + 2 * 1) * 512  # bytes of the weight, and of what is given and given back
    assert card.least == [most] and blocks.run.made == 1
    assert blocks.moving.taken == [96 * MB + most], "there is room for it"


def test_weights_that_move_are_not_copied_while_the_device_has_enough_to_do(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = Moving(card, monkeypatch)
    block.waits = False
    block.calls(100)
    assert (block.run.made, card.given_back, block.taken) == (0, 0, [])
    block.waits = True
    block.calls(2)
    assert block.run.made == 1


def test_whether_the_device_waits_is_asked_anew_once_recordings_have_gone(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they do after an image that leaves little memory. In the next the device may have enough to do."""
    block = Moving(card, monkeypatch)
    block.calls(3)
    assert block.run.made == 1 and block.waits
    block.run.pool.release()
    assert not block.waits
    block.calls(20)
    assert block.run.made == 1


def test_where_memory_runs_out_with_copies_of_weights_there_are_none_for_a_while(
    card: Card, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Made again at once, memory would run out again. A new budget has them made as if it had not."""
    block = Moving(card, monkeypatch)
    pool = block.run.pool
    pool.release(ran_out=True)
    assert not warnings(caplog), "there were none"
    block.waits = True
    block.calls(3)
    assert block.run.made == 1
    for made, thousands in enumerate((2, 4, 8), start=1):
        pool.release(ran_out=True)
        block.waits = True
        block.calls(1000 * thousands)
        assert (block.run.made, block.run.graph.recordings) == (made, 0)
        assert len(warnings(caplog)) == made and "cache_budget_mb" in warnings(caplog)[-1]
        block.calls(20)
        assert (block.run.made, block.run.graph.recordings) == (made + 1, 1)
    pool.release(ran_out=True)
    block.waits = True
    pool.budget_changed()
    block.calls(3)
    assert block.run.made == 5
    pool.release(ran_out=True)
    block.waits = True
    block.calls(2020)
    assert block.run.made == 6, "as the first time"


def test_however_often_memory_ran_out_it_is_tried_again() -> None:
    host = HostMemory(lambda: None)
    for _ in range(20):
        host.stop_copying()
    for _ in range(64):
        assert not host.make_room(torch.device("cuda"), 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "mem_get_info", lambda _device: (MANY, MANY))
        assert host.make_room(torch.device("cuda"), 0)


def test_where_memory_does_not_suffice_for_copies_of_weights_no_others_are_left(
    card: Card, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Their memory would go with that of the recording that failed, and the next replay would lack it."""
    block, card.free = Moving(card, monkeypatch), 9000 * MB
    other = Part(card, block.run.pool, 100 * MB)
    other.calls(2)
    assert other.made == 1
    card.fails = torch.OutOfMemoryError("none")
    block.calls(3)
    assert (block.run.made, other.recordings) == (0, 0)
    card.fails, block.waits = None, True
    block.calls(2000)
    assert block.run.made == 0
    assert len([text for text in warnings(caplog) if "cache_budget_mb" in text]) == 1
    block.calls(1100)
    assert block.run.made == 1


def test_what_another_thread_calls_with_weights_that_move_is_not_left(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the time that this thread would record it the host may have put something else to where they are."""
    block = Moving(card, monkeypatch)
    turns = block.run.pool.turns
    turns.record_on_this_thread()
    elsewhere(lambda: block.calls(5))
    launched = block.inner.calls
    assert turns.record_what_was_left()
    assert (block.run.made, block.inner.calls) == (0, launched)
    block.calls(1)
    assert block.run.made == 1


def test_weights_that_cannot_be_held_do_not_make_way(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host would take them off in the middle of the recording. So much has to be free besides that it need not."""
    block, card.free = Moving(card, monkeypatch, can_hold=False), 499 * MB
    block.calls(30)
    assert (block.run.made, block.taken) == (0, [])
    card.free = 501 * MB
    block.calls(1000)
    assert (block.run.made, block.taken) == (1, [])


def test_where_weights_cannot_make_way_for_a_recording_there_is_none(
    card: Card, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Which is said once. Nor is the host asked in every call."""
    block, asked = Moving(card, monkeypatch), list[int]()

    def refuse(nbytes: int) -> None:
        asked.append(nbytes)
        raise torch.OutOfMemoryError("none")

    card.asked_for = refuse
    block.calls(1000)
    assert (block.run.made, len(asked)) == (0, 1)
    block.calls(10)
    assert (block.run.made, len(asked)) == (0, 2)
    (warning,) = warnings(caplog)
    assert "while memory is short" in warning


def test_a_recording_that_memory_does_not_suffice_for_is_not_tried_at_once(card: Card) -> None:
    """The call is launched kernel by kernel, and nothing else has to go for it."""
    part, card.fails = Part(card, RecordingPool(lambda: MANY), 100 * MB), torch.OutOfMemoryError("none")
    part.calls(2)
    assert card.given_back == 1, "of what was made so far"
    card.fails = None
    assert not part.replays() and part.made == 0
    part.calls(30)
    assert part.made == 1


@pytest.mark.parametrize(
    ("fails", "told_before", "released"),
    [("fails_to_begin", False, 1), ("fails_to_end", False, 1), ("fails_to_end", True, 0)],
)
def test_pytorchs_allocator_is_told_that_a_recording_which_failed_is_over(
    card: Card, caplog: pytest.LogCaptureFixture, fails: str, told_before: bool, released: int
) -> None:
    part, card.told_before = Part(card, RecordingPool(lambda: MANY), MB), told_before
    setattr(card, fails, RuntimeError("previous error during capture"))
    part.calls(3)
    assert not card.records and (part.recordings, card.released) == (0, released)
    assert "previous error during capture" in warnings(caplog)[0]
    setattr(card, fails, None)
    other = Part(card, RecordingPool(lambda: MANY), MB)
    other.calls(3)
    assert other.recordings == 1


class NamedAfterACard(torch.Tensor):
    """A tensor with values that says it is on the card."""

    device = torch.device("cuda")  # type: ignore[assignment]


def test_what_is_recorded_in_inference_mode_is_replayed_without_it(card: Card, one_records: RecordingPool) -> None:
    """The host runs prompts in it, and each thread has a mode of its own."""
    run = Recorded(lambda _weight, x: x + 1, one_records)
    weight, x = (torch.ones(1, size).as_subclass(NamedAfterACard) for size in (1, 4))
    with torch.inference_mode():
        for _ in range(3):
            run(weight, x)
    assert run.made == 1
    elsewhere(lambda: run(weight, x))
    assert run.inner.calls == 2, "the first call, and the one that is recorded"


def test_two_that_exceed_the_budget_together_do_not_take_turns_for_ever(
    card: Card, caplog: pytest.LogCaptureFixture
) -> None:
    """A ControlNet and a UNet, say, one after the other in every step."""
    pool = RecordingPool(lambda: 1000 * MB)
    control, unet = Part(card, pool, 500 * MB), Part(card, pool, 700 * MB)
    for _ in range(20):
        control.calls()
        unet.calls()
    assert (control.made, unet.made) == (3, 2)
    assert control.replays() and not unet.replays()
    (warning,) = warnings(caplog)
    assert "would take 1200 MB and may take 1000 MB" in warning and "cache_budget_mb" in warning


def test_what_did_not_fit_is_recorded_when_the_budget_is_larger(card: Card, caplog: pytest.LogCaptureFixture) -> None:
    budget = 0
    pool = RecordingPool(lambda: budget)
    control, unet = Part(card, pool, 500 * MB), Part(card, pool, 700 * MB)
    for megabytes, replayed, told in [(1000, False, 1), (1000, False, 1), (1100, False, 2), (2000, True, 2)]:
        budget = megabytes * MB
        pool.budget_changed()
        for _ in range(10):
            control.calls()
            unet.calls()
        assert control.replays()
        assert (unet.replays(), len(warnings(caplog))) == (replayed, told)


def test_a_recording_that_was_of_use_is_made_again_however_often_others_took_its_place(card: Card) -> None:
    """In days of many sizes each is once the one that was too much."""
    pool = RecordingPool(lambda: 1000 * MB)
    parts = [Part(card, pool, size * MB) for size in (600, 900)]
    for _ in range(5):
        for part in parts:
            part.calls(20)
            assert part.replays()


# -- with one ----------------------------------------------------------------------------------


@pytest.mark.gpu
@needs_gpu
def test_a_replay_gives_what_a_direct_call_gives() -> None:
    run, weight = Recorded(), on_gpu(4, 4)
    for _ in range(5):
        assert run.right(weight, on_gpu(2, 4))
    # Directly, in the recording, and never again.
    assert (run.inner.calls, run.made, run.graph.recordings) == (2, 1, 1)


def many_small(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """What is bound by launching."""
    for _ in range(200):
        x = torch.tanh(x)
    return x @ weight


@pytest.mark.gpu
@needs_gpu
def test_only_what_is_bound_by_launching_is_recorded() -> None:
    small, large = Recorded(many_small), Recorded(lambda w, x: x @ w @ w @ w)
    for run, side in ((small, 4), (large, 8192)):
        weight, x = on_gpu(side, side), on_gpu(side, side)
        for _ in range(7):
            output = run(weight, x, when=RecordWhen.LAUNCH_BOUND)
            torch.cuda.synchronize()
        torch.testing.assert_close(output, run.inner.function(weight, x))
    assert (small.made, large.made) == (1, 0)
    assert large.pool.nbytes == 0
    assert small.inner.calls == 5, "measured in three calls after the first, then recorded"


@pytest.mark.gpu
@needs_gpu
def test_weights_that_move_are_replayed_with_those_of_each_call() -> None:
    small, large = Recorded(many_small), Recorded(lambda w, x: x @ w @ w @ w @ w)
    for run, side in ((small, 64), (large, 8192)):
        weights, backlog = [on_gpu(side, side) / side**0.5 for _ in range(3)], Backlog()
        for index in range(110):
            weight, x = weights[index % 3], on_gpu(side, side)
            backlog.called(torch.cuda.current_stream())
            output = run(weight, x, when=MovingWeights(device_is_behind=backlog.is_long))
            if index > 104:  # comparing waits for the device, which then waits for the next call, however large it is
                torch.testing.assert_close(output, run.inner.function(weight, x))
    assert (small.made, large.made) == (1, 0), "for the large one the device has enough to do"
    assert small.inner.calls < 100


@pytest.mark.gpu
@needs_gpu
def test_an_output_is_left_in_the_input_that_it_was_computed_from() -> None:
    run, weight, x = Recorded(many_small), on_gpu(64, 64) / 8, on_gpu(64, 64)
    for _ in range(6):
        expected, address = run.inner.function(weight, x), x.data_ptr()
        (output,) = run.graph.run([weight], [weight.data_ptr()], [x], into={0: x}) or ()
        torch.testing.assert_close(output, expected)
        if output is x:
            assert x.data_ptr() == address
        else:
            x.copy_(output)
    assert run.made == 1 and output is x


class TwoWeights(Function):
    """Small kernels that compute with two weights."""

    def __call__(self, weights: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        self.calls += 1
        first, second = weights
        return [many_small(second, many_small(first, tensors[0]))]


@pytest.mark.gpu
@needs_gpu
def test_weights_at_their_own_places_are_read_there_by_a_recording_of_each_block() -> None:
    """What is at a place may be brought anew, as the host does; and a place may be left for a call."""
    inner, side, blocks, made = TwoWeights(lambda w, x: x), 64, 3, list[int]()
    graph = RecordedGraph(inner, RecordingPool(lambda: MANY), lambda: made.append(1))
    places = on_gpu(blocks * side, side) / side**0.5
    kept = range(places.data_ptr(), places.data_ptr() + places.nbytes)
    for index in range(110 * blocks):
        place = places[index % blocks * side :][:side]
        if index % 50 == 0:
            place.copy_(on_gpu(side, side) / side**0.5)
        away = index % 71 == 0
        weights = [place.clone() if away else place, on_gpu(side, side) / side**0.5]
        x, addresses = on_gpu(side, side), [weight.data_ptr() for weight in weights]
        (output,) = graph.run(weights, addresses, [x], MovingWeights(kept)) or ()
        torch.testing.assert_close(output, many_small(weights[1], many_small(weights[0], x)))
    assert graph.recordings == len(made) in (blocks, blocks + 1)
    assert len({addresses for _, addresses in graph.by_name if any(addresses)}) == blocks
    assert inner.calls < 100 * blocks


@pytest.mark.gpu
@needs_gpu
def test_nor_is_what_would_be_copied_in_large_amounts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it is bound by launching: a piece of a video hands on a gigabyte."""

    given_and_given_back = 2 * 4 * 4 * 4
    for most, made in ((given_and_given_back, 1), (given_and_given_back - 1, 0)):
        monkeypatch.setattr(launch_bound, "MOST_COPIED", most)
        run, weight, x = Recorded(many_small), on_gpu(4, 4), on_gpu(4, 4)
        for _ in range(7):
            run(weight, x, when=RecordWhen.LAUNCH_BOUND)
            torch.cuda.synchronize()
        assert run.made == made


@pytest.mark.gpu
@needs_gpu
def test_an_output_may_be_kept_after_later_calls_of_any_size() -> None:
    run, weight = Recorded(), on_gpu(4, 4)
    inputs = [on_gpu(batch, 4) for batch in (2, 3, 2, 3, 2, 3, 2, 3)]
    outputs = [run(weight, x) for x in inputs]
    for x, output in zip(inputs, outputs, strict=True):
        torch.testing.assert_close(output, run.inner.function(weight, x))


@pytest.mark.gpu
@needs_gpu
def test_a_call_does_not_write_to_what_it_is_given() -> None:
    run, weight, x = Recorded(), on_gpu(4, 4), on_gpu(2, 4)
    before = x.clone()
    for other in (x, x, on_gpu(2, 4), on_gpu(2, 4)):
        run(weight, other)
    assert torch.equal(x, before)


@pytest.mark.gpu
@needs_gpu
def test_an_input_that_is_not_contiguous_is_copied_as_it_reads() -> None:
    run, weight = Recorded(), on_gpu(4, 4)
    for x in (on_gpu(2, 4), on_gpu(2, 4), on_gpu(4, 2).T, on_gpu(2, 8)[:, ::2]):
        assert run.right(weight, x)


@pytest.mark.gpu
@needs_gpu
def test_a_weight_that_moved_makes_a_new_recording() -> None:
    run = Recorded()
    first, second = on_gpu(4, 4), on_gpu(4, 4)
    for weight in (first, second):
        for _ in range(4):
            assert run.right(weight, on_gpu(2, 4))
    assert (run.made, run.graph.recordings) == (2, 1)


@pytest.mark.gpu
@needs_gpu
def test_a_weight_that_is_edited_in_place_is_seen() -> None:
    run, weight = Recorded(), on_gpu(4, 4)
    for _ in range(4):
        assert run.right(weight, on_gpu(2, 4))
        weight.mul_(2)
    assert run.made == 1


@pytest.mark.gpu
@needs_gpu
def test_many_sizes_share_one_pool() -> None:
    """Which is about as large as the largest needs, not as all together."""

    def hungry(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x.repeat(1, 1000) * 2).reshape(*x.shape, 1000).sum(-1) @ weight

    weight = on_gpu(4, 4)
    largest = Recorded(hungry)
    for _ in range(3):
        assert largest.right(weight, on_gpu(5000, 4))
    alone = largest.pool.nbytes
    largest.pool.release()
    del largest
    torch.cuda.empty_cache()
    run = Recorded(hungry)
    for size in range(5000, 4000, -100):
        for _ in range(3):
            assert run.right(weight, on_gpu(size, 4))
    assert run.graph.recordings == 10
    assert alone > 5000 * 4000 * 4
    assert run.pool.nbytes < 3 * alone


@pytest.mark.gpu
@needs_gpu
def test_two_graphs_of_one_pool_do_not_disturb_each_other() -> None:
    pool, weight = RecordingPool(lambda: MANY), on_gpu(4, 4)
    one, other = Recorded(pool=pool), Recorded(lambda w, x: (x @ w).exp().sum(-1), pool=pool)
    for _ in range(4):
        assert one.right(weight, on_gpu(2, 4))
        assert other.right(weight, on_gpu(2, 4))
    assert (one.made, other.made) == (1, 1)


@pytest.mark.gpu
@needs_gpu
def test_more_than_the_budget_releases_everything_and_the_bytes_come_back() -> None:
    def large(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (x @ weight).repeat(1, 4_000_000).sum(-1)  # 128 MB for two rows

    budget = MANY
    pool, weight = RecordingPool(lambda: budget), on_gpu(4, 4)
    run = Recorded(large, pool)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(3):
        assert run.right(weight, on_gpu(2, 4))
    assert pool.nbytes >= 128_000_000
    assert torch.cuda.memory_reserved() - before >= 128_000_000
    budget = pool.nbytes + 1_000_000
    for _ in range(3):
        assert run.right(weight, on_gpu(6, 4))  # needs three times as much
    assert pool.nbytes <= budget
    assert pool.release() <= budget
    assert (run.graph.recordings, pool.nbytes) == (0, 0)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - before < 128_000_000
    assert run.right(weight, on_gpu(2, 4))


@pytest.mark.gpu
@needs_gpu
def test_a_size_that_is_too_large_alone_stays_plain() -> None:
    def large(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (x @ weight).repeat(1, 4_000_000).sum(-1)

    torch.cuda.empty_cache()
    run, weight = Recorded(large, RecordingPool(lambda: 1_000_000)), on_gpu(4, 4)
    for _ in range(5):
        assert run.right(weight, on_gpu(2, 4))
    assert (run.made, run.graph.recordings, run.pool.nbytes) == (1, 0, 0)


@pytest.mark.gpu
@needs_gpu
def test_a_graph_that_cannot_be_recorded_runs_plainly_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    """It waits for the GPU in the middle."""
    run, weight = Recorded(lambda w, x: (x @ w) * float(x.sum().item())), on_gpu(4, 4)
    for batch in (2, 2, 2, 2, 3, 3, 3):
        assert run.right(weight, on_gpu(batch, 4))
    assert (run.made, run.graph.recordings) == (0, 0)
    assert len(warnings(caplog)) == 1
    assert "cannot be recorded" in warnings(caplog)[0]
    # PyTorch still gives back what nobody uses, and others are recorded as before.
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == before
    other = Recorded(pool=run.pool)
    for _ in range(3):
        assert other.right(weight, on_gpu(2, 4))
    assert other.made == 1


def test_the_least_recently_used_recording_goes_first(card: Card) -> None:
    part = Part(card, RecordingPool(lambda: MANY), MB)
    for columns in range(1, MOST_RECORDINGS + 1):
        part.calls(2, columns)
    part.calls(1, 1)  # used again before another comes
    part.calls(2, MOST_RECORDINGS + 1)
    assert (part.made, part.recordings) == (MOST_RECORDINGS + 1, MOST_RECORDINGS)
    assert part.replays(1) and not part.replays(2)


@pytest.mark.gpu
@needs_gpu
def test_a_graph_that_is_gone_takes_its_recordings_with_it() -> None:
    run, weight = Recorded(), on_gpu(4, 4)
    assert run.right(weight, on_gpu(2, 4))
    torch.cuda.empty_cache()
    before, segments = torch.cuda.memory_reserved(), _segments()
    for _ in range(3):
        assert run.right(weight, on_gpu(2, 4))
    assert torch.cuda.memory_reserved() > before
    del run.graph
    gc.collect()
    torch.cuda.empty_cache()
    left = [new for at, new in _segments().items() if at not in segments]
    assert torch.cuda.memory_reserved() <= before, json.dumps(left, default=str)  # a list would be cut short


def _segments() -> dict[int, dict[str, object]]:
    """PyTorch's segments by their address, and what is in each: said where a test finds too many of them."""
    return {segment["address"]: segment for segment in torch.cuda.memory_snapshot()}


_AS_THE_SERVER_DOES = """
import torch
from test_cuda_graphs import MANY, Recorded, on_gpu
assert torch.cuda.get_allocator_backend() == "cudaMallocAsync"
from onediff_comfy.runtime.recording_pool import RecordingPool
pool, weight = RecordingPool(lambda: MANY), on_gpu(256, 256).half()
one = Recorded(pool=pool)
other = Recorded(lambda w, x: (x @ w).softmax(-1).repeat(1, 1000).sum(-1) @ (x @ w), pool=pool)
kept = []
for _ in range(2):
    for rows in (64, 256, 64, 256, 64, 256, 64):
        x = on_gpu(rows, 256).half()
        kept.append((x, one(weight, x)))
        if rows == 256:
            assert other.right(weight, x)
    moved, weight = weight, weight.clone()
    for x, output in kept:
        torch.testing.assert_close(output, one.inner.function(moved, x), rtol=1e-2, atol=1e-2)
    kept.clear()
    assert pool.nbytes >= 0 and pool.release() >= 0 and pool.nbytes == 0
torch.cuda.synchronize()
print("right", one.made, other.made)
"""


@pytest.mark.gpu
@needs_gpu
def test_with_the_allocator_that_the_server_chooses() -> None:
    """In a process of its own: to free what a recording allocated at the wrong time ends the process."""
    environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync", "PYTHONFAULTHANDLER": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    command = [sys.executable, "-c", _AS_THE_SERVER_DOES]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.stdout.split() == ["right", "4", "2"], run.stderr[-4000:]


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (RuntimeError("CUDA error: out of memory"), torch.OutOfMemoryError),
        (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError),
        (RuntimeError("CUDA error: an illegal memory access"), RuntimeError),
    ],
)
def test_the_drivers_want_of_memory_is_pytorchs(card: Card, raised: Exception, expected: type[Exception]) -> None:
    part = Part(card, RecordingPool(lambda: MANY), MB)
    part.calls(2)
    assert part.replays()
    card.fails = raised
    with pytest.raises(RuntimeError) as caught:
        part.calls()
    assert caught.type is expected


@pytest.mark.gpu
@needs_gpu
def test_inputs_of_any_kind_are_in_place() -> None:
    def given(seed: int) -> list[torch.Tensor]:
        return [
            *(
                torch.randn(3, 5, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).to(dtype)
                for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool)
            ),
            torch.full((), float(seed), device="cuda", dtype=torch.float64),
            torch.empty(0, 4, device="cuda"),
            torch.full((2, 3, 4), seed, device="cuda", dtype=torch.bfloat16).transpose(0, 2),
            torch.full((6, 2), float(seed), device="cuda")[::2],
        ]

    class Sum(Function):
        def __call__(self, weights: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            return [tensor * 1 for tensor in tensors]

    graph = RecordedGraph(Sum(lambda _w, x: x), RecordingPool(lambda: MANY), lambda: None)
    for seed in range(4):
        tensors = given(seed)
        for output, tensor in zip(graph([], tensors), tensors, strict=True):
            assert torch.equal(output, tensor)
    assert graph.recordings == 1


@pytest.mark.gpu
@needs_gpu
def test_threads_with_streams_of_their_own_replay_one_recording() -> None:
    weight = on_gpu(512, 512) / 16

    def deep(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            x = torch.tanh(x @ w)
        return x

    run = Recorded(deep)
    for _ in range(2):
        run(weight, on_gpu(512, 512))

    def many(seed: int) -> float:
        x = torch.randn(512, 512, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))
        right = deep(weight, x)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            outputs = [run(weight, x) for _ in range(200)]
            return max(float((output - right).abs().max()) for output in outputs)

    with ThreadPoolExecutor(2) as threads:
        assert max(threads.map(many, (1, 2))) < 1e-3
    assert run.graph.recordings == 1


@pytest.mark.parametrize(
    ("error", "wants"),
    [
        (torch.OutOfMemoryError("Allocation on device"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("VRAM grow failed: 8 bytes"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_the_driver_and_its_libraries_have_their_own_words_for_want_of_memory(error: Exception, wants: bool) -> None:
    assert wants_memory(error) is wants
    with pytest.raises(torch.OutOfMemoryError if wants else type(error)), memory_errors():
        raise error
