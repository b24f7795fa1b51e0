"""Calls that graphs for other batch sizes serve together, where an engine has no graphs for every size."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree

from ...capture.call import Call, Signature, bind
from ...capture.shape_range import batch_tensor
from ..decision import Eager, Invocation, Output
from ..verification import numerics
from .batch_plan import BatchPart, cost_of_call, join, plan, split_batch

Family = tuple[str, Signature]
"""Calls that differ in their sizes only: a target's fingerprint, and their signature without sizes."""

# Of what a graph of its own would cost per call: a batch of 3 runs as 4, one of 6 as 4 and 2, and
# nobody waits for a compilation.
_WORTH_IT = 4 / 3


@dataclass(frozen=True)
class BatchSplit:
    """How a call is cut.

    Attributes:
        family: of the call.
        batch: how many samples it has.
        parts: which of them go together.
    """

    family: Family
    batch: int
    parts: tuple[BatchPart, ...]


class BatchSplitter:
    """Cuts calls along their batch, and sees that this gives what they would have given whole.

    Args:
        options_name: the argument that is the open-ended bag of options, which is never cut.
    """

    def __init__(self, options_name: str) -> None:
        self._options_name = options_name
        self._trusted: set[BatchSplit] = set()
        self._inseparable: set[Family] = set()

    def plan(self, fingerprint: str, call: Call, served: Iterable[Signature]) -> BatchSplit | None:
        """Return how a call can be cut so that graphs for other batch sizes serve it, where that costs little.

        Args:
            fingerprint: of the target.
            served: signatures of calls of the target's that have graphs.
        """
        if call.functions is not None:  # which may hold something for each sample
            return None
        index = batch_tensor(call.signature.tensors)
        batch = call.tensors[index].shape[0] if index is not None and call.tensors[index].ndim else 1
        family = (fingerprint, call.signature.any_sizes())
        # A first axis of one may as well mean that all samples share a tensor.
        if index is None or batch == 1 or family in self._inseparable:
            return None
        sizes = set()
        for signature in served:
            shape = signature.tensors[index].shape if index < len(signature.tensors) else ()
            if shape and shape[0] > 1 and signature == call.signature.with_batch(batch, shape[0]):
                sizes.add(shape[0])
        parts = plan(batch, sizes) if sizes else []
        cost = sum(cost_of_call(part.size) for part in parts)
        return BatchSplit(family, batch, tuple(parts)) if 0 < cost <= cost_of_call(batch) * _WORTH_IT else None

    def run(
        self,
        split: BatchSplit,
        invocation: Invocation,
        attempt: Callable[[Invocation], Output | Eager],
    ) -> tuple[Any, bool]:
        """Serve each part as a call of its own, and put the outputs together.

        Args:
            invocation: the call. The host answers it whole once for each way of cutting: samples of one batch see each
                other in some models (the frames of a video).
            attempt: answers a part, if a graph can.

        Returns:
            The output, and whether calls like this one can be cut.
        """
        arguments = dict(bind(invocation.forward, invocation.args, invocation.kwargs))
        name = self._options_name
        options = {name: arguments.pop(name)} if name in arguments else {}
        leaves, tree = pytree.tree_flatten(arguments)
        tensors = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
        cut = {i: tensor for i, tensor in tensors.items() if tensor.ndim and len(tensor) == split.batch}
        outputs: list[list[torch.Tensor]] = []
        for pieces in split_batch(list(cut.values()), split.batch, split.parts):
            own = list(leaves)
            for i, piece in zip(cut, pieces, strict=True):
                own[i] = piece
            part = replace(invocation, args=(), kwargs={**pytree.tree_unflatten(own, tree), **options})
            outcome = attempt(part)
            answer = outcome.value if isinstance(outcome, Output) else part.eager()
            flat, output_tree = pytree.tree_flatten(answer)
            outputs.append(flat)
        output = pytree.tree_unflatten(join(outputs, split.parts), output_tree)
        if split in self._trusted:
            return output, True
        expected = invocation.eager()
        some = next(iter(tensors.values()))
        if numerics.difference(output, expected) <= numerics.limit({t.dtype for t in tensors.values()}, some.device):
            self._trusted.add(split)
            return output, True
        self._inseparable.add(split.family)
        return expected, False
