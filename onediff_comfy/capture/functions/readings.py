"""Decisions of functions by a value in the options, as that of the noise level: one graph for each outcome.

A function that compares ``options["sigmas"][0].item()`` with numbers decides by a value, which no trace can follow. So
a ``Reading`` stands for such a tensor where a trace has failed, and each comparison is learned by its name, as a use of
a number is. From then on its outcome is found for every call, and is part of the key.
"""

from __future__ import annotations

import operator
import urllib.parse
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from ...messages import message
from ..call import NotCovered
from ..option_probe import OptionRead
from .numbers import COMPARISONS, HeldNumber, Number

VALUES = "values"
"""In what functions read: they decide by values of tensors in the options."""
_VALUE, _NUMBER = "value", "number"
_SWAPPED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}
_NUMBERS = (int, float)
_ROUNDED = {torch.float64: np.float64, torch.float32: np.float32, torch.float16: np.float16}
_EXTREMES = ("max", "min")
_USES = """
    abs add and bool ceil contains divmod float floor floordiv format getitem hash index int invert iter len mod mul neg
    or pos pow radd rand rdivmod repr rfloordiv rmod rmul ror round rpow rsub rtruediv rxor str sub truediv trunc xor
"""


class Question(NamedTuple):
    """A comparison that functions make.

    Attributes:
        option: in which tensor they look.
        at: at which of its values, an index or one of ``_EXTREMES``; empty where it has no axis.
        comparison: a function of ``operator``.
        than: the number that it is compared with; the place of the numbers, where functions hold it.
        of_numbers: whether ``than`` is that.
    """

    option: str
    at: str
    comparison: str
    than: str
    of_numbers: bool

    @classmethod
    def parsed(cls, name: str) -> Question | None:
        """Return the question of this name; None of a name of something else."""
        kind, *rest = name.split(" ", 5)
        if kind != _VALUE or len(rest) != 5:
            return None
        option, index, comparison, of, than = rest
        return cls(urllib.parse.unquote(option), index, comparison, than, of == _NUMBER)

    def name(self) -> str:
        """Return the name by which it is learned."""
        of = _NUMBER if self.of_numbers else "constant"
        return f"{_VALUE} {urllib.parse.quote(self.option, safe='')} {self.at} {self.comparison} {of} {self.than}"

    def answers(self, value: float, numbers: Sequence[HeldNumber]) -> tuple[bool, ...]:
        """Return the outcomes: one, or one for each number at the place."""
        than = [n.value for n in numbers if n.place == self.than] if self.of_numbers else [float.fromhex(self.than)]
        return tuple(bool(getattr(operator, self.comparison)(value, number)) for number in than)


Values = Mapping[tuple[str, str], float]
"""Of tensors in the options, by option and place."""


class ArrivingNumber:
    """A number on its way from a device. Kernels that are launched later are not waited for.

    Args:
        number: a tensor without axes.
    """

    def __init__(self, number: torch.Tensor) -> None:
        self._number = number
        self._arrived: torch.cuda.Event | None = None
        if number.is_cuda:  # a CPU's by name: another may be the default
            self._number = torch.empty((), dtype=number.dtype, device="cpu", pin_memory=True)
            self._number.copy_(number, non_blocking=True)
            self._arrived = torch.cuda.current_stream(number.device).record_event()

    @property
    def is_here(self) -> bool:
        """Return True if nobody has to wait for it."""
        return self._arrived is None or self._arrived.query()

    def value(self) -> float:
        """Return it. Waits for it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return float(self._number)


class Arriving:
    """Values of tensors on their way to the CPU.

    Args:
        tensors: of one value each, by option and place.
    """

    def __init__(self, tensors: Mapping[tuple[str, str], torch.Tensor]) -> None:
        self._numbers = {place: ArrivingNumber(tensor) for place, tensor in tensors.items()}

    @property
    def are_here(self) -> bool:
        """Return True if nobody has to wait for them."""
        return all(number.is_here for number in self._numbers.values())

    def get(self) -> Values:
        """Return the values. Waits for them."""
        return {place: number.value() for place, number in self._numbers.items()}


class Readings:
    """What is known of the questions that functions ask.

    Args:
        read: what functions are known to read (see ``option_probe``).
    """

    def __init__(self, read: Collection[str] = ()) -> None:
        self.are_read = VALUES in read
        self.questions = tuple(sorted(filter(None, map(Question.parsed, read))))

    def values(self, options: Mapping[str, Any]) -> Arriving:
        """Return the values that are asked for, as they are at this place among the kernels of their device."""
        found = {}
        for option, at in dict.fromkeys((question.option, question.at) for question in self.questions):
            value = options.get(option)
            if value is not None and is_readable(value) and (number := _value_at(value, at)) is not None:
                found[option, at] = number
        return Arriving(found)

    def answers(self, values: Values, numbers: Sequence[HeldNumber]) -> str:
        """Return the outcomes of all questions, for a key."""
        known = ((question, values.get((question.option, question.at))) for question in self.questions)
        return repr([None if value is None else question.answers(value, numbers) for question, value in known])


def is_readable(value: Any) -> bool:
    """Return True for a value in the options that functions may decide by: few numbers."""
    return isinstance(value, torch.Tensor) and value.ndim <= 1 and value.is_floating_point()


def _value_at(tensor: torch.Tensor, at: str) -> torch.Tensor | None:
    """Return one value of a tensor; None if there is none."""
    if at in _EXTREMES:
        return getattr(tensor, at)() if tensor.numel() else None
    if tensor.ndim == 0 or not at:
        return tensor if tensor.ndim == 0 else None
    index = int(at)
    return tensor[index] if -len(tensor) <= index < len(tensor) else None


class Asked(NamedTuple):
    """What is known while a forward is traced.

    Attributes:
        known: the questions that are part of the key.
        values: those of this call, by option and place.
        raised: takes in what stand-ins raise, for code that catches everything.
    """

    known: frozenset[Question]
    values: Values
    raised: list[BaseException]

    def error(self, error: BaseException) -> BaseException:
        """Return an error that is to be raised."""
        self.raised.append(error)
        return error


class Reading:
    """Stands for a tensor in the options: its values may be compared, all else is the tensor's.

    Args:
        tensor: traced.
        option: its name.
        at: which of its values this is; empty for the whole.
        asked: what is known.
    """

    def __init__(self, tensor: torch.Tensor, option: str, at: str, asked: Asked) -> None:
        self.tensor, self._option, self._at, self._asked = tensor, option, at, asked

    def _is_number(self) -> bool:
        return self.tensor.ndim == 0 or bool(self._at)

    def __getitem__(self, index: Any) -> Any:
        if type(index) is not int or self._is_number():
            return self.tensor[index]
        return Reading(self.tensor[index], self._option, str(index), self._asked)

    def item(self) -> Any:
        """Return what stands for the value."""
        return Value(self._option, self._at, self._asked) if self._is_number() else self.tensor.item()

    def _extreme(self, which: str, arguments: Any) -> Any:
        found = getattr(self.tensor, which)(*arguments)
        return found if arguments or self._is_number() else Reading(found, self._option, which, self._asked)

    def max(self, *arguments: Any) -> Any:
        return self._extreme("max", arguments)

    def min(self, *arguments: Any) -> Any:
        return self._extreme("min", arguments)

    def same(self) -> Reading:
        """Return it where a tensor of the same values is asked for."""
        return self

    detach = cpu = clone = contiguous = flatten = same

    def compared(self, comparison: str, other: Any) -> Any:
        """Return the outcome of a comparison of a single value, which PyTorch makes in the tensor's dtype."""
        rounded = _ROUNDED.get(self.tensor.dtype)
        if rounded is None or not self._is_number() or type(other) not in _NUMBERS:
            return getattr(operator, comparison)(self.tensor, other)
        return self.item().compared(comparison, float(rounded(other)))

    def __len__(self) -> int:
        return len(self.tensor)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)

    @classmethod
    def __torch_function__(cls, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, tree = torch.utils._pytree.tree_flatten((args, kwargs or {}))
        plain = [leaf.tensor if type(leaf) is cls else leaf for leaf in leaves]
        args, kwargs = torch.utils._pytree.tree_unflatten(plain, tree)
        return function(*args, **kwargs)


class Value:
    """Stands for a value of a tensor in the options: may be compared."""

    def __init__(self, option: str, at: str, asked: Asked) -> None:
        self._option, self._at, self._asked = option, at, asked

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # which isinstance asks
        return float

    def used(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise self._asked.error(
            NotCovered(
                message("code in the options calculates with the values of the option {name}", name=self._option)
            )
        )

    def compared(self, comparison: str, other: Any) -> bool:
        if type(other) is Number:
            than, number = other.place(), other.value()
        elif type(other) in _NUMBERS:
            than, number = None, float(other)
        else:
            self.used()
        question = Question(self._option, self._at, comparison, than or number.hex(), than is not None)
        if question not in self._asked.known:
            raise self._asked.error(OptionRead(question.name()))
        return bool(getattr(operator, comparison)(self._asked.values[self._option, self._at], number))


def _methods() -> None:
    """Give ``Value`` the methods of a number, and ``Number`` the comparisons with one."""
    for name in COMPARISONS:
        setattr(Value, f"__{name}__", lambda self, other, name=name: self.compared(name, other))
        setattr(Reading, f"__{name}__", lambda self, other, name=name: self.compared(name, other))
        compared = getattr(Number, f"__{name}__")

        def with_value(self: Number, other: Any, name: str = name, compared: Any = compared) -> bool:
            return other.compared(_SWAPPED[name], self) if type(other) is Value else compared(self, other)

        setattr(Number, f"__{name}__", with_value)
    for name in _USES.split():
        setattr(Value, f"__{name}__", Value.used)


_methods()
