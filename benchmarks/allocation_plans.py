"""The compiler of newer hosts on the host that we have: what plans a forward's allocations, and where it is opened.

ComfyUI from autumn 2026 on opens a plan in the forward of some models, before it calls wrappers of the diffusion model,
and closes it when the output is copied out. Here the forward of any class of models is given that form, and the host's
module ``comfy.model_prefetch`` the functions that others pause the plan by. What plans is comfy-aimdo (0.5 and later),
or, where there is no GPU, ``CountingPlan``, which hands out no memory and only counts.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import comfy.model_prefetch
import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from onediff_comfy.serving import module_guard


class Plan(Protocol):
    """What is used of ``comfy_aimdo.malloc_graph.MallocGraph``, and what the host notes on it."""

    rogue_count: int
    _comfy_active: bool

    def push(self) -> None: ...
    def pop(self) -> bool: ...
    def abort(self) -> None: ...
    def pause(self, sync: bool = False) -> None: ...
    def resume(self, sync: bool = False) -> None: ...
    def iterate(self, name: str | None = None) -> bool: ...


@dataclass
class Opened:
    """The host's compiler, as it is installed here.

    Attributes:
        record: begins a new plan on a device.
        plans: the plan of each thread.
        active: of those, the threads whose forward is under way.
        forwards: how many there were, since they were counted last.
        breaks: those that allocated otherwise than planned.
        rogues: allocations that outlived their forward.
        aborts: plans that were given up in the middle of a forward.
        errors: of the planner's own.
    """

    record: Callable[[torch.device], Plan]
    plans: dict[int, Plan] = field(default_factory=dict)
    forwards: int = 0
    breaks: int = 0
    rogues: int = 0
    aborts: int = 0
    errors: int = 0

    def begin(self, device: torch.device) -> None:
        """Begin a forward."""
        plan = self.plans.get(threading.get_ident())
        if plan is None:
            plan = self.plans[threading.get_ident()] = self.record(device)
        else:
            plan.push()
        plan._comfy_active = True
        self.forwards += 1

    def end(self) -> None:
        """End a forward."""
        plan = self.active()
        if plan is not None:
            plan._comfy_active = False
            self.breaks += bool(plan.pop())

    @contextlib.contextmanager
    def pause(self, sync: bool = False) -> Iterator[None]:
        """Plan nothing inside. As the host's, it does not notice that a pause is one already."""
        plan = self.active()
        if plan is not None:
            plan.pause(sync=sync)
        try:
            yield
        finally:
            plan = self.active()
            if plan is not None:
                plan.resume(sync=sync)

    def pop(
        self,
        queue: Any,
        device: Any,
        module: Any,
        *rest: Any,
        core: Callable[[], None] | None = None,
        malloc_scope: str | None = None,
        **options: Any,
    ) -> None:
        """Begin a block, after whose weights the host asks for those of the next, and run what it is given of it."""
        plan = self.active()
        if plan is not None and malloc_scope is not None:
            self.breaks += bool(plan.iterate(malloc_scope if module is not None else None))
        if core is not None:
            core()

    def clean_up(self) -> None:
        """Drop this thread's plan, as the host does behind each node."""
        plan = self.plans.pop(threading.get_ident(), None)
        if plan is None:
            return
        if plan._comfy_active:
            self.aborts += 1
            plan._comfy_active = False
            try:
                plan.abort()
            except RuntimeError:
                self.errors += 1
        self.rogues += plan.rogue_count

    def active(self) -> Plan | None:
        """Return the plan that this thread's forward follows now."""
        plan = self.plans.get(threading.get_ident())
        return plan if plan is not None and plan._comfy_active else None

    def counted(self) -> dict[str, int]:
        """Return what was counted since it was asked last."""
        names = ("forwards", "breaks", "rogues", "aborts", "errors")
        found = {name: getattr(self, name) for name in names}
        vars(self).update(dict.fromkeys(names, 0))
        return found


def install(record: Callable[[torch.device], Plan]) -> Opened:
    """Give the host the functions that the compiler is opened, paused and closed by. Once, before it is used."""
    opened, prefetch = Opened(record), comfy.model_prefetch
    prefetch.MALLOC_GRAPHS = opened.plans
    prefetch.malloc_graph_begin, prefetch.malloc_graph_end = opened.begin, opened.end
    prefetch.prefetch_queue_pop = opened.pop
    prefetch.pause_malloc_graph, prefetch.cleanup_malloc_graph = opened.pause, opened.clean_up
    return opened


def open_in_forward(kind: type) -> None:
    """Have the forward of a class of models, which calls the wrappers, be planned, by what ``install`` has installed.

    As a newer host's, it calls functions of the host's module, and holds no plan itself.
    """
    forward = kind.forward  # type: ignore[attr-defined]

    @functools.wraps(forward)
    def planned(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        output = torch.empty_like(x)
        comfy.model_prefetch.malloc_graph_begin(x.device)
        found = forward(self, x, *args, **kwargs)
        output.copy_(found)
        del found
        comfy.model_prefetch.malloc_graph_end()
        return output

    kind.forward = planned  # type: ignore[attr-defined]


def of_aimdo(device: torch.device) -> Any:
    """Return a new plan of comfy-aimdo's for what is allocated on the current stream."""
    import comfy_aimdo.malloc_graph

    return comfy_aimdo.malloc_graph.record(torch.cuda.current_stream(device), False)


def start_aimdo(device: torch.device) -> None:
    """Have comfy-aimdo see what is allocated on a device. Models are loaded as without it.

    Raises:
        RuntimeError: it does not support the device.
    """
    import comfy_aimdo.control as control

    if not control.init():
        raise RuntimeError("comfy-aimdo cannot be used here")
    control.set_log_warning()
    if not control.init_devices([(device.index or 0, 0)]):
        raise RuntimeError("comfy-aimdo found no device that it supports")


class CountingPlan(Plan):
    """Stands for a plan of comfy-aimdo's where there is no GPU: it counts, by ``watched``, and plans nothing.

    Attributes:
        planned: allocations that were made while it did not pause.
        rogue_count: of those, how many outlived what they were made in.
        freed_in_pause: of those, how many were freed while it paused, in the forward that they were made in. With
            comfy-aimdo that ends the process.

    As comfy-aimdo's it fails at the end of a forward in which something was freed in another block than it was made in.
    """

    def __init__(self) -> None:
        self.planned = self.rogue_count = self.freed_in_pause = 0
        self._comfy_active = self._paused = False
        self._open: list[dict[int, str]] = [{}]  # what is alive of each scope
        self._left: list[dict[int, str]] = []  # of scopes of this forward that were left, what outlived them
        self._failed = False
        self._scopes: list[str] = []
        self._events: list[object] = []
        self._known: set[tuple[object, ...]] = set()
        self._stream = torch.Stream(device="cpu")  # comfy-aimdo's have the device's, which nothing can describe

    def push(self) -> None:
        if self._open:
            raise RuntimeError("aimdo memory compile error")
        self._open, self._left, self._events = [{}], [], []

    def pop(self) -> bool:
        self._leave()
        if self._failed:
            raise RuntimeError("aimdo memory compile error")
        if self._open:
            return False
        events = tuple(self._events)
        broken = bool(self._known) and events not in self._known
        self._known.add(events)
        return broken

    def abort(self) -> None:
        self._open, self._left, self._scopes = [], [], []

    def pause(self, sync: bool = False) -> None:
        self._paused = True

    def resume(self, sync: bool = False) -> None:
        self._paused = False

    def iterate(self, name: str | None = None) -> bool:
        if self._scopes and name in (None, self._scopes[-1]):
            self._scopes.pop()
            self._leave()
        if name is not None:
            self._scopes.append(name)
            self._open.append({})
        return False

    def allocated(self, storage: torch.UntypedStorage) -> None:
        """Note a new allocation."""
        if self._paused or not self._open:
            return
        self.planned += 1
        self._events.append(storage.nbytes())
        key, scope = storage._cdata, self._open[-1]
        scope[key] = "alive"
        weakref.finalize(storage, self._freed, key, scope)

    def _freed(self, key: int, scope: dict[int, str]) -> None:
        if scope.pop(key, None) is None or not self._open:
            return
        if any(scope is each for each in self._open):
            self._events.append(None)
            self.freed_in_pause += self._paused
            self._failed |= not self._paused and scope is not self._open[-1]
        else:
            self._failed |= any(scope is each for each in self._left)

    def _leave(self) -> None:
        self._left.append(self._open.pop())
        self.rogue_count += len(self._left[-1])


class _Watch(TorchDispatchMode):
    def __init__(self, opened: Opened) -> None:
        super().__init__()
        self._opened = opened

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        plan = self._opened.active()
        if isinstance(plan, CountingPlan):
            given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
            for tensor in _tensors(output):
                storage = tensor.untyped_storage()
                if storage._cdata not in given:
                    given.add(storage._cdata)
                    plan.allocated(storage)
        return output


def _tensors(values: Any) -> list[torch.Tensor]:
    """Return those that have memory."""
    leaves = pytree.tree_leaves(values)
    real = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor))
    return [tensor for tensor in real if type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_meta]


@contextlib.contextmanager
def watched(opened: Opened) -> Iterator[None]:
    """Tell a ``CountingPlan`` inside of what this thread's operators allocate.

    What tells it has a hand in all that PyTorch does, which no model is served under. So that is not looked for inside.
    """
    looks, module_guard.refuse_what_sees_all = module_guard.refuse_what_sees_all, lambda: None
    try:
        with _Watch(opened):
            yield
    finally:
        module_guard.refuse_what_sees_all = looks
