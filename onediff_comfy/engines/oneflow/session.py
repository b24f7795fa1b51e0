"""OneFlow's session: one per process, one user at a time, and memory that only a reset gives back.

A graph that is dropped keeps its activations until the session is reset, which no other graph may live through.
So graphs that are ready to run are known here. When one is no more, the next use of OneFlow ends the others too,
resets, and each is made ready again when it is called (``Program`` is kept, nothing is compiled).
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import oneflow as flow
import oneflow._oneflow_internal as internal
import torch
from oneflow.core.job import job_conf_pb2
from oneflow.framework import graph_build_util, session_context
from oneflow.framework.tensor_tuple_util import convert_to_tensor_tuple

from .sharing import shared

log = logging.getLogger(__name__)


class Resident(Protocol):
    """Something that holds memory of the session's."""

    def end(self) -> None:
        """Let go of it. It may be used again, and makes itself ready again then."""


_LOCK = threading.RLock()
_residents: weakref.WeakSet[Any] = weakref.WeakSet()
_left_behind = threading.Event()  # memory of something that is no more
_open: list[torch.UntypedStorage] = []  # of graphs that OneFlow may not have closed: what each owns until then
_never_closed: list[torch.UntypedStorage] = []  # kept, or nobody would know; a reset would end the process
_PATIENCE = 10.0  # seconds; closing takes milliseconds


@contextmanager
def exclusive() -> Iterator[None]:
    """Held for whatever OneFlow does: it builds one job at a time and runs one graph after another."""
    with _LOCK, flow.no_grad():
        if _left_behind.is_set():
            reset()
        yield


def reset() -> None:
    """End everything that is ready to run and give back the memory of all that ever was. Inside ``exclusive``."""
    ended = _end_all()
    _left_behind.clear()
    if ended:
        session_context.GetDefaultSession().Reset()


def _end_all() -> bool:
    """End everything that is ready to run, and wait until OneFlow has closed it; False if there is what it never will.

    Whoever lets go of a graph last closes it, and that can be OneFlow's scheduler: ``Sync`` waits for results alone. A
    reset that comes before ends the process.
    """
    for resident in list(_residents):
        resident.end()
    _residents.clear()
    deadline = time.monotonic() + _PATIENCE
    while True:
        internal.eager.Sync()
        _open[:] = [owned for owned in _open if torch._C._storage_Use_Count(owned._cdata) > 1]
        if not _open:
            return not _never_closed
        if time.monotonic() > deadline:
            log.warning("OneDiff: OneFlow does not close a graph that is not used; its memory is taken until a restart")
            _never_closed.extend(_open)
            _open.clear()
            return False
        time.sleep(0.001)


atexit.register(_end_all)  # before OneFlow's own end, which waits for ever for graphs that are still there


def watch(graph: Any) -> None:
    """Have resets wait until OneFlow has closed ``graph``, which is not made ready yet. Inside ``exclusive``.

    Nothing says when that is; but a graph owns its variables, and gives them up when it is closed.
    """
    owned = torch.empty(1)
    # A variable that the job does not use, which OneFlow allows.
    graph.register_variable_op_names_and_tensors(["onediff_watched"], convert_to_tensor_tuple([shared(owned)]))
    _open.append(owned.untyped_storage())


@contextmanager
def considerate_threads() -> Iterator[None]:
    """Threads that are started inside push no other off its core when they wake up. For making a graph ready.

    OneFlow 0.9 hands a job to its threads, and then puts it into a queue out of which they take it when it is done. A
    small job can be done before, if they run in place of who handed it over: then they take something else out. The
    graph is never closed, or the process hangs, or ends. Of 400 tiny graphs on two cores it was one; so it is none.
    """
    if os.sched_getscheduler(0) != os.SCHED_OTHER:  # somebody's decision
        yield
        return
    with suppress(OSError):  # where a sandbox does not let it be: rare as that is for models of real sizes
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # this thread's, which those that it starts inherit
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def entered(resident: Resident) -> None:
    """It is ready to run now."""
    _residents.add(resident)


def left() -> None:
    """Something that was ready to run is no more. Callable from anywhere, garbage collection included."""
    _left_behind.set()


@contextmanager
def building(name: str, conf: Any = None) -> Iterator[Any]:
    """Inside, operators on lazy tensors become parts of a new job. Gives the session, which must outlive the job.

    Args:
        name: of the job; OneFlow wants each to be another.
        conf: the job's configuration; that of inference unless given.
    """
    session = session_context.GetDefaultSession()
    session.TryInit()
    if conf is None:
        conf = job_conf_pb2.JobConfigProto()
        conf.predict_conf.SetInParent()
    conf.job_name = name
    with graph_build_util.graph_build_context(conf, session):
        yield session


def memory_in_use(device: torch.device) -> int:
    """Bytes that this process holds (CPU) or that are taken on a GPU: its differences say what something costs."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    with open("/proc/self/statm") as statm:  # wheels are for Linux
        return int(statm.read().split()[1]) * 4096
