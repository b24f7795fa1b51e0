"""Step cache: calls whose deep layers are taken from an earlier step, where little has changed since.

A ``ReusableGraph`` is a forward compiled twice, whole and brief (see ``capture.reuse``). During a sampling run the
``StepCache`` decides before each step which of the two runs. It goes by how fast the first block's result changes,
relative to its size, and expects it to go on changing at that rate:

    (steps since the deep layers were computed) · (change per step) < threshold

The change is a number on the device. To wait for it would leave the device idle at every step, so a step is decided
by what was measured two steps earlier and more: that is there by the time it is asked for, or the device still has
a whole step of work to do.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch

from ..capture.reuse import FEATURES
from ..engines.base import CompiledGraph

_KNOWN_AFTER = 2  # steps


class ReusableGraph(CompiledGraph):
    """A forward compiled whole, and brief, for calls that are given what a whole one found.

    Args:
        whole: its last outputs are its features.
        brief: takes the second of them as one more tensor, and has the first as its last output.
    """

    def __init__(self, whole: CompiledGraph, brief: CompiledGraph) -> None:
        super().__init__(whole.binding, whole.shapes)
        self.whole, self.brief = whole, brief
        positions = {name: index for index, name in enumerate(whole.binding.weight_names)}
        self._brief_weights = [positions[name] for name in brief.binding.weight_names]

    @property
    def nbytes(self) -> int:
        return self.whole.nbytes + self.brief.nbytes

    def __call__(self, weights: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return self.compute(weights, tensors)[0]

    def compute(
        self, weights: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
    ) -> tuple[Sequence[torch.Tensor], Features]:
        """The outputs of the whole forward, and what a brief one may reuse."""
        outputs = self.whole(weights, tensors)
        return outputs[:-FEATURES], Features(*outputs[-FEATURES:])

    def reuse(
        self, weights: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], features: Features
    ) -> tuple[Sequence[torch.Tensor], torch.Tensor]:
        """The outputs with the deep layers' work taken from ``features``, and this call's early result."""
        *outputs, early = self.brief([weights[i] for i in self._brief_weights], [*tensors, features.deep])
        return outputs, early


@dataclass(frozen=True)
class Features:
    """What a whole call found.

    Attributes:
        early: the first block's result; of any shape.
        deep: what the brief graph takes for the deep layers' work.
    """

    early: torch.Tensor
    deep: torch.Tensor


@dataclass
class _Stream:
    """The calls of one kind in a run, one in each step: those of the positive prompt, say."""

    features: Features
    steps: int = 0  # since the features were computed


@dataclass
class StepCache:
    """Of one sampling run: decides in each step whether the deep layers are computed, and keeps what they found.

    Calls come in streams: what differs in nothing but the step. In one step every stream is called once, and all
    are treated alike, for a guided image is made of the difference of two.

    Attributes:
        calls: how many there were of graphs that can reuse something.
        others: how many of graphs that cannot, by the reason.
        reused: how many of the former took their deep layers from an earlier step.

    Args:
        threshold: the largest expected change of the first block's result, relative to its size, at which deep
            layers are not computed again. At 0 they always are.
    """

    threshold: float
    calls: int = 0
    others: Counter[str] = field(default_factory=Counter)
    reused: int = 0
    _streams: dict[Hashable, _Stream] = field(default_factory=dict)
    _in_this_step: set[Hashable] = field(default_factory=set)
    _reusing: bool = False
    _measured: deque[tuple[int, int, _Later]] = field(default_factory=deque)
    _step: int = 0
    _rate: float = float("inf")  # change per step

    def features(self, stream: Hashable) -> Features | None:
        """What the stream's last whole call found."""
        known = self._streams.get(stream)
        return known.features if known is not None else None

    def forget(self) -> None:
        """The run has ended: nobody needs its features any more."""
        self._streams.clear()
        self._measured.clear()

    def cannot_reuse(self, reason: str) -> None:
        """A call was answered by a graph that computes everything."""
        self.others[reason] += 1

    def reuses(self, stream: Hashable) -> bool:
        """Whether the next call of ``stream`` is to reuse what an earlier one found. Ask once for each call."""
        if not self._in_this_step or stream in self._in_this_step:
            self._begin_step(stream)
        self._in_this_step.add(stream)
        self.calls += 1
        return self._reusing and stream in self._streams

    def call(
        self,
        graph: ReusableGraph,
        stream: Hashable,
        weights: Sequence[torch.Tensor],
        tensors: Sequence[torch.Tensor],
        reuse: bool,
    ) -> Sequence[torch.Tensor]:
        """The outputs for a call.

        Args:
            stream: what the call has in common with those in other steps.
            reuse: what ``reuses`` answered; False computes everything in any case.
        """
        known = self._streams.get(stream)
        if known is not None and reuse:
            outputs, early = graph.reuse(weights, tensors, known.features)
            known.steps += 1
            self._measure(known, early)
            self.reused += 1
            return outputs
        outputs, features = graph.compute(weights, tensors)
        if known is not None:
            known.steps += 1
            self._measure(known, features.early)
        self._streams[stream] = _Stream(features)
        return outputs

    def _begin_step(self, stream: Hashable) -> None:
        self._in_this_step.clear()
        self._step += 1
        while self._measured and self._step - self._measured[0][0] >= _KNOWN_AFTER:
            _, steps, change = self._measured.popleft()
            self._rate = change.value() / steps
        known = self._streams.get(stream)
        self._reusing = known is not None and (known.steps + 1) * self._rate < self.threshold

    def _measure(self, stream: _Stream, early: torch.Tensor) -> None:
        if len(self._in_this_step) == 1:  # the others in this step are of the same noise
            self._measured.append((self._step, stream.steps, _Later(change(early, stream.features.early))))


def change(now: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """sum |now - before| / sum |before|, summed in float32, on the device."""
    return _sum_of_sizes(now - before) / _sum_of_sizes(before)


def _sum_of_sizes(values: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(values, 1, dtype=torch.float32)


class _Later:
    """A number on a device that is asked for once it is there."""

    def __init__(self, number: torch.Tensor) -> None:
        self._number, self._arrived = number, None
        if number.device.type == "cuda":
            self._number = torch.empty((), dtype=number.dtype, pin_memory=True)
            self._number.copy_(number, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(number.device))

    def value(self) -> float:
        if self._arrived is not None:
            self._arrived.synchronize()
        return float(self._number)
