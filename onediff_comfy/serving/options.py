"""What a person chose for an accelerated object, and how fast it turned out to be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..capture.call import Signature


@dataclass(frozen=True)
class Speed:
    """Calls of one size, timed.

    Attributes:
        graph_key: of the graph that answers them.
        call: their largest tensor, for people.
        eager_s: seconds of one call eager.
        graph_s: seconds of one answer of the graph.
    """

    graph_key: str
    call: str
    eager_s: float
    graph_s: float


def no_sizes(_signature: Signature) -> bool:
    """Return False: calls of no size are to have a graph of their own."""
    return False


@dataclass(frozen=True)
class Options:
    """What a person chose for an accelerated object, and what its kind asks for.

    Attributes:
        precision: one of ``PRECISIONS``; with fp8, graphs are lossless where it cannot be had or is too far off.
        specialize: returns True if calls of a signature are to have a graph for their sizes alone, though a general
            graph serves them too. It is made ahead (``preparing``) or in the background.
        compile: one of ``COMPILE_CHOICES``. Unless it is ``wait``, another process compiles, and calls run as the host
            would until the graph is there.
        compile_delay_s: in the background, for how many seconds of a process's first image nothing but eager is at
            work once the weights are read, where no graph of any model is in memory yet.
        record_only_launch_bound: see ``Executor``.
    """

    precision: str = "lossless"
    specialize: Callable[[Signature], bool] = no_sizes
    compile: str = "wait"
    compile_delay_s: float = 0.0
    record_only_launch_bound: bool = False


DEFAULTS = Options()
"""What a person chose who changed nothing."""
