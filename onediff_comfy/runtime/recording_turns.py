"""Which thread records, and what other threads leave to it.

Under ``cudaMallocAsync`` PyTorch takes whatever any thread allocates and frees while one records for a part of the
recording. ComfyUI's MultiGPU CFG Split calls a model, and its ControlNets, in a thread for each GPU: when one of them
recorded, the process ended. So the thread that runs prompts makes all recordings, and those of other threads' calls
when these threads are gone. What is recorded is replayed on any.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Left:
    record: Callable[[], None]
    thread: threading.Thread


class RecordingTurns:
    """Tells threads whether to record, and keeps what they leave."""

    def __init__(self) -> None:
        self._recorder: int | None = None
        self._left: dict[Hashable, _Left] = {}

    def record_on_this_thread(self) -> None:
        """Have this thread make all recordings from now on."""
        self._recorder = threading.get_ident()

    @property
    def ours(self) -> bool:
        """Return True if this thread records. Without one that was named every thread does."""
        return self._recorder in (None, threading.get_ident())

    def is_left(self, name: Hashable) -> bool:
        """Return True if what has this name is to be recorded already."""
        return name in self._left

    def leave(self, name: Hashable, record: Callable[[], None]) -> None:
        """Have a call of this thread recorded when this thread has ended.

        Args:
            name: of the call, for ``is_left``.
            record: makes the recording.
        """
        self._left[name] = _Left(record, threading.current_thread())

    def record_what_was_left(self) -> bool:
        """Make the recordings that threads have left which are gone; of others nothing. Return False if memory ran out.

        The run is over and its picture is there, so nothing that goes wrong is raised.
        """
        if not self.ours:
            return True
        left, self._left = self._left, {}
        if any(each.thread.is_alive() for each in left.values()):
            return True
        for each in left.values():
            try:
                each.record()
            except torch.OutOfMemoryError:
                return False
            except Exception as error:
                log.warning("OneDiff: a call of another GPU could not be recorded (%s)", error)
        return True

    def forget(self) -> None:
        """Keep nothing of what was left: it holds weights and arguments."""
        self._left = {}
