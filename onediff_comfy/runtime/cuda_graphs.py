"""A compiled graph replayed through CUDA graphs, one recording per exact set of sizes.

Launching a model's two thousand kernels one by one takes a CPU 20 to 40 ms, as long as the kernels
themselves. A CUDA graph launches them at once. It holds addresses: a call's tensors are copied into
buffers of the recording, weights are read where they are, and when one has moved (a LoRA, a reload)
the recording is thrown away and made again. That takes a few steps' time, never a compilation.

What a recording allocates comes from a pool that all of a device share (see ``recording_pool``).

ComfyUI's server has PyTorch take memory by ``cudaMallocAsync``. What is allocated in a recording is then
part of the recording: the driver provides it at a replay, and shares it among those that do not overlap. To
free such memory outside of the recording is an error in a destructor, which ends the process, or happens
while a replay still uses it. So nothing outlives a recording that was allocated in it: outputs are copied to
tensors of ours, and the workspaces of cuBLAS are freed at its end.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from ..engines.base import CompiledGraph, Outputs
from .device_memory import kept_free, memory_errors
from .launch_bound import Launching
from .recording_pool import DevicePool, RecordingPool
from .stream_capture import recorded_on

log = logging.getLogger(__name__)

# The first call of a size runs as it is: cuBLAS and cuDNN choose algorithms and allocate workspaces
# in it, Triton loads kernels, and none of that may happen in a recording.
_CALLS_BEFORE_RECORDING = 1
_CALLS_BEFORE_ANOTHER_TRY = 20  # after one that found too little memory: the driver is not asked in each
# A recording that was replayed so often has gained more than making it took.
_PAID_OFF_REPLAYS = 10
# A recording that is given up so often before it has paid off is not made again.
_MOST_OVERFLOWS = 2

# Launching that is only a part of a call's time is not worth more: a video's piece is given a gigabyte, and gives one.
MOST_COPIED = 256 << 20
"""Bytes that the buffers of a recording may take, if only calls that are bound by launching are recorded."""

MOST_RECORDINGS = 32
"""Of one compiled graph. Each holds some megabytes of launch parameters outside the pool."""

_COPIED_AT_ONCE = frozenset(
    (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool)
)
"""PyTorch has such a kernel for these; not for all that there are, as scales of mxfp8."""

Sizes = tuple[tuple[int, ...], ...]


@dataclass(eq=False)
class _Recording:
    graph: torch.cuda.CUDAGraph
    addresses: list[int]
    tensors: list[torch.Tensor]
    outputs: Outputs
    pool: DevicePool
    replays: int = 0

    def replay(self, tensors: Sequence[torch.Tensor], confirmed: Callable[[], bool] | None = None) -> Outputs | None:
        """Return the outputs for ``tensors``; None if ``confirmed``, asked once these are in place, says no."""
        with self.pool.replaying():
            _copy(tensors, self.tensors)
            if confirmed is not None and not confirmed():
                return None
            self.replays += 1
            with memory_errors():
                self.graph.replay()
            # The next replay overwrites them, and a caller may keep what it is given.
            return [None if output is None else output.clone() for output in self.outputs]


@dataclass(frozen=True)
class _Seen:
    """Calls of one set of sizes, with weights at the same addresses, before they are recorded."""

    addresses: list[int]
    calls: int
    needed: int  # bytes that a call takes at most
    outputs: Outputs  # without memory


@dataclass(frozen=True)
class _Call:
    """A call that is to be recorded.

    Attributes:
        sizes: of the tensors.
        addresses: of the weights.
        weights: inputs that are read where they are.
        tensors: the other inputs.
        likes: what the outputs are like, without memory.
    """

    sizes: Sizes
    addresses: list[int]
    weights: Sequence[torch.Tensor]
    tensors: Sequence[torch.Tensor]
    likes: Outputs

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device


def _copy(source: Outputs, destination: Outputs) -> None:
    """Copy tensors, those of one dtype at once: seventy functions hold 140, each of which would be a launch.

    A text encoder gives None for a layer that nobody asked for.
    """
    alike: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for given, own in zip(source, destination, strict=True):
        if given is None or own is None:
            assert given is own  # what is None is so in each call
            continue
        if own.dtype not in _COPIED_AT_ONCE:
            own.copy_(given)
            continue
        into, of = alike.setdefault(own.dtype, ([], []))
        into.append(own)
        of.append(given)
    for into, of in alike.values():
        torch._foreach_copy_(into, of)


class RecordedGraph(CompiledGraph):
    """``inner``, replayed through CUDA graphs where that can be done.

    Args:
        inner: a compiled graph of any engine.
        pool: shared by all recorded graphs.
        on_recorded: called after each recording.

    Attributes:
        by_sizes: the recordings, the least recently used first. It is exchanged where all go, and never emptied.
    """

    def __init__(self, inner: CompiledGraph, pool: RecordingPool, on_recorded: Callable[[], None]) -> None:
        super().__init__(inner.binding, inner.shapes)
        self.inner = inner
        self._pool = pool
        self._on_recorded = on_recorded
        self.by_sizes: OrderedDict[Sizes, _Recording] = OrderedDict()
        self._seen: dict[Sizes, _Seen] = {}
        self._overflows: Counter[Sizes] = Counter()  # how often a recording was too much for the budget
        self._plain: set[Sizes] = set()  # sizes too large to record
        self._launching = Launching()
        self._unrecordable = False
        pool.join(self)

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes

    @property
    def recordings(self) -> int:
        """Return how many sizes are recorded."""
        return len(self.by_sizes)

    def forget_recordings(self) -> None:
        """Throw the recordings away; they are made again when their sizes come again.

        A model that dies asks for it, on any thread and between any two steps of this class.
        """
        recordings, self.by_sizes = self.by_sizes, OrderedDict()
        for sizes, recording in list(recordings.items()):
            if recording.replays >= _PAID_OFF_REPLAYS:
                del self._overflows[sizes]

    def reconsider(self) -> None:
        """Forget which sizes were too large to record."""
        self._plain.clear()
        self._overflows.clear()

    def __call__(self, weights: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> Outputs:
        outputs = self.run(weights, [weight.data_ptr() for weight in weights], tensors)
        assert outputs is not None  # nobody was asked
        return outputs

    def run(
        self,
        weights: Sequence[torch.Tensor],
        addresses: list[int],
        tensors: Sequence[torch.Tensor],
        record_only_launch_bound: bool = False,
        confirmed: Callable[[], bool] | None = None,
    ) -> Outputs | None:
        """Return the outputs for ``tensors``; None if they are not wanted.

        Args:
            addresses: of the weights.
            record_only_launch_bound: only calls that are bound by launching are recorded.
            confirmed: tells whether they are wanted. It may wait for the device, so it is asked as late as can be.
        """
        sizes = tuple(tuple(tensor.shape) for tensor in tensors)
        plain = self._unrecordable or sizes in self._plain or any(tensor.device.type != "cuda" for tensor in tensors)
        recordings = self.by_sizes
        recording = None if plain else recordings.get(sizes)
        if recording is not None and recording.addresses == addresses:
            recordings.move_to_end(sizes)
            return recording.replay(tensors, confirmed)
        if confirmed is not None and not confirmed():
            return None
        if plain:
            return self.inner(weights, tensors)
        if recording is not None:  # weights have moved, and every recording reads some of them
            self.forget_recordings()
        seen = self._seen.get(sizes)
        calls = seen.calls if seen is not None and seen.addresses == addresses else 0
        gains = not record_only_launch_bound or self._launching.bound(sizes)
        if gains and record_only_launch_bound and seen is not None:
            gains = sum(each.nbytes for each in (*tensors, *seen.outputs) if each is not None) <= MOST_COPIED
        if gains and seen is not None and calls >= _CALLS_BEFORE_RECORDING:
            if self._pool.may_record(tensors[0].device, seen.needed):
                recorded = self._record_in_turn(_Call(sizes, addresses, weights, tensors, seen.outputs))
                if recorded is not None:
                    return recorded
            else:
                calls = -_CALLS_BEFORE_ANOTHER_TRY
        with self._launching.measured(sizes, tensors[0].device):
            outputs = self.inner(weights, tensors)
        # Of one graph and these sizes they are the same each time, and a block of a model is called in each step.
        likes = seen.outputs if seen is not None else [None if each is None else each.to("meta") for each in outputs]
        needed = None if seen is None else seen.needed
        if needed is None or calls == -_CALLS_BEFORE_ANOTHER_TRY:  # PyTorch may have kept more of another's call
            kept = kept_free(tensors[0].device)
            needed = kept if needed is None else min(needed, kept)
        self._seen[sizes] = _Seen(addresses, calls + 1, needed, likes)
        return outputs

    def _record_in_turn(self, call: _Call) -> Outputs | None:
        """As ``_record``; on a thread that does not record leave the call to the one that does, and return None."""
        turns, name = self._pool.turns, (id(self), call.sizes)
        if turns.ours:
            return self._record(call)
        if not turns.is_left(name):
            # Its own values: not any can be computed with.
            left = replace(call, tensors=[tensor.clone() for tensor in call.tensors])
            turns.leave(name, lambda: self._record_left(left))
        return None

    def _record_left(self, call: _Call) -> None:
        seen = self._seen.get(call.sizes)
        if seen is None or seen.addresses != call.addresses:  # weights have moved since
            return
        if not self._pool.may_record(call.device, seen.needed):  # there was memory when it was left
            return
        with torch.cuda.device(call.device):
            self.inner(call.weights, call.tensors)  # makes this thread's handles of cuBLAS and cuDNN for that device
        self._record(call)

    def _record(self, call: _Call) -> Outputs | None:
        """Return the outputs of a call from a new recording; None if none can be made."""
        device = call.device
        if any(weight.device.type != device.type for weight in call.weights):
            # A compiler hands a number in RAM to its kernels by value, so a replay would not see it change.
            self._give_up("a weight is not on the device")
            return None
        while len(recordings := self.by_sizes) >= MOST_RECORDINGS:
            recordings.popitem(last=False)
        with self._pool.recording(device), torch.cuda.device(device):
            torch.cuda.synchronize(device)
            free = torch.cuda.mem_get_info(device)[0]
            try:
                recording = self._new_recording(call)
                result = recording.replay(call.tensors)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                self._give_up(f"{type(error).__name__}: {error}")
                return None
            alone = self._pool.nbytes == 0
            nbytes = max(0, free - torch.cuda.mem_get_info(device)[0])
            together = self._pool.nbytes + nbytes
            if self._pool.add(recording, device, nbytes):
                self.by_sizes[call.sizes] = recording
            else:
                self._overflowed(call.sizes, alone, together)
        self._on_recorded()
        log.debug("recorded a CUDA graph for %s, %.0f MB", call.sizes, nbytes / 2**20)
        return result

    def _give_up(self, reason: str) -> None:
        self._unrecordable = True
        log.warning("OneDiff: a graph cannot be recorded (%s) and is launched kernel by kernel", reason)

    def _new_recording(self, call: _Call) -> _Recording:
        device = call.device
        # A replay writes to these, and threads of other GPUs are in no inference mode as the one that runs prompts is.
        with torch.inference_mode(False):
            own = [tensor.clone() for tensor in call.tensors]
            outputs = [None if like is None else torch.empty_like(like, device=device) for like in call.likes]
        pool = self._pool.on_device(device)
        with recorded_on(pool) as graph, self.inner.recordable():
            _copy(self.inner(call.weights, own), outputs)
        return _Recording(graph, call.addresses, own, outputs, pool)

    def _overflowed(self, sizes: Sizes, alone: bool, together: int) -> None:
        """Note that a recording was too much for the budget: not for ever, where it and others take turns in a step.

        Args:
            alone: there were no others.
            together: bytes that it takes with the others.
        """
        self._overflows[sizes] += 1
        if alone or self._overflows[sizes] >= _MOST_OVERFLOWS:
            self._plain.add(sizes)
            self._pool.tell_too_large(together)
