"""A new graph proves itself: its first output is compared with eager's before it serves.

Compilers are wrong at times and say nothing (PyTorch 2.13's AOTAutograd cache can return the graph
of another shape). One eager step per graph is the price of knowing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

# Largest relative error, ‖graph - eager‖ / ‖eager‖, by the coarsest dtype that takes part. Both
# sides round differently, so each is a multiple of the dtype's epsilon that real models stay well
# under (measured: SDXL fp16 1.2e-3, tiny models fp32 1e-6), while a graph that dropped a patch or
# belongs to another shape is off by 0.1 and more.
_LIMITS = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}
# Rounded to 8 bits, an input of a layer is off by 3%. Layers average that out or add it up.
_FP8_LIMIT = 0.25
# Matrix products and convolutions in TF32 have fp16's mantissa.
_TF32_LIMIT = 1e-2
# A model that rounds what it computes to 8 bits answers the least change with a jump: a value next to a boundary is
# rounded the other way, by 6%, and what is computed from it crosses other boundaries. How far that goes is the model's
# own. Eager, given inputs that are off by this much, tells: a unit in the last place of float32 flips none of a small
# model's values or one, by chance. Runs still differ: Flux with two blocks answers by 2e-3 to 8e-3 in fp8, by 2e-3 to
# 4e-3 in int8, and least where only the image is off, since a graph rounds prompts otherwise too (one that was right
# was 3.4e-3 off in int8). So all inputs are, and the middle of three answers counts. Without a layer's bias a graph was
# 1.3e-2 off.
_LEAST_CHANGE = 2.0**-14
_ANSWERS = 3
_TIMES_ITS_RESPONSE = 1.5
_MOST_BY_RESPONSE = 0.1
# A sample may be small beside the others of its batch, and wrong. One that is smaller than this part of the largest
# counts as large as that: what is next to nothing is rounding.
_LEAST_SAMPLE = 1e-3
_FEW_BITS = frozenset((torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2))


def relative_error(actual: object, expected: object) -> float:
    """Return how far one output is off.

    For tensors the largest ‖actual - expected‖ / ‖expected‖ of a sample, in float64, over the finite values; infinite
    where shapes, dtypes or the places of nan, +inf and -inf disagree. Anything else must be equal.
    """
    if not (isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor)):
        return 0.0 if type(actual) is type(expected) and actual == expected else float("inf")
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return float("inf")
    left, right = (torch.view_as_real(t) if t.is_complex() else t for t in (actual, expected))
    left, right = left.double(), right.double()
    finite = torch.isfinite(right)
    if not torch.equal(finite, torch.isfinite(left)):
        return float("inf")
    if not torch.equal(_kinds(left[~finite]), _kinds(right[~finite])):
        return float("inf")
    left, right = left.where(finite, 0.0), right.where(finite, 0.0)
    norms, errors = (_norms(values) for values in (right, left - right))
    largest = float(norms.max()) if norms.numel() else 0.0
    if largest == 0:
        return float("inf") if errors.any() else 0.0
    return float((errors / norms.clamp_min(_LEAST_SAMPLE * largest)).max())


def _norms(values: torch.Tensor) -> torch.Tensor:
    """Return the norm of each sample."""
    samples = values.flatten(1) if values.ndim > 1 else values.reshape(1, -1)
    return torch.linalg.vector_norm(samples, dim=1)


def tells(output: object) -> bool:
    """Return True if an output has a number that could have been another: finite, and not zero."""
    tensors = (leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor))
    return any(bool((tensor.isfinite() & (tensor != 0)).any()) for tensor in tensors)


def difference(actual: object, expected: object) -> float:
    """Return the largest relative error of the tensors in an output; infinite where it is built otherwise."""
    left, left_spec = pytree.tree_flatten(actual)
    right, right_spec = pytree.tree_flatten(expected)
    if left_spec != right_spec:
        return float("inf")
    return max(map(relative_error, left, right), default=0.0)


def _kinds(values: torch.Tensor) -> torch.Tensor:
    """Non-finite values as numbers that can be compared: nan is not even equal to itself."""
    return values.nan_to_num(nan=0.0, posinf=1.0, neginf=-1.0)


def limit(dtypes: set[torch.dtype], device: torch.device, fp8: bool = False) -> float:
    """Return the largest relative error that rounding explains for a model with weights and inputs of these dtypes.

    Args:
        fp8: whether its large layers were computed in fp8.
    """
    if fp8:
        return _FP8_LIMIT
    largest = max((_LIMITS[dtype] for dtype in dtypes if dtype in _LIMITS), default=_LIMITS[torch.float32])
    if device.type == "cuda" and torch.float32 in dtypes:
        largest = max(largest, _TF32_LIMIT)
    return largest


Again = Callable[[Any], float]
"""Given eager's output, how far off another one is of inputs that are hardly others."""


def rounds_to_few_bits(weights: Iterable[torch.Tensor]) -> bool:
    """Return True if a model with these weights rounds what it computes to 8 bits. So do attention libraries."""
    return not _FEW_BITS.isdisjoint(weight.dtype for weight in weights)


def excused(response: float) -> float:
    """Return how far a right graph of a model that rounds to 8 bits may be off, given eager's response."""
    return min(_TIMES_ITS_RESPONSE * response, _MOST_BY_RESPONSE)


def again(
    forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], few_bits: bool = True
) -> Again | None:
    """Return further runs of eager with inputs that are hardly others; None where no input can be.

    Ask for it before eager runs, which may use its arguments up. They run when it is called.

    Args:
        forward: eager.
        args: for it.
        kwargs: for it.
        few_bits: change inputs by what tells in a model that rounds to 8 bits, and not by one unit in the last place.
    """
    least = _LEAST_CHANGE if few_bits else 0.0
    leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
    floating = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    if not floating:
        return None
    # A number for each sample is a time, which models multiply by a thousand: a little more is another time.
    changed = [i for i in floating if leaves[i].ndim > 1] or floating

    def answer(seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)  # the same in every process, and nobody else's
        others = list(leaves)
        for i in changed:
            others[i] = _hardly_another(leaves[i], least, generator)
        changed_args, changed_kwargs = pytree.tree_unflatten(others, structure)
        return forward(*changed_args, **changed_kwargs)

    def response(expected: Any) -> float:
        try:
            return statistics.median(difference(answer(seed), expected) for seed in range(_ANSWERS))
        except torch.OutOfMemoryError:  # eager's answer is there, and is the one that counts
            return 0.0

    return response


def _hardly_another(values: torch.Tensor, least: float, generator: torch.Generator) -> torch.Tensor:
    """Return each value larger or smaller by this much of it, and at least by a unit in the last place."""
    change = max(least, torch.finfo(values.dtype).eps)
    up = torch.randint(0, 2, values.shape, generator=generator, dtype=torch.bool).to(values.device)
    return torch.where(up, values * (1 + change), values * (1 - change))
