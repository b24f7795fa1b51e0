"""Whether the host is busy with a prompt."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

_LOOKED_AGAIN_AFTER = 0.01  # seconds


@contextlib.contextmanager
def between_prompts(patience: float = 0.0) -> Iterator[bool]:
    """Yield True if the host runs no prompt, nor cleans up after one. Then it starts none before the block is left.

    When a prompt is done the host's thread unloads models, if somebody has asked for it meanwhile, and looks for
    garbage. So no prompt runs for sure only where that thread waits for one.

    For what another thread does to things that a prompt may be using: the host's list of loaded models, the memory of
    graphs and of CUDA graph recordings.

    Args:
        patience: for how many seconds it may wait for the host to have cleaned up. It never waits for a prompt.
    """
    server = getattr(sys.modules.get("server"), "PromptServer", None)  # not imported: it is there, or there is none
    queue: Any = getattr(getattr(server, "instance", None), "prompt_queue", None)
    if not hasattr(queue, "mutex") or not hasattr(queue, "currently_running"):
        yield True
        return
    until = time.monotonic() + patience
    while True:
        with queue.mutex:
            between = not queue.currently_running and _is_waited_for(queue)
            if between or queue.currently_running or time.monotonic() >= until:
                yield between
                return
        time.sleep(_LOOKED_AGAIN_AFTER)


def _is_waited_for(queue: Any) -> bool:
    """Return True if the thread that runs prompts waits for one, or if that cannot be known. Ask with the mutex held.

    Who waits for a condition stands in its list (CPython's ``threading.Condition``), and goes on with the mutex alone.
    """
    waiting = getattr(getattr(queue, "not_empty", None), "_waiters", None)
    return waiting is None or bool(waiting)
