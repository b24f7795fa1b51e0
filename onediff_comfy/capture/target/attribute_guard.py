"""Whether the layers of a module hold the very objects that they held: asked at every call."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from typing import Any

import torch

from ..fingerprint.unread_attributes import is_tensors

# Of nn.Module's own bookkeeping, what decides on a forward's result. The rest counts only where hooks are set, and
# is two thirds of what there would be to compare.
_DECIDING = frozenset(("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "training"))
_BOOKKEEPING = frozenset(vars(torch.nn.Module())) - _DECIDING


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
        groups = _grouped([state for state in self._states if id(state) not in apart])
        self._getters = [operator.itemgetter(*names) for names in groups]
        self._grouped = list(groups.values())
        others: list[dict[Any, Any]] = [
            h for layer in layers for h in (layer._modules, layer._forward_hooks, layer._forward_pre_hooks)
        ]
        self._filled = [holder for holder in others if holder]
        self._empty = [holder for holder in others if not holder]
        # The objects and not their ids: a number that is thrown away leaves its id to the next one.
        self._held = [*self._values()], self._left_values(), self._counts()

    def holds(self) -> bool:
        """Return True if every attribute, child and hook is the same object as before."""
        values, left, counts = self._held
        if any(self._empty) or self._counts() != counts:
            return False
        try:
            if not all(map(operator.is_, self._values(), values)):
                return False
        except KeyError:  # an attribute was removed, and another added
            return False
        if not self._with_left:
            return True
        now = self._left_values()
        return len(now) == len(left) and all(map(operator.is_, now, left))

    def leaves_out(self, names: frozenset[str]) -> bool:
        """Return True if this guard leaves out just what one that is made now for these names would."""
        return names == self.left and list(map(id, self._states_with(names))) == list(map(id, self._with_left))

    def _states_with(self, names: frozenset[str]) -> list[dict[Any, Any]]:
        return [state for state in self._states if not names.isdisjoint(state)] if names else []

    def _values(self) -> Iterator[Any]:
        # map(map, getters, states): of each group the values of each of its dicts, without a step in Python.
        attributes = map(map, self._getters, self._grouped)
        values = chain.from_iterable(map(chain.from_iterable, attributes))
        return chain(values, chain.from_iterable(map(dict.values, self._filled)))

    def _counts(self) -> tuple[int, int]:
        """Return the numbers of attributes, and of children and hooks: they tell of what was added or removed."""
        return sum(map(len, chain.from_iterable(self._grouped))), sum(map(len, self._filled))

    def _left_values(self) -> list[Any]:
        return [
            value
            for state in self._with_left
            for name, value in state.items()
            if name not in self.left or not is_tensors(value)
        ]


def _grouped(states: Collection[dict[Any, Any]]) -> dict[tuple[str, ...], list[dict[Any, Any]]]:
    """Return dicts of attributes by the names that are to be compared of them."""
    groups: defaultdict[tuple[str, ...], list[dict[Any, Any]]] = defaultdict(list)
    for state in states:
        groups[tuple(name for name in state if name not in _BOOKKEEPING)].append(state)
    return groups
