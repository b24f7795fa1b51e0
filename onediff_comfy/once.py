"""What there is one of in a process, made when it is first asked for."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TypeVar

Made = TypeVar("Made")


def once(make: Callable[[], Made]) -> Callable[[], Made]:
    """Have a function called once, whichever threads ask at the same time; all are given what it returned.

    ``functools.cache`` calls it for each of them, and the host's server asks beside the thread that runs prompts.
    """
    lock, made = threading.RLock(), functools.cache(make)  # an RLock, for a finalizer may ask in the middle of it

    @functools.wraps(make)
    def get() -> Made:
        with lock:
            return made()

    return get
