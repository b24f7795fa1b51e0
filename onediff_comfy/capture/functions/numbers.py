"""Numbers that functions hold, as inputs of a graph: what is only calculated with needs no graph for each value.

While a forward is traced, a ``Number`` stands for a number. It may be calculated with; to compare it makes the outcome
a part of the key, and any other use its value. Which uses there are is learned, as it is of options: the use raises
``OptionRead``, and the trace starts again.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any, NamedTuple, NoReturn

import torch

from ..option_probe import OptionRead

COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
ALL_NUMBERS = "numbers"
"""In what functions read: the values of all numbers count."""
_ARITHMETIC = {"add": torch.add, "sub": torch.sub, "mul": torch.mul, "truediv": torch.div}
_NUMBERS = (int, float)
_NUMBER = "number "
_HALF = (torch.float16, torch.bfloat16)
_USES = """
    abs ceil complex contains divmod enter exit float floor floordiv format getitem hash index int iter len mod
    pow rdivmod repr rfloordiv rmod round rpow str trunc
"""


class HeldNumber(NamedTuple):
    """A number that an object holds.

    Attributes:
        value: the number.
        place: as of ``Part``.
        parent: likewise.
    """

    value: float
    place: str
    parent: tuple[int, int]


class Uses:
    """How numbers are used, as far as it was learned.

    Args:
        read: names of what is read (see ``option_probe``), those of uses of numbers among them.
        raised: takes in what stand-ins raise, for code that catches everything.
    """

    def __init__(self, read: Collection[str] = (), raised: list[BaseException] | None = None) -> None:
        self.raised: list[BaseException] = [] if raised is None else raised
        names = [part for name in read for part in name.split("\n")]
        self.known = frozenset(name for name in names if name.startswith((_NUMBER, ALL_NUMBERS)))
        self._all = ALL_NUMBERS in self.known

    def learn(self, name: str) -> NoReturn:
        """Have a use be known in the next trace.

        Raises:
            OptionRead: always.
        """
        error = OptionRead(name)
        self.raised.append(error)
        raise error

    def is_fixed(self, place: str) -> bool:
        """Return True if the values of numbers at a place count."""
        return self._all or f"{_NUMBER}{place}" in self.known

    def outcomes(self, place: str, value: float) -> list[str]:
        """Return the text for all that is known to be asked of a number at a place."""
        asked = sorted(name for name in self.known if name.startswith(f"{_NUMBER}{place} "))
        return [f"{name.removeprefix(_NUMBER)} {self.answer(name, value)}" for name in asked]

    @staticmethod
    def answer(name: str, value: float) -> bool:
        """Return the outcome of a comparison, by the name under which it was learned."""
        *_, comparison, than = name.split(" ")
        return bool(getattr(operator, comparison)(value, float.fromhex(than)))


class Number:
    """Stands for a number that a function holds, or for what was calculated from such.

    Args:
        scalar: it, traced: float64, without axes.
        places: where numbers are from which it comes.
        value: the number itself; None of what was calculated.
        uses: what is known by now.
    """

    def __init__(self, scalar: torch.Tensor, places: frozenset[str], value: float | None, uses: Uses) -> None:
        self.scalar, self.places, self._value, self._learned = scalar, places, value, uses

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # which isinstance asks
        return float

    def place(self) -> str:
        """Return where the number is."""
        self.value()
        (place,) = self.places
        return place

    def value(self) -> float:
        """Return the number, for who compares it with something that is no number yet.

        Raises:
            OptionRead: it was calculated.
        """
        if self._value is None:
            self.used()
        return self._value

    def used(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        self._learned.learn("\n".join(f"{_NUMBER}{place}" for place in sorted(self.places)))

    def compared(self, comparison: str, other: Any) -> bool:
        if type(other) is Number:
            other.joined(self).used()
        if isinstance(other, torch.SymFloat):  # of a tensor's value: that is what has to be known, and torch says so
            bool(other == 0.0)
        if self._value is None or type(other) not in _NUMBERS:
            self.used()
        (place,) = self.places
        name = f"{_NUMBER}{place} {comparison} {float(other).hex()}"
        if name not in self._learned.known:
            self._learned.learn(name)
        return self._learned.answer(name, self._value)

    def joined(self, other: Any, scalar: torch.Tensor | None = None) -> Number:
        places = self.places | (other.places if type(other) is Number else frozenset())
        return Number(self.scalar if scalar is None else scalar, places, None, self._learned)

    def _calculated(self, operation: str, other: Any, swapped: bool) -> Any:
        if isinstance(other, torch.Tensor):
            return _with_tensor(_ARITHMETIC[operation], other, self, swapped)
        if type(other) is not Number and type(other) not in _NUMBERS:
            return self.used()
        divisor = other if not swapped else self
        if operation == "truediv" and type(divisor) is Number and divisor.compared("eq", 0.0):
            divisor.used()
        operand = other.scalar if type(other) is Number else float(other)
        pair = (operand, self.scalar) if swapped else (self.scalar, operand)
        return self.joined(other, getattr(operator, operation)(*pair))

    def __neg__(self) -> Number:
        return self.joined(None, -self.scalar)

    def __pos__(self) -> Number:
        return self

    @classmethod
    def __torch_function__(cls, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do as a function of torch does with a number among its arguments, in functions of tensors.

        Raises:
            OptionRead: it is one that needs the number's value.
        """
        name = getattr(function, "__name__", "")
        number = next(value for value in (*args, *(kwargs or {}).values()) if type(value) is cls)
        first, *others = args or (None,)
        if kwargs or not isinstance(first, torch.Tensor):
            number.used()
        if name == "__setitem__" and type(others[1]) is cls and type(others[0]) is not cls:
            return function(first, others[0], number.as_in(first))
        if len(others) != 1 or others[0] is not number:
            number.used()
        if name.strip("_") in COMPARISONS:
            return function(first, number.as_in(first))
        if name in _IN_PLACE:
            return first.copy_(_with_tensor(_IN_PLACE[name], first, number, False))
        if name not in _OPERATIONS:
            number.used()
        operation, swapped = _OPERATIONS[name]
        return _with_tensor(operation, first, number, swapped)

    def as_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """It in a tensor's dtype, as PyTorch makes of a number."""
        if not tensor.is_floating_point():
            self.used()
        return self.scalar.float().to(tensor.dtype) if tensor.dtype in _HALF else self.scalar.to(tensor.dtype)


_OPERATIONS = {
    **dict.fromkeys(("add", "__add__", "__radd__"), (torch.add, False)),
    **dict.fromkeys(("sub", "subtract", "__sub__"), (torch.sub, False)),
    **dict.fromkeys(("rsub", "__rsub__"), (torch.sub, True)),
    **dict.fromkeys(("mul", "multiply", "__mul__", "__rmul__"), (torch.mul, False)),
    **dict.fromkeys(("div", "divide", "true_divide", "__div__", "__truediv__"), (torch.div, False)),
    **dict.fromkeys(("__rdiv__", "__rtruediv__"), (torch.div, True)),
}
"""Functions of a tensor and a number by name, and whether the number comes first."""
_IN_PLACE = {
    "add_": torch.add,
    "__iadd__": torch.add,
    "sub_": torch.sub,
    "__isub__": torch.sub,
    "mul_": torch.mul,
    "__imul__": torch.mul,
    "div_": torch.div,
    "__idiv__": torch.div,
    "__itruediv__": torch.div,
}


def _with_tensor(operation: Any, tensor: torch.Tensor, number: Number, swapped: bool) -> torch.Tensor:
    """Calculate with a tensor and a number as PyTorch does: in float32 where the tensor has half the bits."""
    if not tensor.is_floating_point():
        number.used()
    exact = torch.float32 if tensor.dtype in _HALF else tensor.dtype
    pair = tensor.to(exact), number.scalar.to(exact)
    result: torch.Tensor = operation(*(reversed(pair) if swapped else pair))
    return result.to(tensor.dtype)


def _methods() -> None:
    """Give ``Number`` the methods of a number."""
    for name in _ARITHMETIC:
        setattr(Number, f"__{name}__", lambda self, other, name=name: self._calculated(name, other, False))
        setattr(Number, f"__r{name}__", lambda self, other, name=name: self._calculated(name, other, True))
    for name in COMPARISONS:
        setattr(Number, f"__{name}__", lambda self, other, name=name: self.compared(name, other))
    for name in _USES.split():
        setattr(Number, f"__{name}__", Number.used)
    Number.__bool__ = lambda self: self.compared("ne", 0.0)  # type: ignore[attr-defined]


_methods()
