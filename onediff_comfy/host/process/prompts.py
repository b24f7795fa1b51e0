"""Whether the host is busy with a prompt."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def between_prompts() -> Iterator[bool]:
    """Yield True if the host is running no prompt. Then it starts none before the block is left.

    For what another thread does to things that a prompt may be using: the host's list of loaded models, the memory of
    graphs and of CUDA graph recordings.
    """
    server = getattr(sys.modules.get("server"), "PromptServer", None)  # not imported: it is there, or there is none
    queue: Any = getattr(getattr(server, "instance", None), "prompt_queue", None)
    if not hasattr(queue, "mutex") or not hasattr(queue, "currently_running"):
        yield True
        return
    with queue.mutex:
        yield not queue.currently_running
