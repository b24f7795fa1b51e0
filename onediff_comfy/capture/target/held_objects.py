"""What a module holds, read at every call: whether its attributes are the same objects, and its weights as they are."""

from __future__ import annotations

import operator
import weakref
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, repeat, starmap
from typing import Any, NamedTuple

import torch

from ...messages import Message, message
from ..call import NotCovered
from ..fingerprint.unread_attributes import ALL_READ, Unread
from .tensor_parts import PLAIN, WeightFormat, format_of, kind_of_file, part_name

# Of nn.Module's own bookkeeping, what decides on a forward's result. The rest counts only where hooks are set, and
# is two thirds of what there would be to compare.
_DECIDING = frozenset(("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "training"))
_HOLDERS = frozenset(name for name, held in vars(torch.nn.Module()).items() if isinstance(held, dict))
_BOOKKEEPING = frozenset(vars(torch.nn.Module())) - _DECIDING
_MOST_LOOKED_AT = 1024  # of one graph: some blocks, each with a few places that its weights are copied to


def holders_of(layer: torch.nn.Module) -> Iterator[dict[str, Any]]:
    """Yield the dicts in which a layer holds its weights, buffers, children and hooks."""
    return (value for name, value in vars(layer).items() if name in _HOLDERS)


def same_content(now: Mapping[Any, Any], before: Mapping[Any, Any]) -> bool:
    """Return True if a dict holds the very objects that another one holds, by the same names in the same order."""
    return list(now) == list(before) and all(map(operator.is_, now.values(), before.values()))


class AttributeGuard:
    """Compares attributes, children and hooks of layers by identity.

    What changes *inside* an attribute, such as a list that is appended to, it does not see. Of weights it sees that one
    is no longer None, or one object under several names; all others a graph reads at each call. Of SDXL's UNet it
    compares some fifteen thousand objects at every call, so nothing here runs once for each of them in Python.

    Args:
        layers: a module and all its submodules.
        left: attributes that are not compared.
    """

    def __init__(self, layers: Sequence[torch.nn.Module], left: Unread = ALL_READ) -> None:
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
        weights: list[dict[str, Any]] = [h for layer in layers for h in (layer._parameters, layer._buffers)]
        self._filled = [holder for holder in others if holder]
        self._weights = [holder for holder in weights if holder]
        self._empty = [holder for holder in (*others, *weights) if not holder]
        absent = [(holder, name) for holder in self._weights for name, weight in holder.items() if weight is None]
        self._absent_and_ties = absent, list(_ties(self._weights))
        # The objects and not their ids: a number that is thrown away leaves its id to the next one.
        values, counts = self._now()
        self._held = [*values], self._left_values(), counts

    def holds(self) -> bool:
        """Return True if every attribute, child and hook is the same object as before."""
        values, left, counts = self._held
        now, counts_now = self._now()
        if any(self._empty) or counts_now != counts:
            return False
        try:
            if not all(map(operator.is_, now, values)):
                return False
            absent, ties = self._absent_and_ties
            if not all(map(operator.is_, starmap(operator.getitem, absent), repeat(None))):
                return False
            if ties and not all(first[name] is second[other] for first, name, second, other in ties):
                return False
        except KeyError:  # an attribute was removed, and another added
            return False
        if not self._with_left:
            return True
        left_now = self._left_values()
        return len(left_now) == len(left) and all(map(operator.is_, left_now, left))

    def leaves_out(self, left: Unread) -> bool:
        """Return True if this guard leaves out just what one that is made now for these attributes would."""
        return left == self.left and list(map(id, self._states_with(left))) == list(map(id, self._with_left))

    def _states_with(self, left: Unread) -> list[dict[Any, Any]]:
        return [] if left == ALL_READ else list(filter(left.is_in, self._states))

    def _now(self) -> tuple[Iterator[Any], tuple[int, int, int]]:
        """Return what is held now, with the names of children, and how many: a number tells of additions."""
        # map(map, getters, states): of each group the values of each of its dicts, without a step in Python.
        attributes = map(map, self._getters, self._grouped)
        values = chain.from_iterable(map(chain.from_iterable, attributes))
        attributes_held = sum(map(len, chain.from_iterable(self._grouped)))
        counts = attributes_held, sum(map(len, self._filled)), sum(map(len, self._weights))
        children = chain(chain.from_iterable(self._filled), chain.from_iterable(map(dict.values, self._filled)))
        return chain(values, children), counts

    def _left_values(self) -> list[Any]:
        leaves_out = self.left.leaves_out
        return [value for state in self._with_left for name, value in state.items() if not leaves_out(name, value)]


def _ties(holders: Sequence[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], str, dict[str, Any], str]]:
    """Yield the places of each weight that has several: the first, and another."""
    first: dict[int, tuple[dict[str, Any], str]] = {}
    for holder in holders:
        for name, weight in holder.items():
            if weight is not None:
                known, known_name = first.setdefault(id(weight), (holder, name))
                if known is not holder or known_name != name:
                    yield known, known_name, holder, name


def _grouped(states: Collection[dict[Any, Any]]) -> dict[tuple[str, ...], list[dict[Any, Any]]]:
    """Return dicts of attributes by the names that are to be compared of them."""
    groups: defaultdict[tuple[str, ...], list[dict[Any, Any]]] = defaultdict(list)
    for state in states:
        groups[tuple(name for name in state if name not in _BOOKKEEPING)].append(state)
    return groups


@dataclass(frozen=True)
class WeightSpec:
    """A weight's name in the module and what compiled code assumes of it."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class PlacedWeights(NamedTuple):
    """Weights as they are in place at a call.

    Attributes:
        tensors: in the order of their names.
        addresses: of each, in the device's memory.
    """

    tensors: Sequence[torch.Tensor]
    addresses: list[int]


@dataclass
class _Wanted:
    """Weights that a graph takes: the dict that holds each, and its name there; dtypes and shapes.

    ``found`` is the device and the addresses that they were last looked at with, in the same run. Where some of the
    weights are parts of others, ``flattening`` says how to take them apart. ``looked_at`` are the objects that were
    weights in this run, by their addresses: blocks of a model that does not fit take turns.
    """

    holders: list[dict[str, Any]]
    names: list[str]
    metadata: list[tuple[torch.dtype, tuple[int, ...]]]
    flattening: _Flattening | None = None
    found: tuple[torch.device, list[int]] | None = None
    looked_at: dict[tuple[int, ...], list[weakref.ref[Any]]] = field(default_factory=dict)

    def were_looked_at(self, weights: Sequence[Any], addresses: list[int]) -> bool:
        """Return True if these very objects were looked at, and had what they have where they have it now."""
        known = self.looked_at.get(tuple(addresses))
        return known is not None and all(map(operator.is_, (weight() for weight in known), weights))

    def note(self, weights: Sequence[Any], addresses: list[int]) -> None:
        """Note that these were looked at."""
        if len(self.looked_at) >= _MOST_LOOKED_AT:
            self.looked_at.clear()
        self.looked_at[tuple(addresses)] = list(map(weakref.ref, weights))


class _Whole(NamedTuple):
    """How a weight is several tensors, and how many."""

    kind: type
    form: WeightFormat
    context: Any
    size: int


@dataclass(frozen=True)
class _Flattening:
    """What to make of weights some of which are several tensors.

    Attributes:
        wholes: those of the weights; None for one that is a single tensor.
        order: of all tensors of all weights, those that a graph takes, as it takes them.
    """

    wholes: list[_Whole | None]
    order: list[int]

    def tensors(self, weights: Sequence[Any]) -> list[Any] | None:
        """Return what a graph takes; None if a weight is of another class than it was."""
        found: list[Any] = []
        for weight, whole in zip(weights, self.wholes, strict=True):
            if whole is None:
                found.append(weight)
            elif type(weight) is whole.kind:
                found += whole.form.parts(weight)
            else:
                return None
        return [found[i] for i in self.order]

    def is_same(self, weights: Sequence[Any]) -> bool:
        """Return True if the parts of each weight mean what they meant."""
        wholes = zip(weights, self.wholes, strict=True)
        return all(whole is None or whole.form.context(weight) == whole.context for weight, whole in wholes)


class WeightTable:
    """Where each weight of a module is held, and what compiled code assumes of it.

    Args:
        module: whose weights, buffers included.
        formats: the ways in which one weight may be several tensors.

    Attributes:
        specs: every weight by name; of a weight with several names, each; of one with several parts, each of them.
    """

    def __init__(self, module: torch.nn.Module, formats: Sequence[WeightFormat]) -> None:
        self.formats = formats
        self.specs: dict[str, WeightSpec] = {}
        self._slots: dict[str, tuple[dict[str, Any], str]] = {}
        self._part_of: dict[str, tuple[str, int]] = {}  # of a part's name, its weight and which one it is
        self._wholes: dict[str, _Whole] = {}
        self._wanted_of: dict[tuple[str, ...], _Wanted] = {}
        for path, owner in module.named_modules():
            for holder in (owner._parameters, owner._buffers):
                for name, tensor in holder.items():
                    if tensor is not None:
                        full = f"{path}.{name}" if path else name
                        self._slots[full] = (holder, name)
                        self._note(full, tensor)

    def placed(self, names: tuple[str, ...], device: torch.device, moving: bool = False) -> PlacedWeights:
        """Return the named weights as they are in place now, all on ``device``, with their addresses.

        Args:
            moving: others may be where these were a call ago.

        Raises:
            NotCovered: a weight is gone, is on another device, or is of another dtype, shape or class.
        """
        try:
            wanted = self._wanted_of.get(names) or self._wanted(names)
            tensors = weights = list(map(operator.getitem, wanted.holders, wanted.names))
        except KeyError as error:
            raise NotCovered(message("a weight of the model was removed")) from error
        if wanted.flattening is not None:
            parts = wanted.flattening.tensors(weights)
            if parts is None:
                raise NotCovered(_replaced())
            tensors = parts
        # One property of all weights at a time: this runs at every call, and a model has a thousand.
        if not set(map(type, tensors)) <= PLAIN:
            raise NotCovered(self._misfit(names, tensors, device))
        addresses = list(map(torch.Tensor.data_ptr, tensors))
        if wanted.were_looked_at(weights, addresses) if moving else wanted.found == (device, addresses):
            return PlacedWeights(tensors, addresses)  # where they were a call ago they are what they were
        if {tensor.device for tensor in tensors} - {device} or [
            (tensor.dtype, tensor.shape) for tensor in tensors
        ] != wanted.metadata:
            raise NotCovered(self._misfit(names, tensors, device))
        if wanted.flattening is not None and not wanted.flattening.is_same(weights):
            raise NotCovered(_replaced())
        if moving:
            wanted.note(weights, addresses)
        else:
            wanted.found = device, addresses
        return PlacedWeights(tensors, addresses)

    def forget_addresses(self) -> None:
        """Look at every weight again at the next call: what was found by their addresses counts no more."""
        for wanted in self._wanted_of.values():
            wanted.found = None
            wanted.looked_at.clear()

    def _wanted(self, names: tuple[str, ...]) -> _Wanted:
        specs = [self.specs[name] for name in names]
        weights = list(dict.fromkeys(self._part_of.get(name, (name, 0))[0] for name in names))
        slots = [self._slots[name] for name in weights]
        holders, own_names = [holder for holder, _ in slots], [name for _, name in slots]
        metadata = [(spec.dtype, spec.shape) for spec in specs]
        wanted = self._wanted_of[names] = _Wanted(holders, own_names, metadata, self._flattening(names, weights))
        return wanted

    def _flattening(self, names: tuple[str, ...], weights: Sequence[str]) -> _Flattening | None:
        """Return how tensors of these names come from these weights; None if each is a weight of its own."""
        if self._part_of.keys().isdisjoint(names):
            return None
        wholes = [self._wholes.get(name) for name in weights]
        counts = (1 if whole is None else whole.size for whole in wholes)
        first = dict(zip(weights, accumulate(counts, initial=0), strict=False))
        places = (self._part_of.get(name, (name, 0)) for name in names)
        return _Flattening(wholes, [first[name] + index for name, index in places])

    def _misfit(self, names: tuple[str, ...], tensors: Sequence[Any], device: torch.device) -> Message:
        """Return what is wrong with the first weight that cannot be used as it is."""
        for name, tensor in zip(names, tensors, strict=True):
            spec = self.specs[name]
            if tensor is None or tensor.dtype != spec.dtype or tensor.shape != spec.shape:
                break
            if tensor.device != device:
                return message("weights are not resident on {device} (offloaded)", device=device)
            if type(tensor) not in PLAIN:
                file = kind_of_file(type(tensor), getattr(tensor, "quant_type", None))
                return message("weights are those of {file}, which no graph can take yet", file=file)
        return _replaced()

    def _note(self, name: str, weight: torch.Tensor) -> None:
        form = format_of(weight, self.formats)
        if form is None:
            self.specs[name] = _weight_spec(name, weight)
            return
        names = form.names(weight)
        self._wholes[name] = _Whole(type(weight), form, form.context(weight), len(names))
        for index, (part, tensor) in enumerate(zip(names, form.parts(weight), strict=True)):
            self._part_of[part_name(name, part)] = (name, index)
            self.specs[part_name(name, part)] = _weight_spec(part_name(name, part), tensor)


def _replaced() -> Message:
    return message("a weight of the model was replaced by one of another shape or dtype")


def _weight_spec(name: str, tensor: torch.Tensor) -> WeightSpec:
    return WeightSpec(name, tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
