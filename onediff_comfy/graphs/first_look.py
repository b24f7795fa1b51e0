"""The first look for a graph in background mode, put off: the first moments of a first image are eager's alone.

Looking takes the interpreter 0.2 s for SDXL, and a process that compiles makes eager slower wherever cores are not
really idle: 16% on an H200's machine (benchmarks/NOTES.md). A short image is made by then; of a long one it is little.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import torch

from ..capture.call import NotCovered

log = logging.getLogger(__name__)


class FirstLook:
    """Looks once, on a thread of its own, some time after it was first asked to.

    Args:
        seconds: how long after.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._look: Callable[[], object] | None = None
        self._begun = self._over = False

    def put_off(self, look: Callable[[], object]) -> bool:
        """Whether it is too early.

        Args:
            look: looks for a graph, or begins to make one. Only the first of several is asked to.
        """
        if not self._begun:
            self._begun, self._look = True, look
            timer = threading.Timer(self._seconds, self._do)
            timer.daemon = True
            timer.start()
        return not self._over

    def _do(self) -> None:
        look, self._look = self._look, None  # it holds the tensors of a call
        assert look is not None
        try:
            with torch.no_grad():
                look()
        except NotCovered:
            pass  # most of all, not yet; whatever else it is, the next call is told again
        except Exception:
            log.debug("the first look for a graph failed", exc_info=True)
        finally:
            self._over = True
