"""OneFlow's session: one per process, one user at a time, and memory that only a reset gives back.

A graph that is dropped keeps its activations until the session is reset, which no other graph may live through.
So graphs that are ready to run are known here. When one is no more, the next use of OneFlow ends the others too,
resets, and each is made ready again when it is called (``Program`` is kept, nothing is compiled).
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import oneflow as flow
import oneflow._oneflow_internal as internal
import torch
from oneflow.core.job import job_conf_pb2
from oneflow.framework import graph_build_util, session_context


class Resident(Protocol):
    """Something that holds memory of the session's."""

    def end(self) -> None:
        """Let go of it. It may be used again, and makes itself ready again then."""


_LOCK = threading.RLock()
_residents: weakref.WeakSet[Any] = weakref.WeakSet()
_left_behind = threading.Event()  # memory of something that is no more


@contextmanager
def exclusive() -> Iterator[None]:
    """Held for whatever OneFlow does: it builds one job at a time and runs one graph after another."""
    with _LOCK, flow.no_grad():
        if _left_behind.is_set():
            reset()
        yield


def reset() -> None:
    """End everything that is ready to run and give back the memory of all that ever was. Inside ``exclusive``."""
    for resident in list(_residents):
        resident.end()
    _residents.clear()
    session = session_context.GetDefaultSession()
    internal.eager.Sync()
    session.Reset()
    _left_behind.clear()


def _end_all() -> None:
    for resident in list(_residents):
        resident.end()
    internal.eager.Sync()


# Before OneFlow's own end, which waits for ever for graphs that are still there.
atexit.register(_end_all)


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
