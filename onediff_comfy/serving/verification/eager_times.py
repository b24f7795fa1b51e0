"""How long calls take without a graph: which of them are timed, and when their times are believed."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from ...capture.call import Signature, TensorSpec
from ...compilation.compile_graph import largest_tensor
from ...compilation.library import GraphLibrary
from ...runtime.device_memory import memory_is_short
from ..decision import Served
from ..executor import EAGER, CallTimes
from ..options import Speed
from ..run import Kind

_EVERY_CALLS = 20
"""Of a graph, between two eager calls that are only timed."""
_MOST = 5
"""So many samples are believed, however much they differ."""
_AGREE = 1.1
"""Two samples that differ by less than this factor agree."""
_ODD_GAIN = 3.0
"""More than this, or less than nothing, is believed only of the most samples."""
_LONG_S = 1.0
"""Calls that take longer are timed once: what else the machine does matters less there, and one more costs more."""
MOST_GIVEN = 256 << 20
"""Bytes of tensors that a call which is only timed may be given. A video's piece hands a gigabyte on to the next."""
_LOADING_S = 5.0
"""The first eager call of an accelerated object may load kernels, which takes less than this."""


class EagerTimes:
    """Samples of how long calls take eager, and how many times faster graphs are.

    A new graph's first call runs eager as well, to be compared, and is timed in passing. One sample says as much of
    what the machine did at that moment as of the call. But what else a machine does makes a call longer, never
    shorter. So the least sample counts, once a second one agrees with it; until then no gain is claimed. A gain that
    looks odd is believed only once there are ``_MOST`` samples.

    To take more samples, calls that a graph has answered run eager as well. That must not be felt:

    - once there is a sample, one call in ``_EVERY_CALLS`` at most, and ``_MOST`` for calls of one size; samples are
      kept on disk, for ever;
    - none of calls that take more than ``_LONG_S``, so that no picture takes longer by more than that;
    - none in a run that reuses steps, where a call more is what the person did not want;
    - none whose weights move, of which ``Verifier`` does not ask: what a block gains says nothing of a step, which
      waits for copies;
    - none where memory is short: eager's intermediate results would push something else out;
    - none of calls that hand so much on that eager's output beside ours would be felt.

    Args:
        library: keeps the samples.
        times: measured them.
        gains: whether graphs of this engine can be faster at all. The eager engine's run the same kernels.
    """

    def __init__(self, library: GraphLibrary, times: CallTimes, gains: bool) -> None:
        self._library, self._times, self._gains = library, times, gains
        self._warm = False
        self._timed_at: dict[Kind, int] = {}  # after how many calls of the graph
        self._put_off: dict[Kind, int] = {}  # so many calls are left in which memory is not asked for again
        self._believed: set[Kind] = set()
        self._given_up: set[Kind] = set()

    def due(self, kind: Kind, signature: Signature, device: torch.device, reusing: bool) -> bool:
        """Return True if a call that the graph answers is to run eager too, only to be timed.

        Args:
            kind: of the call.
            signature: of the call.
            device: where it computes.
            reusing: whether its run reuses steps.
        """
        if reusing or self.is_over(kind):
            return False
        if left := self._put_off.get(kind, 0):
            self._put_off[kind] = left - 1
            return False
        if sum(map(_nbytes, signature.tensors)) > MOST_GIVEN:
            return False
        _, calls = self._times.fastest(kind[0], signature)
        is_sampled = bool(self._library.verdicts.eager_samples(*kind))
        if is_sampled and (self.seconds(kind, signature) or calls - self._timed_at.get(kind, 0) < _EVERY_CALLS):
            return False
        if memory_is_short(device):  # as it is in all calls of a model that just fits; asking takes a third of a ms
            self._put_off[kind] = _EVERY_CALLS - 1
            return False
        return True

    def is_over(self, kind: Kind) -> bool:
        """Return True if no call of this kind is to be timed any more."""
        return not self._gains or kind in self._believed or kind in self._given_up

    def took(self, kind: Kind, signature: Signature) -> None:
        """Take the eager call that ``times`` measured last for a sample, unless it may have loaded kernels."""
        seconds = self._times.last(EAGER, signature)
        if seconds is None or not self._gains:
            return
        _, self._timed_at[kind] = self._times.fastest(kind[0], signature)
        if self._warm or seconds >= _LOADING_S:
            self._library.verdicts.eager_took(*kind, seconds)
        self._warm = True

    def give_up(self, kind: Kind) -> None:
        """Time no more calls of this kind in this process."""
        self._given_up.add(kind)

    def seconds(self, kind: Kind, signature: Signature) -> float | None:
        """Return the seconds that such a call takes eager; None as long as that is not known well enough."""
        samples = sorted(self._library.verdicts.eager_samples(*kind)) if self._gains else []
        if not samples:
            return None
        if kind not in self._believed:
            if not (samples[0] >= _LONG_S or len(samples) >= _MOST or self._agree(samples, kind, signature)):
                return None
            self._believed.add(kind)
        return samples[0]

    def gain(self, kind: Kind, signature: Signature) -> float | None:
        """Return how many times faster than eager the graph answers such calls; None where that is not known."""
        eager, graph = self.seconds(kind, signature), self._times.usual(kind[0], signature)
        return eager / graph if eager and graph else None

    def speeds(self, served: Iterable[tuple[Signature, Served]]) -> list[Speed]:
        """Return how fast graphs answer calls, of those whose eager time is known.

        Args:
            served: calls, and the graphs that answer them.
        """
        found = []
        for signature, route in served:
            eager, graph = self.seconds(route.kind, signature), self._times.usual(route.graph_key, signature)
            if eager and graph:
                found.append(Speed(route.graph_key, largest_tensor(signature), eager, graph))
        return found

    def _agree(self, samples: list[float], kind: Kind, signature: Signature) -> bool:
        """Return True if the two least samples agree, and make no odd gain."""
        if len(samples) == 1 or samples[1] > samples[0] * _AGREE:
            return False
        graph = self._times.usual(kind[0], signature)
        return graph is None or 1 <= samples[0] / graph <= _ODD_GAIN


def _nbytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * spec.dtype.itemsize
