"""Step cache: calls whose deep layers are taken from an earlier step, where little has changed since.

A ``ReusableGraph`` is a forward compiled twice, whole and brief (see ``rewrites.step_cache_split``). During a sampling
run the ``StepCache`` decides before each step which of the two runs. It goes by how fast the first block's result
changes, relative to its size, and expects it to go on changing at that rate:

    (steps since the deep layers were computed) · (change per step) < threshold

A step is one prediction that the sampler asks for, as ``begin_step`` is told; the model may be called several times
for it.

The change is a number on the device. To wait for it would leave the device idle at every step, so a step is decided
by what was measured two steps earlier and more: that is there by the time it is asked for, or the device still has
a whole step of work to do. It is asked for as late as possible, when all that the CPU does before a call is done.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.utils._pytree as pytree

from ..capture.functions.readings import ArrivingNumber
from ..capture.rewrites.step_cache_split import FEATURES
from ..engines.base import CompiledGraph, Outputs
from ..messages import message

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

    def __call__(self, weights: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> Outputs:
        return self.compute(weights, tensors)[0]

    def compute(self, weights: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> tuple[Outputs, Features]:
        """Return the outputs of the whole forward, and what a brief one may reuse."""
        outputs = self.whole(weights, tensors)
        return outputs[:-FEATURES], Features(*cast(Sequence[torch.Tensor], outputs[-FEATURES:]))

    def reuse(
        self, weights: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], features: Features
    ) -> tuple[Outputs, torch.Tensor]:
        """Return the outputs with the deep layers' work taken from ``features``, and this call's early result."""
        *outputs, early = self.brief([weights[i] for i in self._brief_weights], [*tensors, features.deep])
        return outputs, cast(torch.Tensor, early)


@dataclass(frozen=True)
class Features:
    """What a whole call found.

    Attributes:
        early: the first block's result; of any shape.
        deep: what the brief form takes for the deep layers' work: a tensor, or several.
    """

    early: torch.Tensor
    deep: Any


@dataclass(frozen=True)
class _Known:
    """What a stream's last whole call found, and the number of the step that it was in."""

    features: Features
    step: int


@dataclass
class _StepDecision:
    """Decides once a step whether deep layers are computed, by what was measured in earlier steps.

    Attributes:
        step: its number, from 1; 0 before the first.
        computed: the last step whose deep layers were computed.
        reusing: the decision of this step.
        measured: changes that were not read yet: in which step, over how many, and the number on the device.
        lock: held while a step is decided.
    """

    step: int = 0
    computed: int = 0
    reusing: bool = False
    measured: deque[tuple[int, int, ArrivingNumber]] = field(default_factory=deque)
    lock: threading.Lock = field(default_factory=threading.Lock)
    _decided: bool = False  # in this step
    _rate: float = float("inf")  # change per step

    def begin_step(self) -> None:
        """Begin the next step."""
        self.step += 1
        self._decided = False

    def decide(self, threshold: float) -> bool:
        """Decide, unless that is done. Return True if it was done now. Call it under ``lock``.

        Waits for the device, where it is two steps behind.
        """
        if self._decided:
            return False
        while self.measured and self.step - self.measured[0][0] >= _KNOWN_AFTER:
            _, steps, change = self.measured.popleft()
            rate = change.value() / steps
            # A block that gives the very same has not seen the step: it says nothing of how the others change.
            self._rate = rate if rate > 0 else float("inf")
        self.reusing = (self.step - self.computed) * self._rate < threshold
        self._decided = True
        return True

    def measure(self, known: _Known, early: torch.Tensor) -> None:
        """Measure how far the first block's result is from what a stream's last whole call found."""
        if not self.measured or self.measured[-1][0] < self.step:  # the others in this step are of the same noise
            self.measured.append(
                (self.step, self.step - known.step, ArrivingNumber(change(early, known.features.early)))
            )


@dataclass
class StepCache:
    """Of one sampling run: decides in each step whether the deep layers are computed, and keeps what they found.

    Calls come in streams: what differs in nothing but the step. In one step every stream is called at most once, and
    all are treated alike, for a guided image is made of the difference of two. Where that cannot be, nothing is reused.

    Attributes:
        calls: how many there were of graphs that can reuse something.
        others: how many calls could not reuse anything, whatever changed, by the reason.
        reused: how many calls took their deep layers from an earlier step.
        refusal: why nothing is reused in the rest of the run; None if something may be.

    Args:
        threshold: the largest expected change of the first block's result, relative to its size, at which deep
            layers are not computed again. At 0 they always are.
    """

    threshold: float
    calls: int = 0
    others: Counter[str] = field(default_factory=Counter)
    reused: int = 0
    _streams: dict[Hashable, _Known] = field(default_factory=dict)
    _in_this_step: set[Hashable] = field(default_factory=set)
    _decision: _StepDecision = field(default_factory=lambda: _StepDecision())
    refusal: str | None = None

    @property
    def nbytes(self) -> int:
        """Return the bytes of what is kept."""
        kept = [(known.features.early, known.features.deep) for known in self._streams.values()]
        return sum(leaf.nbytes for leaf in pytree.tree_leaves(kept) if isinstance(leaf, torch.Tensor))

    def begin_step(self) -> None:
        """Note that the sampler asks for a prediction."""
        self._decision.begin_step()
        self._in_this_step.clear()

    def start_over(self) -> None:
        """Forget a call whose answer nobody saw, and which comes again: nothing is known of this run."""
        self.forget()
        self._in_this_step.clear()
        self.calls, self._decision.computed = 0, 0

    def features(self, stream: Hashable) -> Features | None:
        """Return what the stream's last whole call found, if it is not too old."""
        known = self._streams.get(stream)
        return known.features if known is not None else None

    def forget(self) -> None:
        """Forget all features: the run has ended."""
        self._streams.clear()
        self._decision.measured.clear()

    def refuse(self, reason: str) -> None:
        """Reuse nothing in the rest of this run; of several reasons the first counts."""
        self.refusal = self.refusal or reason
        self.forget()

    def cannot_reuse(self, reason: str) -> None:
        """Note that a call was answered by a graph that computes everything."""
        self.others[reason] += 1

    def reuses(self, stream: Hashable) -> bool:
        """Return True if the next call of ``stream`` is to reuse what an earlier one found. Ask once for each call."""
        if not self._decision.step:
            self.refuse(message("the sampler does not say when a step begins"))
        elif stream in self._in_this_step:
            # Tiles of an image, say: one would reuse what was found for another. Nor do the other streams go on, for
            # all are to be treated alike.
            self.refuse(message("the model is called several times for one prompt in a step"))
        self._in_this_step.add(stream)
        self.calls += 1
        if self.refusal is not None:
            self.cannot_reuse(self.refusal)
            return False
        with self._decision.lock:  # of a run over several GPUs each has a thread, and all prompts are treated alike
            if self._decision.decide(self.threshold):
                computed = self._decision.computed
                # What is older may have changed by more: a window of a long video, say, that was left for some steps.
                self._streams = {stream: known for stream, known in self._streams.items() if known.step >= computed}
        return self._decision.reusing and stream in self._streams

    def call(
        self,
        graph: ReusableGraph,
        stream: Hashable,
        weights: Sequence[torch.Tensor],
        tensors: Sequence[torch.Tensor],
        reuse: bool,
    ) -> Outputs:
        """Return the outputs for a call.

        Args:
            stream: what the call has in common with those in other steps.
            reuse: what ``reuses`` answered; False computes everything in any case.
        """
        known = self._streams.get(stream)
        if known is not None and reuse:
            outputs, early = graph.reuse(weights, tensors, known.features)
            self.took(stream, early)
            return outputs
        outputs, features = graph.compute(weights, tensors)
        self.found(stream, features)
        return outputs

    def took(self, stream: Hashable, early: torch.Tensor) -> None:
        """Note that a call has taken its deep layers from an earlier step, and what its own first block gave."""
        self._decision.measure(self._streams[stream], early)
        self.reused += 1

    def found(self, stream: Hashable, features: Features) -> None:
        """Note what a call has found that computed everything."""
        if self.refusal is not None:
            return
        known = self._streams.get(stream)
        if known is not None:
            self._decision.measure(known, features.early)
        self._streams[stream] = _Known(features, self._decision.step)
        if not self._decision.reusing:
            self._decision.computed = self._decision.step


def change(now: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Return sum |now - before| / sum |before|, summed in float32, on the device."""
    return _sum_of_sizes(now - before) / _sum_of_sizes(before)


def _sum_of_sizes(values: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(values, 1, dtype=torch.float32)
