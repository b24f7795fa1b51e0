"""Whether the layers of a module hold the very objects that they held: asked at every call."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain
from typing import Any

import torch

from .left_behind import is_tensors

# Of nn.Module's own bookkeeping, what decides on a forward's result. The rest counts only where hooks are set, and
# is two thirds of what there would be to compare.
_DECIDING = frozenset(("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "training"))
_BOOKKEEPING = frozenset(vars(torch.nn.Module())) - _DECIDING

_Group = tuple[Callable[[dict[Any, Any]], tuple[Any, ...]], list[dict[Any, Any]]]


class AttributeGuard:
    """Compares attributes, children and hooks of layers by identity.

    What changes *inside* an attribute, such as a list that is appended to, it does not see. Of SDXL's UNet it compares
    some fifteen thousand objects at every call, so nothing here runs once for each of them in Python.

    Args:
        layers: a module and all its submodules.
        left: names of attributes whose tensors are not compared.
    """

    def __init__(self, layers: Sequence[torch.nn.Module], left: frozenset[str] = frozenset()) -> None:
        self.left = left
        self._states = [layer.__dict__ for layer in layers]
        self._with_left = self._states_with(left)
        apart = set(map(id, self._with_left))
        whole = [state for state in self._states if id(state) not in apart]
        self._groups = _grouped(whole)
        others: list[dict[Any, Any]] = [
            h for layer in layers for h in (layer._modules, layer._forward_hooks, layer._forward_pre_hooks)
        ]
        self._filled = [holder for holder in others if holder]
        self._empty = [holder for holder in others if not holder]
        self._counted = [*whole, *self._filled]
        self._count = sum(map(len, self._counted))
        # The objects and not their ids: a number that is thrown away leaves its id to the next one.
        self._held = list(self._values())
        self._left_held = self._left_values()

    def holds(self) -> bool:
        """Return True if every attribute, child and hook is the same object as before."""
        # The lengths tell of attributes that were added, and of those that were removed.
        if any(self._empty) or sum(map(len, self._counted)) != self._count:
            return False
        try:
            return all(map(operator.is_, self._values(), self._held)) and self._left_values() == self._left_held
        except KeyError:  # one was removed, and another added
            return False

    def leaves_out(self, names: frozenset[str]) -> bool:
        """Return True if this guard leaves out just what one that is made now for these names would."""
        return names == self.left and list(map(id, self._states_with(names))) == list(map(id, self._with_left))

    def _states_with(self, names: frozenset[str]) -> list[dict[Any, Any]]:
        return [state for state in self._states if not names.isdisjoint(state)] if names else []

    def _values(self) -> Iterator[Any]:
        attributes = (chain.from_iterable(map(getter, states)) for getter, states in self._groups)
        return chain(chain.from_iterable(attributes), chain.from_iterable(map(dict.values, self._filled)))

    def _left_values(self) -> list[_Same]:
        if not self._with_left:
            return []
        return [
            _Same(value)
            for state in self._with_left
            for name, value in state.items()
            if name not in self.left or not is_tensors(value)
        ]


class _Same:
    """Equal to another only if both are of one object."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value

    __hash__ = None  # type: ignore[assignment]


def _grouped(states: Collection[dict[Any, Any]]) -> list[_Group]:
    """Return dicts of attributes by what is to be compared of them, with what gets it out of each."""
    groups: defaultdict[tuple[str, ...], list[dict[Any, Any]]] = defaultdict(list)
    for state in states:
        groups[tuple(name for name in state if name not in _BOOKKEEPING)].append(state)
    return [(operator.itemgetter(*names), found) for names, found in groups.items()]
