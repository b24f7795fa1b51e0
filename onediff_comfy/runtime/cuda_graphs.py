"""The runner: a compiled graph replayed through CUDA graphs, one recording per exact set of sizes.

Launching a model's two thousand kernels one by one takes a CPU 20 to 40 ms, as long as the kernels
themselves. A CUDA graph launches them at once. It holds addresses: a call's tensors are copied into
buffers of the recording, weights are read where they are, and when one has moved (a LoRA, a reload)
the recording is thrown away and made again. That takes a few steps' time, never a compilation.

What a recording allocates comes from one memory pool per device, shared by all: they run one after
another on one stream and hand out copies, so each may overwrite what the others left. The pool is
as large as the largest needs, and its memory comes back when the last recording is gone.

ComfyUI's server has PyTorch take memory by ``cudaMallocAsync``. What is allocated in a recording is then
part of the recording: the driver provides it at a replay, and shares it among those that do not overlap. To
free such memory outside of the recording is an error in a destructor, which ends the process, or happens
while a replay still uses it. So nothing outlives a recording that was allocated in it: outputs are copied to
tensors of ours, and the workspaces of cuBLAS are freed at its end.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
import traceback
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..engines.base import CompiledGraph
from .launch_bound import Launching

log = logging.getLogger(__name__)

# The first call of a size runs as it is: cuBLAS and cuDNN choose algorithms and allocate workspaces
# in it, Triton loads kernels, and none of that may happen in a recording.
_CALLS_BEFORE_RECORDING = 1
# A recording that was replayed so often has gained more than making it took.
_PAID_OFF_REPLAYS = 10
# A recording that is given up so often before it has paid off is not made again.
_MOST_OVERFLOWS = 2
# Less free memory than this share of a device's, after an image, and recordings go: decoding comes next.
_SPARE_SHARE = 0.15

MOST_RECORDINGS = 32
"""Of one compiled graph. Each holds some megabytes of launch parameters outside the pool."""

Sizes = tuple[tuple[int, ...], ...]


class RecordingPool:
    """The memory pool that all recordings of a device share, and how much it may hold.

    Args:
        budget: bytes that all pools together may hold right now.
    """

    def __init__(self, budget: Callable[[], int]) -> None:
        self.lock = threading.RLock()  # one recording at a time
        self._budget = budget
        self._graphs: weakref.WeakSet[RecordedGraph] = weakref.WeakSet()
        self._alive: weakref.WeakSet[_Recording] = weakref.WeakSet()
        self._owners: weakref.WeakSet[Any] = weakref.WeakSet()
        self._recording = False
        self._thread: int | None = None
        self._owes_release = False
        self._handles: dict[torch.device, Any] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._nbytes: dict[torch.device, int] = {}
        self._told_of = -1  # the largest budget that was said to be too small

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that recordings hold."""
        return sum(self._nbytes.values())

    def join(self, graph: RecordedGraph) -> None:
        """``graph`` will record here."""
        self._graphs.add(graph)

    def handle(self, device: torch.device) -> Any:
        """The pool of ``device``, for PyTorch; a new one where no recording is left in the old one.

        PyTorch ends a pool with its last graph, and refuses to record into one that has ended.
        """
        if not any(recording.tensors[0].device == device for recording in self._alive):
            self._handles[device] = torch.cuda.graph_pool_handle()
            self._nbytes.pop(device, None)
        return self._handles[device]

    def count(self, recording: _Recording) -> None:
        """``recording`` was made in the pool of its device, and keeps the pool while it is there."""
        self._alive.add(recording)

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """The stream that all recordings of ``device`` are made on: PyTorch reuses memory per stream only."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def grown(self, device: torch.device, nbytes: int) -> bool:
        """Count what a new recording took. False if that was too much, and everything was thrown away."""
        self._nbytes[device] = self._nbytes.get(device, 0) + nbytes
        return self.keep_to_budget()

    def budget_changed(self) -> None:
        """Hold to a budget that is another now; what was too large for the old one may be recorded again."""
        for graph in list(self._graphs):
            graph.reconsider()
        self.keep_to_budget()

    def tell_too_large(self, nbytes: int) -> None:
        """Say, once for a budget, that not all recordings are made, which would take ``nbytes`` together."""
        budget = self._budget()
        if budget > self._told_of:
            self._told_of = budget
            log.warning(
                "OneDiff: CUDA graph recordings would take %d MB and may take %d MB: some calls are launched kernel by "
                "kernel from now on, which can be slower. To have them replayed, set cache_budget_mb on OneDiff Model "
                "Speedup to a larger number; at 0 it is an eighth of the device's memory",
                nbytes >> 20,
                budget >> 20,
            )

    def keep_to_budget(self) -> bool:
        """Throw everything away if it is more than may be held. Whether all could stay."""
        if self.nbytes <= self._budget():
            return True
        log.info("OneDiff: CUDA graph recordings held %d MB, more than their budget; recording anew", self.nbytes >> 20)
        with self.lock:
            self._release()
        return False

    def release_if_short(self) -> None:
        """Throw all recordings away where the device has little memory left for whatever comes next."""
        for device, held in list(self._nbytes.items()):
            if memory_is_short(device, held):
                log.info("OneDiff: released %d MB of CUDA graph recordings, memory is short", self.release() >> 20)

    def release_with(self, owner: object) -> None:
        """Throw all recordings away when ``owner``, whose weights some of them read, is no more."""
        if owner not in self._owners:
            self._owners.add(owner)
            weakref.finalize(owner, self.release).atexit = False

    def record_on_this_thread(self) -> None:
        """Record what this thread calls from now on, and nothing else. What was recorded is replayed on any.

        Under ``cudaMallocAsync`` PyTorch takes whatever any thread allocates and frees while one records for a part of
        the recording. ComfyUI's MultiGPU CFG Split calls a model, and its ControlNets, in a thread for each GPU beside
        the one that runs prompts: the process ended.
        """
        self._thread = threading.get_ident()

    @property
    def may_grow(self) -> bool:
        """Whether this thread's calls are recorded."""
        return self._thread is None or self._thread == threading.get_ident()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """One recording is made inside, by this thread.

        Whatever asks for a release meanwhile, as a model that dies in a garbage collection, has it afterwards.
        """
        with self.lock:
            self._recording = True
            try:
                yield
            finally:
                self._recording = False
                if self._owes_release:
                    self._owes_release = False
                    self._release()

    def release(self) -> int:
        """Throw all recordings away and give their memory back to the device: the bytes they held."""
        with self.lock:
            if self._recording:
                self._owes_release = True
                return 0
            return self._release()

    def _release(self) -> int:
        released = self.nbytes
        for graph in list(self._graphs):
            graph.forget_recordings()
        devices = list(self._handles)
        self._handles.clear()
        self._nbytes.clear()
        if released:  # PyTorch keeps a pool that nobody uses until it is told to, and so does the driver
            torch.cuda.empty_cache()
            for device in devices:
                _trim(device)
        return released


@dataclass(eq=False)
class _Recording:
    graph: torch.cuda.CUDAGraph
    addresses: list[int]
    tensors: list[torch.Tensor]
    outputs: Sequence[torch.Tensor]
    replays: int = 0

    def replay(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self.replays += 1
        _copy(tensors, self.tensors)
        with _memory_errors():
            self.graph.replay()
        # The next replay overwrites them, and a caller may keep what it is given.
        return [output.clone() for output in self.outputs]


@dataclass(frozen=True)
class _Seen:
    """Calls of one set of sizes, with weights at the same addresses, before they are recorded."""

    addresses: list[int]
    calls: int
    outputs: list[torch.Tensor]  # without memory


def memory_is_short(device: torch.device, recorded: int = 0) -> bool:
    """Return True if ``device`` has little memory left for whatever comes next. Never of a CPU's.

    Args:
        recorded: bytes that recordings hold there.
    """
    if device.type != "cuda":
        return False
    free, total = torch.cuda.mem_get_info(device)
    # What PyTorch has reserved and not given out is free for the next tensor, the pool of recordings is not.
    spare = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) - recorded
    return free + max(0, spare) < total * _SPARE_SHARE


def _copy(source: Sequence[torch.Tensor], destination: Sequence[torch.Tensor]) -> None:
    for given, own in zip(source, destination, strict=True):
        own.copy_(given)


class RecordedGraph(CompiledGraph):
    """``inner``, replayed through CUDA graphs where that can be done.

    Args:
        inner: a compiled graph of any engine.
        pool: shared by all recorded graphs.
        on_recorded: called after each recording.
    """

    def __init__(self, inner: CompiledGraph, pool: RecordingPool, on_recorded: Callable[[], None]) -> None:
        super().__init__(inner.binding, inner.shapes)
        self.inner = inner
        self._pool = pool
        self._on_recorded = on_recorded
        self._recordings: OrderedDict[Sizes, _Recording] = OrderedDict()
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
        """How many sizes are recorded."""
        return len(self._recordings)

    def forget_recordings(self) -> None:
        """Throw the recordings away; they are made again when their sizes come again."""
        for sizes, recording in self._recordings.items():
            if recording.replays >= _PAID_OFF_REPLAYS:
                del self._overflows[sizes]
        self._recordings.clear()

    def reconsider(self) -> None:
        """Forget which sizes were too large to record."""
        self._plain.clear()
        self._overflows.clear()

    def __call__(self, weights: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return self.run(weights, tensors)

    def run(
        self, weights: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], record_only_launch_bound: bool = False
    ) -> Sequence[torch.Tensor]:
        """The outputs for ``tensors``.

        Args:
            record_only_launch_bound: only calls that are bound by launching are recorded.
        """
        sizes = tuple(tuple(tensor.shape) for tensor in tensors)
        if self._unrecordable or sizes in self._plain or any(tensor.device.type != "cuda" for tensor in tensors):
            return self.inner(weights, tensors)
        addresses = [weight.data_ptr() for weight in weights]
        recording = self._recordings.get(sizes)
        if recording is not None and recording.addresses == addresses:
            self._recordings.move_to_end(sizes)
            return recording.replay(tensors)
        if recording is not None:  # weights have moved, and every recording reads some of them
            self.forget_recordings()
        seen = self._seen.get(sizes)
        calls = seen.calls if seen is not None and seen.addresses == addresses else 0
        gains = self._pool.may_grow and (not record_only_launch_bound or self._launching.bound(sizes))
        if gains and seen is not None and calls >= _CALLS_BEFORE_RECORDING:
            recorded = self._record(sizes, addresses, weights, tensors, seen.outputs)
            if recorded is not None:
                return recorded
        with self._launching.measured(sizes, tensors[0].device):
            outputs = self.inner(weights, tensors)
        self._seen[sizes] = _Seen(addresses, calls + 1, [output.to("meta") for output in outputs])
        return outputs

    def _record(
        self,
        sizes: Sizes,
        addresses: list[int],
        weights: Sequence[torch.Tensor],
        tensors: Sequence[torch.Tensor],
        likes: Sequence[torch.Tensor],
    ) -> list[torch.Tensor] | None:
        """The outputs for ``tensors``, like ``likes``, from a new recording; None if this graph cannot be recorded."""
        device = tensors[0].device
        while len(self._recordings) >= MOST_RECORDINGS:
            self._recordings.popitem(last=False)
        with self._pool.recording(), torch.cuda.device(device):
            torch.cuda.synchronize(device)
            free = torch.cuda.mem_get_info(device)[0]
            random_state = torch.cuda.get_rng_state(device)
            own = [tensor.clone() for tensor in tensors]
            outputs = [torch.empty_like(like, device=device) for like in likes]
            torch._C._cuda_clearCublasWorkspaces()  # those of cuBLAS so far, which are not the recording's
            graph = torch.cuda.CUDAGraph()
            side = self._pool.stream(device)
            side.wait_stream(torch.cuda.current_stream(device))
            try:
                with _memory_errors(), torch.cuda.stream(side):
                    # thread_local: what other threads do (a graph being loaded, an image being
                    # encoded) must not end this recording, nor this recording them.
                    graph.capture_begin(pool=self._pool.handle(device), capture_error_mode="thread_local")
                    try:
                        with self.inner.recordable():
                            _copy(self.inner(weights, own), outputs)
                    except BaseException as error:
                        traceback.clear_frames(error.__traceback__)  # they hold tensors
                        raise
                    finally:
                        # cuBLAS would keep what it allocated while recording, 32 MB, beyond the pool's end.
                        torch._C._cuda_clearCublasWorkspaces()
                        graph.capture_end()
                torch.cuda.current_stream(device).wait_stream(side)
                recording = _Recording(graph, addresses, own, outputs)
                result = recording.replay(tensors)
            except Exception as error:
                _renew_generator(device, random_state)
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                self._unrecordable = True
                log.warning(
                    "OneDiff: a graph cannot be recorded (%s: %s) and is launched kernel by kernel",
                    type(error).__name__,
                    error,
                )
                return None
            alone = self._pool.nbytes == 0
            self._pool.count(recording)
            nbytes = max(0, free - torch.cuda.mem_get_info(device)[0])
            together = self._pool.nbytes + nbytes
            if self._pool.grown(device, nbytes):
                self._recordings[sizes] = recording
            else:
                self._overflowed(sizes, alone, together)
        self._on_recorded()
        log.debug("recorded a CUDA graph for %s, %.0f MB", sizes, nbytes / 2**20)
        return result

    def _overflowed(self, sizes: Sizes, alone: bool, together: int) -> None:
        """A recording was too much for the budget: not for ever, where it and others take turns in every step.

        Args:
            alone: there were no others.
            together: bytes that it takes with the others.
        """
        self._overflows[sizes] += 1
        if alone or self._overflows[sizes] >= _MOST_OVERFLOWS:
            self._plain.add(sizes)
            self._pool.tell_too_large(together)


@contextlib.contextmanager
def _memory_errors() -> Iterator[None]:
    """The driver's own error for want of memory, which a replay may meet too, as PyTorch's."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if "out of memory" in str(error):
            raise torch.OutOfMemoryError(str(error)) from error
        raise


def _trim(device: torch.device) -> None:
    """Have the driver give back what recordings that are gone have used; only ``cudaMallocAsync`` leaves it that."""
    if torch.cuda.get_allocator_backend() != "cudaMallocAsync":
        return
    try:
        driver = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
        handle = ctypes.c_int()
        error = driver.cuDeviceGet(ctypes.byref(handle), device.index or 0) or driver.cuDeviceGraphMemTrim(handle)
        if error:
            log.debug("the driver did not give back the memory of recordings (error %d)", error)
    except (OSError, AttributeError) as missing:
        log.debug("the driver cannot be asked to give back the memory of recordings: %s", missing)


def _renew_generator(device: torch.device, state: torch.Tensor) -> None:
    """Give the device's random generator a fresh state with the same numbers to come.

    A recording that fails leaves PyTorch's generator believing that it is still being recorded, and
    the next random number that anybody wants there is an error.
    """
    fresh = torch.Generator(device)
    fresh.set_state(state)
    torch.cuda.default_generators[device.index or 0].graphsafe_set_state(fresh)
