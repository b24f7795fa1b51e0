"""A compiled graph replayed through CUDA graphs, one recording per exact set of sizes.

Launching a model's two thousand kernels one by one takes a CPU 20 to 40 ms, as long as the kernels
themselves. A CUDA graph launches them at once. It holds addresses: a call's tensors are copied into
buffers of the recording, weights are read where they are, and when one has moved (a LoRA, a reload)
the recording is thrown away and made again. That takes a few steps' time, never a compilation. Where weights move,
as those of a block of a model that does not fit, those that the host brings anew are copied like a call's tensors, and
each set of places of the others has a recording: fifty blocks of a model have one graph, and fifty recordings.

What a recording allocates comes from a pool that all of a device share (see ``recording_pool``).

ComfyUI's server has PyTorch take memory by ``cudaMallocAsync``. What is allocated in a recording is then
part of the recording: the driver provides it at a replay, and shares it among those that do not overlap. To
free such memory outside of the recording is an error in a destructor, which ends the process, or happens
while a replay still uses it. So nothing outlives a recording that was allocated in it: outputs are copied to
tensors of ours, and the workspaces of cuBLAS are freed at its end.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch

from ..engines.base import CompiledGraph, Outputs
from .device_memory import kept_free, trim_graph_memory
from .launch_bound import MovingWeights, RecordWhen, When, Worth
from .recording import NOWHERE, Copies, Into, Name, RecordedCall, Recording, Sizes
from .recording_pool import RecordingPool
from .stream_capture import recorded_on

log = logging.getLogger(__name__)

# The first call of a size runs as it is: cuBLAS and cuDNN choose algorithms and allocate workspaces
# in it, Triton loads kernels, and none of that may happen in a recording.
_CALLS_BEFORE_RECORDING = 1
# After a try that found too little memory: the driver is not asked in each call.
_CALLS_BEFORE_ANOTHER_TRY = 20
_CALLS_OF_BLOCKS = 1000  # likewise of weights that move; a model has up to sixty blocks
# A recording that was replayed so often has gained more than making it took.
_PAID_OFF_REPLAYS = 10
# A recording that is given up so often before it has paid off is not made again.
_MOST_OVERFLOWS = 2

MOST_RECORDINGS = 128
"""Of one compiled graph: twice as many as a model has blocks. Each holds launch parameters outside the pool."""


@dataclass(frozen=True)
class _Seen:
    """Calls of one set of sizes before they are recorded; with weights at the same addresses, unless they move."""

    addresses: list[int]
    calls: int
    needed: int | None  # bytes that a call takes at most; None while nobody needs to know
    outputs: Outputs  # without memory


class RecordedGraph(CompiledGraph):
    """``inner``, replayed through CUDA graphs where that can be done.

    Args:
        inner: a compiled graph of any engine.
        pool: shared by all recorded graphs.
        on_recorded: called after each recording.

    Attributes:
        by_name: the recordings, the least recently used first. It is exchanged where all go, and never emptied.
    """

    def __init__(self, inner: CompiledGraph, pool: RecordingPool, on_recorded: Callable[[], None]) -> None:
        super().__init__(inner.binding, inner.shapes)
        self.inner = inner
        self._pool = pool
        self._on_recorded = on_recorded
        self.by_name: OrderedDict[Name, Recording] = OrderedDict()
        self._seen: dict[Sizes, _Seen] = {}
        self._overflows: Counter[Sizes] = Counter()  # how often a recording was too much for the budget
        self._plain: set[Sizes] = set()  # sizes too large to record
        self._worth = Worth()
        self._unrecordable = False
        pool.join(self)

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes

    @property
    def recordings(self) -> int:
        """Return how many there are."""
        return len(self.by_name)

    def forget_recordings(self) -> None:
        """Throw the recordings away; they are made again when their sizes come again.

        A model that dies asks for it, on any thread and between any two steps of this class.
        """
        recordings, self.by_name = self.by_name, OrderedDict()
        self._worth.start_over()
        for (sizes, _), recording in list(recordings.items()):
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
        when: When = RecordWhen.ALWAYS,
        confirmed: Callable[[], bool] | None = None,
        into: Into = NOWHERE,
    ) -> Outputs | None:
        """Return the outputs for ``tensors``; None if they are not wanted.

        Args:
            addresses: of the weights.
            when: which calls are recorded.
            confirmed: tells whether they are wanted. It may wait for the device, so it is asked as late as can be.
            into: where a replay leaves outputs. What is launched kernel by kernel gives others.
        """
        sizes = tuple(tuple(tensor.shape) for tensor in tensors)
        plain = self._unrecordable or sizes in self._plain or any(tensor.device.type != "cuda" for tensor in tensors)
        call = RecordedCall(sizes, addresses, weights, tensors)
        if isinstance(when, MovingWeights):
            call = call.with_moving(when.fixed(addresses))
        recordings, name = self.by_name, call.name
        recording = None if plain else recordings.get(name)
        if recording is not None and recording.addresses == call.addresses:
            recordings.move_to_end(name)
            return recording.replay(call.tensors, confirmed, into)
        if confirmed is not None and not confirmed():
            return None
        if plain:
            return self.inner(weights, tensors)
        if recording is not None:  # weights have moved, and every recording reads some of them
            self.forget_recordings()
        seen = self._seen.get(sizes)
        if seen is None or seen.addresses != call.asked_at or seen.calls < _CALLS_BEFORE_RECORDING:
            return self._launched(call, when)
        call = replace(call, likes=seen.outputs)
        # Others of its kind have the memory that a recording takes, and to launch this one takes as much beside it.
        if _is_first(call, recordings) and not self._worth.recording(when, sizes, call.copied_bytes):
            return self._launched(call, when)
        if seen.needed is None:
            torch.cuda.empty_cache()  # PyTorch may have kept more, of others' calls
            return self._launched(call, when, measured=True)
        if any(name[1]) and not self._worth.is_met(name):
            return self._launched(call, when)
        if not self._has_room(call, seen.needed):
            return self._launched(call, when, measured=not call.moves, calls=_put_off(call))
        recorded = self._record_in_turn(call)
        return self._launched(call, when) if recorded is None else recorded

    def _launched(self, call: RecordedCall, when: When, measured: bool = False, calls: int | None = None) -> Outputs:
        """Return the outputs of a call that is launched kernel by kernel, and note what it was like.

        Args:
            measured: what it takes is measured once more. Weights that move are to make way for as much, and no more,
                so before that nobody needs to know.
            calls: how many are said to have been made of this kind before.
        """
        seen = self._seen.get(call.sizes)
        with self._worth.noted(when, call.sizes, call.device):
            outputs = call.run(self.inner, call.tensors)
        needed = None if seen is None else seen.needed
        if measured or (seen is None and not call.moves):
            # What it has freed is in use until the device has come so far. Other streams may be recorded meanwhile.
            torch.cuda.current_stream(call.device).synchronize()
            kept = kept_free(call.device)
            needed = kept if needed is None else min(needed, kept)
        if calls is None:
            calls = seen.calls if seen is not None and seen.addresses == call.asked_at else 0
        # Of one graph and these sizes they are the same each time, and a block of a model is called in each step.
        likes = seen.outputs if seen is not None else [None if each is None else each.to("meta") for each in outputs]
        if call.moves:
            self._pool.copied(call.device).note((*call.tensors, *likes))
        self._seen[call.sizes] = _Seen(call.asked_at, calls + 1, needed, likes)
        return outputs

    def _has_room(self, call: RecordedCall, needed: int) -> bool:
        """Return True if there is memory for a recording.

        Args:
            needed: bytes that the call takes at most beside what it is given and gives.
        """
        if call.moves:  # one of the same sizes has used what another will use
            first = needed + max(call.copied_bytes, self._pool.copied(call.device).most)
            room = first if _is_first(call, self.by_name) else 0
            return self._pool.host.make_room(call.device, room)
        return self._pool.host.may_record(call.device, needed)

    def _record_in_turn(self, call: RecordedCall) -> Outputs | None:
        """As ``_record``; on a thread that does not record leave the call to the one that does, and return None."""
        turns, name = self._pool.turns, (id(self), call.sizes)
        if turns.ours:
            with contextlib.suppress(torch.OutOfMemoryError):
                return self._record(call)
            if call.moves:  # the others' memory goes with this one's, and weights come to where it was
                self._pool.host.stop_copying()
                self._pool.release()
            torch.cuda.empty_cache()  # of what was made so far nothing is held any more
            trim_graph_memory(call.device)
            return None
        if not call.moves and not turns.is_left(name):  # weights that move may be gone by then
            # Its own values: not any can be computed with.
            left = replace(call, tensors=[tensor.clone() for tensor in call.tensors])
            turns.leave(name, lambda: self._record_left(left))
        return None

    def _record_left(self, call: RecordedCall) -> None:
        seen = self._seen.get(call.sizes)
        if seen is None or seen.addresses != call.asked_at:  # weights have moved since
            return
        if seen.needed is None or not self._has_room(call, seen.needed):  # there was memory when it was left
            return
        with torch.cuda.device(call.device):
            call.run(self.inner, call.tensors)  # makes this thread's handles of cuBLAS and cuDNN for that device
        self._record(call)

    def _record(self, call: RecordedCall) -> Outputs | None:
        """Return the outputs of a call from a new recording; None if none can be made."""
        device = call.device
        if any(each.device.type != device.type for each in (*call.weights, *call.tensors)):
            # A compiler hands a number in RAM to its kernels by value, so a replay would not see it change.
            self._give_up("a weight is not on the device")
            return None
        while len(recordings := self.by_name) >= MOST_RECORDINGS:
            recordings.popitem(last=False)
        with self._pool.recording(device), torch.cuda.device(device):
            torch.cuda.synchronize(device)
            free = torch.cuda.mem_get_info(device)[0]
            try:
                recording = self._new_recording(call)
                result = recording.replay(call.tensors)
            except torch.OutOfMemoryError:
                self._seen[call.sizes] = replace(self._seen[call.sizes], calls=_put_off(call))
                raise
            except Exception as error:
                self._give_up(f"{type(error).__name__}: {error}")
                return None
            alone = self._pool.nbytes == 0
            nbytes = max(0, free - torch.cuda.mem_get_info(device)[0])
            together = self._pool.nbytes + nbytes
            if self._pool.add(recording, device, nbytes):
                self.by_name[call.name] = recording
            else:
                self._overflowed(call.sizes, alone, together)
        self._on_recorded()
        log.debug("recorded a CUDA graph for %s, %.0f MB", call.sizes, nbytes / 2**20)
        return result

    def _give_up(self, reason: str) -> None:
        self._unrecordable = True
        log.warning("OneDiff: a graph cannot be recorded (%s) and is launched kernel by kernel", reason)

    def _new_recording(self, call: RecordedCall) -> Recording:
        device = call.device
        pool = self._pool.on_device(device)
        least = pool.copied.most if call.moves else 0
        shared, buffers = pool.buffers([*call.tensors, *call.likes], least)
        own, outputs = cast("list[torch.Tensor]", buffers[: len(call.tensors)]), buffers[len(call.tensors) :]
        inputs = Copies(own)
        inputs.fill(call.tensors)
        with self._pool.host.holding(device), recorded_on(pool) as graph, self.inner.recordable():
            Copies(outputs).fill(call.run(self.inner, own))
        return Recording(graph, call.addresses, inputs, outputs, shared, pool, call.moves)

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


def _is_first(call: RecordedCall, recordings: Iterable[Name]) -> bool:
    """Return True if there is no recording of a call of these sizes."""
    return all(sizes != call.sizes for sizes, _ in list(recordings))


def _put_off(call: RecordedCall) -> int:
    """Return how many calls are said to have been made, where there was no memory to record this one."""
    return -(_CALLS_OF_BLOCKS if call.moves else _CALLS_BEFORE_ANOTHER_TRY)
