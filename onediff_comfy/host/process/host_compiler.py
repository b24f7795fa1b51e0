"""The host's own compiler, while something of ours runs inside a model's forward.

Since autumn 2026 the host plans what the forward of some models allocates. Of each thread comfy-aimdo notes what is
allocated and freed in the first call, and hands out the same memory in the next. Whatever comes otherwise than it was
noted makes a new plan. What outlives the forward takes its memory with it. What is freed where the plan does not
expect it, or while the plan looks away, ends the forward or the process.

Our work allocates as it likes: captures, proofs, recordings, first calls. So it is done in the host's own pause. The
host's forward, which is also what we compare with, runs outside of it, and is planned as without us. A tensor that the
one side makes and the other frees is no trouble then: eager's are freed after our pause, and ours are no part of the
plan.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from ...capture.call import NotCovered
from ...messages import message
from ..compatibility import PAUSES_COMPILER

log = logging.getLogger(__name__)

_PLANS = ("MALLOC_GRAPHS", "ACTIVE_MALLOC_GRAPHS")
"""Where the host has the plan of each thread, by the thread's number. The second name is of its first days."""


@contextlib.contextmanager
def unplanned() -> Iterator[None]:
    """Have the host's compiler take no notice of what this thread allocates and frees inside.

    Do not free anything inside that was allocated outside of it in the same forward. A pause in a pause would end both,
    and an operator of comfy-kitchen's may pause for itself: so the plan is out of its sight.

    Raises:
        NotCovered: the compiler is at work here, and this host cannot have it pause.
    """
    prefetch = _prefetch()
    plan = None if prefetch is None else _plan(prefetch)
    if prefetch is None or plan is None:
        yield
        return
    if not can_pause():
        raise NotCovered(
            message(
                "this ComfyUI's own compiler plans the model's memory and cannot be paused; update ComfyUI, or start "
                "it with --disable-comfy-compiler"
            )
        )
    with prefetch.pause_malloc_graph(), _out_of_sight(plan):
        yield


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Trace a forward inside, which may begin a plan or blocks of one. End in the end what it has not ended itself.

    A trace ends wherever something cannot be captured. The host's own forward, which is next, would fail on what is
    left open.
    """
    prefetch = _prefetch()
    if prefetch is None:
        yield
        return
    before = _plan(prefetch)
    depth = _depth(before)
    try:
        yield
    finally:
        if before is not None:
            for _ in range(_depth(before) - depth):
                before.iterate()
        elif _plan(prefetch) is not None:
            log.debug("a trace left a plan of the host's open")
            (prefetch.cleanup_malloc_graph if can_pause() else prefetch.malloc_graph_end)()


def calls_blocks_unplanned(forward: Callable[..., Any]) -> bool:
    """Return True if a model's forward has the host's compiler pause while it calls blocks, as Qwen-Image 2.1's does.

    A pause does not say that it is one already. So ours, around a block, would end the host's, and what the block's
    own forward makes would be planned where it must not be.
    """
    code = getattr(forward, "__code__", None)
    return code is not None and PAUSES_COMPILER[1].path in code.co_names


@functools.cache
def _prefetch() -> ModuleType | None:
    """Return the host's module that has the compiler; None where there is none."""
    try:
        found = importlib.import_module("comfy.model_prefetch")
    except ImportError:
        return None
    return found if hasattr(found, "malloc_graph_begin") else None


@functools.cache
def can_pause() -> bool:
    """Return True if this host's compiler can be told to take no notice, as we tell it."""
    return all(use.problem() is None for use in PAUSES_COMPILER)


def _plan(prefetch: ModuleType) -> Any | None:
    """Return the plan that is followed or made in this thread now."""
    for name in _PLANS:
        plan = getattr(prefetch, name, {}).get(threading.get_ident())
        if plan is not None and getattr(plan, "_comfy_active", True):
            return plan
    return None


@contextlib.contextmanager
def _out_of_sight(plan: Any) -> Iterator[None]:
    """Have the host take a plan that is paused for one that is not followed. It neither pauses nor resumes that."""
    seen = getattr(plan, "_comfy_active", None)
    if seen is None:  # a host of the compiler's first days, in which nothing but ours pauses
        yield
        return
    plan._comfy_active = False
    try:
        yield
    finally:
        plan._comfy_active = seen


def _depth(plan: Any | None) -> int:
    """Return how many blocks of a plan are open."""
    return len(getattr(plan, "_scopes", ()))
