"""Which sizes a captured graph holds for.

A *static* capture holds for the sizes it was made with. A *general* one keeps sizes as symbols:
tracing it collects the conditions under which the same operators would have been recorded, and the
compiler adds those under which its kernels are valid. Together they are the graph's ``ShapeRange``:
plain data, kept with the graph, and asked before every first call of a size. Nothing is ever run on
a size outside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

from ..messages import message
from .call import NotCovered, TensorSpec
from .conditions import compiled, names_in

Axis = int | tuple[int, str]
"""One axis of a tensor: exactly this size, or this many times the value of a symbol."""

IMAGE_AXES = 4
"""The fewest of an image: batch, channels, height, width; video has frames between."""

MOST_AXES = 5
"""The most: what has more is no image. Rotations of tokens are [.., tokens, pairs, 2, 2]."""


@dataclass(frozen=True)
class ShapeRange:
    """Sizes of a call's tensors.

    Attributes:
        axes: of each tensor, in the signature's order, what each axis may be. A symbol that occurs
            twice has the same value in both places.
        limits: of each symbol the smallest and the largest value; None is unlimited.
        conditions: Python expressions over the symbols, each of which must hold.
        batch: the symbol at whose value of 1 "less than" may be "equal" in a condition (see ``range_of``).
    """

    axes: tuple[tuple[Axis, ...], ...]
    limits: Mapping[str, tuple[int, int | None]]
    conditions: tuple[str, ...] = ()
    batch: str | None = None

    @classmethod
    def exactly(cls, specs: Sequence[TensorSpec]) -> ShapeRange:
        """The sizes of ``specs`` and no others."""
        return cls(tuple(spec.shape for spec in specs), {})

    @property
    def general(self) -> bool:
        """Whether there is more than one set of sizes in it."""
        return bool(self.limits)

    def fixes_other_than(self, specs: Sequence[TensorSpec]) -> bool:
        """Return True if a size is one number here, and another in tensors of these sizes.

        A model's code fixed it when it was traced for all sizes, and will do so with each other one.
        """
        pairs = (
            pair for spec, axes in zip(specs, self.axes, strict=True) for pair in zip(spec.shape, axes, strict=True)
        )
        return any(isinstance(axis, int) and axis != size for size, axis in pairs)

    def values(self, specs: Sequence[TensorSpec]) -> dict[str, int] | None:
        """What each symbol stands for in tensors of these sizes; None if they are outside the range."""
        if len(specs) != len(self.axes):
            return None
        values: dict[str, int] = {}
        for spec, axes in zip(specs, self.axes, strict=True):
            if len(spec.shape) != len(axes):
                return None
            for size, axis in zip(spec.shape, axes, strict=True):
                factor, name = (axis, None) if isinstance(axis, int) else axis
                value = 1 if name is None else values.setdefault(name, size // factor)
                if size != factor * value:
                    return None
        for name, (low, high) in self.limits.items():
            if values[name] < low or (high is not None and values[name] > high):
                return None
        single = self.batch is not None and values[self.batch] == 1
        return values if all(compiled(text, ties=single)(values) for text in self.conditions) else None

    def __str__(self) -> str:
        tensors = " ".join("x".join(map(_axis_text, axes)) or "scalar" for axes in self.axes)
        limits = ", ".join(
            f"{name} {low}{'+' if high is None else f'-{high}'}" for name, (low, high) in self.limits.items()
        )
        return f"{tensors} ({limits})" if limits else tensors

    def to_json(self) -> dict[str, Any]:
        return {
            "axes": [list(axes) for axes in self.axes],
            "limits": {name: list(limit) for name, limit in self.limits.items()},
            "conditions": list(self.conditions),
            "batch": self.batch,
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> ShapeRange:
        """Read what ``to_json`` gave.

        Raises:
            ValueError, KeyError, TypeError: it is something else.
            NotCovered: a condition is more than arithmetic on sizes.
        """
        limits = {
            str(name): (int(low), None if high is None else int(high)) for name, (low, high) in fields["limits"].items()
        }
        axes = tuple(
            tuple(a if isinstance(a, int) else (int(a[0]), str(a[1])) for a in tensor) for tensor in fields["axes"]
        )
        conditions = tuple(map(str, fields["conditions"]))
        batch = None if fields.get("batch") is None else str(fields["batch"])
        symbols = {axis[1] for tensor in axes for axis in tensor if not isinstance(axis, int)}
        if symbols != limits.keys() or (batch is not None and batch not in symbols):
            raise ValueError("the sizes have symbols without limits, or limits without a symbol")
        if any(axis[0] < 1 for tensor in axes for axis in tensor if not isinstance(axis, int)):
            raise ValueError("a size is no multiple of a symbol")
        for text in conditions:
            if not names_in(text) <= symbols:
                raise ValueError("a condition is about another symbol than those of the sizes")
        return cls(axes, limits, conditions, batch)


def _axis_text(axis: Axis) -> str:
    if isinstance(axis, int):
        return str(axis)
    return axis[1] if axis[0] == 1 else f"{axis[0]}{axis[1]}"


def range_of(placeholders: Sequence[torch.Tensor], batch: int | None, folds: Mapping[int, int]) -> ShapeRange:
    """The range that fake tensors with symbolic sizes have, as far as their ShapeEnv knows by now.

    Args:
        placeholders: the fake tensors that stand for a call's tensors.
        batch: which of them has the batch as its first axis. Tracing takes every symbol for 2 or
            more, because a size of 1 means broadcasting, and asks which of two strides is larger where
            a size of 1 makes them equal. A batch of one broadcasts nothing, its strides do not matter, and
            the first call of each size is compared with eager anyway: so batches start at 1.
        folds: which of them stand for a folded tensor (see ``fold``), and by what.

    Raises:
        NotCovered: a condition cannot be written down.
    """
    symbols = _Symbols()
    axes = tuple(
        _unfolded([symbols.axis(size) for size in tensor.shape], folds.get(index))
        for index, tensor in enumerate(placeholders)
    )
    first = axes[batch][0] if batch is not None and axes[batch] else 0
    limits = dict(symbols.limits())
    single = None if isinstance(first, int) or limits[first[1]][0] != 2 else first[1]
    if single is not None:
        limits[single] = (1, limits[single][1])
    return ShapeRange(axes, limits, tuple(symbols.conditions()), single)


class _Symbols:
    """Symbols of one ShapeEnv under names that are the same in every process: s0, s1 … as they occur."""

    def __init__(self) -> None:
        self._names: dict[Any, str] = {}
        self._env: Any = None

    def axis(self, size: int | torch.SymInt) -> Axis:
        if not isinstance(size, torch.SymInt):
            return int(size)
        self._env = size.node.shape_env
        expression = self._env.simplify(size.node.expr)
        if expression.is_number:
            return int(expression)
        if not expression.is_symbol:
            raise NotCovered(
                message("a size is given by the expression {expression}, not by itself", expression=expression)
            )
        return 1, self._names.setdefault(expression, f"s{len(self._names)}")

    def limits(self) -> Iterator[tuple[str, tuple[int, int | None]]]:
        import sympy
        from torch.utils._sympy.numbers import int_oo

        for symbol, name in self._names.items():
            interval = self._env.var_to_range[symbol]
            yield name, (int(interval.lower), None if interval.upper in (int_oo, sympy.oo) else int(interval.upper))

    def conditions(self) -> Iterator[str]:
        if self._env is None:
            return
        import sympy
        from torch.utils._sympy.printers import PythonPrinter

        renamed = {symbol: sympy.Symbol(name, integer=True, positive=True) for symbol, name in self._names.items()}
        seen = set()
        for guard in self._env.guards:
            expression = self._env.simplify(guard.expr)
            if expression == True:  # noqa: E712 - a sympy truth value
                continue
            unknown = expression.free_symbols - self._names.keys()
            if unknown:
                raise NotCovered(
                    message("a condition on sizes depends on something else ({expression})", expression=expression)
                )
            text = PythonPrinter().doprint(expression.xreplace(renamed))
            if text not in seen:
                seen.add(text)
                compiled(text)
                yield text


def batch_tensor(specs: Sequence[TensorSpec], images: bool = True) -> int | None:
    """Which tensor's first axis is the batch: the largest image-like one's, else the largest one's."""
    having = [i for i, spec in enumerate(specs) if 0 < len(spec.shape) <= MOST_AXES]
    candidates = [i for i in having if images and len(specs[i].shape) >= IMAGE_AXES] or having
    return max(candidates, key=lambda i: math.prod(specs[i].shape), default=None)


def hint(size: int | torch.SymInt) -> int:
    """The size that a symbol stood for while it was traced; 1 for one that only values tell."""
    return (size.node.hint or 1) if isinstance(size, torch.SymInt) else size


def fold(tensor: torch.Tensor, factor: int) -> torch.Tensor:
    """View a contiguous image [..., h, w] as [..., h/factor, factor, w/factor, factor].

    It is how a graph learns that sides are multiples of something: the symbols are then what is
    multiplied, and a patch of two by two needs no padding for any of them.
    """
    return tensor.unflatten(-1, (-1, factor)).unflatten(-3, (-1, factor))


def unfold(tensor: torch.Tensor) -> torch.Tensor:
    """The image that ``fold`` was given."""
    return tensor.flatten(-2).flatten(-3, -2)


def _unfolded(axes: list[Axis], factor: int | None) -> tuple[Axis, ...]:
    if factor is None:
        return tuple(axes)
    *others, height, _, width, _ = axes
    return *others, _times(height, factor), _times(width, factor)


def _times(axis: Axis, factor: int) -> Axis:
    return axis * factor if isinstance(axis, int) else (axis[0] * factor, axis[1])


def always_contiguous(tensor: torch.Tensor) -> bool:
    """Whether a tensor is contiguous for all sizes that it may have. Asking the tensor itself would limit them."""
    behind: int | torch.SymInt = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if not statically_known_true(sym_eq(stride, behind)):
            return False
        behind = behind * size
    return True
