"""The module that is accelerated: its weights as they are now, and what identifies its code.

Weights are inputs of a compiled graph, so their values do not matter here: two checkpoints of one
architecture have the same fingerprint. Everything else that can change what the forward computes
does matter: classes and their functions, attributes, weight names, shapes, dtypes and layouts.
Not so tensors that a forward only notes on itself and that nothing reads (left_behind.py).
"""

from __future__ import annotations

import hashlib
import operator
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from ..messages import Message, first_line, message
from .call import NotCovered
from .describe import Describer, Indescribable
from .left_behind import is_tensors, stored_by
from .parts import PLAIN, TensorSubclasses, WeightFormat, format_of, kind_of_file, part_name
from .reached import NO_HOST, HostCode, Reached

# nn.Module's own bookkeeping: described through named_modules/parameters/buffers, or checked apart.
_NOT_DESCRIBED = frozenset((*vars(torch.nn.Module()), "forward"))
_FORMATS = (TensorSubclasses(),)


@dataclass(frozen=True)
class WeightSpec:
    """A weight's name in the module and what compiled code assumes of it."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class _Wanted:
    """Weights that a graph takes: the dict that holds each and its name there; dtypes and shapes.

    ``found`` is the device and the addresses that they were last looked at with, in the same run. Where some of the
    weights are parts of others, ``parted`` says which.
    """

    places: list[tuple[dict[str, Any], str]]
    metadata: list[tuple[torch.dtype, tuple[int, ...]]]
    parted: _Parted | None = None
    found: tuple[torch.device, list[int]] | None = None


class _Whole(NamedTuple):
    """How a weight is several tensors, and how many."""

    kind: type
    form: WeightFormat
    context: Any
    size: int


@dataclass(frozen=True)
class _Parted:
    """What to make of weights some of which are several tensors.

    Attributes:
        wholes: those of the weights; None for one that is a single tensor.
        order: of all tensors of all weights, those that a graph takes, as it takes them.
    """

    wholes: list[_Whole | None]
    order: list[int]

    def tensors(self, weights: Sequence[Any]) -> list[Any] | None:
        """What a graph takes; None if a weight is of another class than it was."""
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


class Target:
    """A module seen as code plus weights.

    Built once per module and cheap to ask again: ``weights`` reads the tensors that are in place
    *now* (a LoRA replaces them, an offload moves them), ``is_current`` tells whether the module's
    code is still what was fingerprinted.

    Args:
        module: to be served.
        host: the host's own code.
        formats: the ways in which one weight may be several tensors.

    Attributes:
        layers: the module and all its submodules.
        formats: as given.
        specs: every weight by name; of a weight with several names, each; of one with several parts, each of them.
        fingerprint: sha256 over code and weight metadata.
        refusal: why no capture of the module could be relied on, if so.
    """

    def __init__(
        self, module: torch.nn.Module, host: HostCode = NO_HOST, formats: Sequence[WeightFormat] = _FORMATS
    ) -> None:
        self.module = module
        self.layers = tuple(module.modules())
        self.formats = formats
        self._slots: dict[str, tuple[dict[str, Any], str]] = {}
        self._part_of: dict[str, tuple[str, int]] = {}  # of a part's name, its weight and which one it is
        self._wholes: dict[str, _Whole] = {}
        self.specs: dict[str, WeightSpec] = {}
        self._wanted_of: dict[tuple[str, ...], _Wanted] = {}
        for path, owner in module.named_modules():
            for holder in (owner._parameters, owner._buffers):
                for name, tensor in holder.items():
                    if tensor is not None:
                        full = f"{path}.{name}" if path else name
                        self._slots[full] = (holder, name)
                        self._note(full, tensor)
        self._host = host
        self._hold()
        # Those with attributes that a forward leaves behind. None yet: what is not compared was looked at before.
        self._with_left: list[dict[Any, Any]] = []
        self._left: frozenset[str] = frozenset()
        self._held = list(self._values())
        self.fingerprint, self.refusal, self._unread = self._inspected(dict(module.named_modules()))

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

    def _inspected(self, layers: Mapping[str, torch.nn.Module]) -> _Inspected:
        return _inspect(layers, self._host, self.formats)

    def is_current(self) -> bool:
        """Whether the layers are the same objects with the same code. Ten milliseconds or two: once a run."""
        layers = dict(self.module.named_modules())
        same = len(layers) == len(self.layers) and all(map(operator.is_, layers.values(), self.layers))
        held = self._held
        if not (same and self.is_untouched()):
            self._hold(set(map(id, self._with_left)))
            held = list(self._values())
        found = self._inspected(layers) if same else None
        if found is None or (found.fingerprint, found.refusal) != (self.fingerprint, self.refusal):
            return False
        if self._leave_out(found.left):
            return self.is_current()  # what counts as held is less now, and may have changed meanwhile
        self._held, self._unread = held, found.left
        return True

    def _leave_out(self, left: frozenset[str]) -> bool:
        """Compare attributes of these names no more; whether that changes anything."""
        states = [layer.__dict__ for layer in self.layers]
        with_left = [state for state in states if not left.isdisjoint(state)] if left else []
        if left == self._left and list(map(id, with_left)) == list(map(id, self._with_left)):
            return False
        self._hold(set(map(id, with_left)))
        self._left, self._with_left = left, with_left
        return True

    def is_untouched(self) -> bool:
        """Whether no attribute, child or hook of a layer is another object than before: a millisecond, for every call.

        What happens inside of an attribute, such as a list that is appended to, is seen by ``is_current`` only.
        """
        # Without a list of what there is now, nor a look into dicts that are empty: both take longer than comparing.
        if any(self._empty) or sum(map(len, self._holders)) + len(self._values_with_left()) != len(self._held):
            return False
        return all(map(operator.is_, self._values(), self._held))

    def _values(self) -> Iterator[Any]:
        # The objects and not their ids: a number that is thrown away leaves its id to the next one.
        return chain(chain.from_iterable(map(dict.values, self._holders)), self._values_with_left())

    def _values_with_left(self) -> list[Any]:
        return [
            value
            for holder in self._with_left
            for name, value in holder.items()
            if name not in self._left or not is_tensors(value)
        ]

    def _hold(self, apart: Collection[int] = ()) -> None:
        """Compare all that the layers have from now on, but for their dicts of these ids."""
        holders = [
            holder
            for layer in self.layers
            for holder in (layer.__dict__, layer._modules, layer._forward_hooks, layer._forward_pre_hooks)
            if id(holder) not in apart
        ]
        self._holders: list[dict[Any, Any]] = [holder for holder in holders if holder]
        self._empty: list[dict[Any, Any]] = [holder for holder in holders if not holder]

    def attributes(self) -> dict[tuple[str, str], str]:
        """What the attributes of the layers are that count, by layer and name. As dear as ``is_current``."""
        layers = {id(layer): path for path, layer in self.module.named_modules()}
        describer = Describer(layers)
        return {
            (_named(layers[id(layer)]), name): describer.describe_or_name(value)
            for layer in self.layers
            for name, value in layer.__dict__.items()
            if name not in _NOT_DESCRIBED and not (name in self._unread and is_tensors(value))
        }

    def weights(self, names: tuple[str, ...], device: torch.device) -> list[torch.Tensor]:
        """The named weights as they are in place now, all on ``device``.

        Raises:
            NotCovered: a weight is gone, is on another device, or is of another dtype, shape or class.
        """
        try:
            wanted = self._wanted(names)
            tensors = weights = [holder[name] for holder, name in wanted.places]
        except KeyError as error:
            raise NotCovered(message("a weight of the model was removed")) from error
        if wanted.parted is not None:
            parts = wanted.parted.tensors(weights)
            if parts is None:
                raise NotCovered(_replaced())
            tensors = parts
        # All at once and one aspect after the other: for every call, and a model has a thousand.
        if not set(map(type, tensors)) <= PLAIN:
            raise NotCovered(self._misfit(names, tensors, device))
        found = device, [tensor.data_ptr() for tensor in tensors]
        if found == wanted.found:  # where they were a call ago they are what they were
            return tensors
        if {tensor.device for tensor in tensors} - {device} or [
            (tensor.dtype, tensor.shape) for tensor in tensors
        ] != wanted.metadata:
            raise NotCovered(self._misfit(names, tensors, device))
        if wanted.parted is not None and not wanted.parted.is_same(weights):
            raise NotCovered(_replaced())
        wanted.found = found
        return tensors

    def look_at_weights_anew(self) -> None:
        """What was found of weights by their addresses counts no more: another run begins."""
        for wanted in self._wanted_of.values():
            wanted.found = None

    def _wanted(self, names: tuple[str, ...]) -> _Wanted:
        if names not in self._wanted_of:
            specs = [self.specs[name] for name in names]
            weights = list(dict.fromkeys(self._part_of.get(name, (name, 0))[0] for name in names))
            places = [self._slots[name] for name in weights]
            parted = self._parted(names, weights)
            self._wanted_of[names] = _Wanted(places, [(spec.dtype, spec.shape) for spec in specs], parted)
        return self._wanted_of[names]

    def _parted(self, names: tuple[str, ...], weights: Sequence[str]) -> _Parted | None:
        """How tensors of these names come from these weights; None if each is a weight of its own."""
        if self._part_of.keys().isdisjoint(names):
            return None
        wholes = [self._wholes.get(name) for name in weights]
        counts = (1 if whole is None else whole.size for whole in wholes)
        first = dict(zip(weights, accumulate(counts, initial=0), strict=False))
        places = (self._part_of.get(name, (name, 0)) for name in names)
        return _Parted(wholes, [first[name] + index for name, index in places])

    def _misfit(self, names: tuple[str, ...], tensors: Sequence[Any], device: torch.device) -> Message:
        """What is wrong with the first weight that cannot be used as it is."""
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


def _replaced() -> Message:
    return message("a weight of the model was replaced by one of another shape or dtype")


def _weight_spec(name: str, tensor: torch.Tensor) -> WeightSpec:
    return WeightSpec(name, tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


class _Inspected(NamedTuple):
    """What a module is. ``left`` names attributes that are no part of it, because nothing reads them."""

    fingerprint: str
    refusal: Message | None
    left: frozenset[str] = frozenset()


def _inspect(layers: Mapping[str, torch.nn.Module], host: HostCode, formats: Sequence[WeightFormat]) -> _Inspected:
    """The fingerprint of a module, all of whose layers these are, and why it must be refused, if it must."""
    if _global_forward_hooks or _global_forward_pre_hooks:
        return _Inspected("", message("another extension has set a forward hook on all layers"))
    for path, layer in layers.items():
        if "forward" in layer.__dict__ and not _is_own_forward(layer):
            return _Inspected(
                "", message("the forward of layer {layer} was replaced by another extension", layer=_named(path))
            )
        if layer._forward_hooks or layer._forward_pre_hooks:
            return _Inspected(
                "", message("layer {layer} has a forward hook from another extension", layer=_named(path))
            )
    describer = Describer({id(layer): path for path, layer in layers.items()})
    bases = _bases({type(layer) for layer in layers.values()})
    stored = stored_by(bases) - _NOT_DESCRIBED
    lines: list[str] = []
    aside: list[tuple[str, str, Any]] = []
    weights: dict[int, str] = {}
    for path, layer in layers.items():
        apart = {name for name in stored.intersection(layer.__dict__) if is_tensors(layer.__dict__[name])}
        try:
            lines += _layer_lines(path, layer, describer, apart)
            lines += _weight_lines(path, layer, describer, weights, formats)
        except Exception as error:  # of Indescribable, and of whatever an extension's object does when it is looked at
            return _Inspected("", _cannot_be_part(path, error))
        aside += [(path, name, layer.__dict__[name]) for name in sorted(apart)]
    try:
        reached = _reached(bases, describer, host)
        while read := _read_of({name for _, name, _ in aside}, reached, describer, lines):
            for path, name, value in aside:
                if name in read:
                    try:
                        lines.append(f"\n  {path}: {name} = {describer.describe(value)}")
                    except Exception as error:
                        return _Inspected("", _cannot_be_part(path, error))
            aside = [attribute for attribute in aside if attribute[1] not in read]
            reached.follow()
        lines += [f"\n{line}" for line in reached.lines()]
        if reached.refusal is not None:
            return _Inspected("", reached.refusal)
    except Exception as error:
        return _Inspected("", message("the model's code cannot be read: it uses {what}", what=_unreadable(error)))
    digest = hashlib.sha256("".join(lines).encode()).hexdigest()
    return _Inspected(digest, None, frozenset(name for _, name, _ in aside))


def _cannot_be_part(path: str, error: Exception) -> Message:
    return message(
        "layer {layer} holds {error}, which cannot be part of a graph's identity",
        layer=_named(path),
        error=error if isinstance(error, Indescribable) else _unreadable(error),
    )


def _unreadable(error: Exception) -> Message:
    return message(
        "something unreadable ({kind}: {first_line})", kind=type(error).__name__, first_line=first_line(error)
    )


def _named(path: str) -> str:
    """A layer for people."""
    return path or message("(root)")


def _is_own_forward(layer: torch.nn.Module) -> bool:
    """Whether the forward that was set on a layer is its class's: hosts put it back so, after another extension's."""
    forward = layer.__dict__["forward"]
    return getattr(forward, "__self__", None) is layer and getattr(forward, "__func__", None) is type(layer).forward


def _layer_lines(path: str, layer: torch.nn.Module, describer: Describer, aside: set[str]) -> Iterator[str]:
    """Class, attributes and children of one layer, but for attributes of the names in ``aside``."""
    yield f"\nlayer {path} {type(layer).__module__}.{type(layer).__qualname__} {layer.training}"
    attributes = vars(layer)
    for name in sorted(attributes.keys() - _NOT_DESCRIBED - aside):
        yield f"\n  {name} = {describer.describe(attributes[name])}"
    for name, child in layer._modules.items():
        yield f"\n  child {name} = {describer.describe(child)}"


def _weight_lines(
    path: str, layer: torch.nn.Module, describer: Describer, weights: dict[int, str], formats: Sequence[WeightFormat]
) -> Iterator[str]:
    """The weights of one layer; ``weights`` collects first names by identity."""
    for holder in (layer._parameters, layer._buffers):
        for name, tensor in holder.items():
            if tensor is None:
                yield f"\n  weight {name} None"
            elif id(tensor) in weights:
                yield f"\n  weight {name} is {weights[id(tensor)]}"
            else:
                weights[id(tensor)] = f"{path}.{name}"
                form = format_of(tensor, formats)
                if form is None:
                    yield f"\n  weight {name} {tuple(tensor.shape)} {tensor.stride()} {tensor.dtype}"
                    continue
                describer.code.append(type(tensor))
                yield f"\n  weight {name} {describer.describe([type(tensor), form.context(tensor)])}"
                for part, plain in zip(form.names(tensor), form.parts(tensor), strict=True):
                    yield f"\n    {part} {tuple(plain.shape)} {plain.stride()} {plain.dtype}"


def _bases(kinds: set[type]) -> list[type]:
    """The classes of layers and all that these are derived from."""
    return sorted(
        {base for kind in kinds for base in kind.__mro__}, key=lambda kind: (kind.__module__, kind.__qualname__)
    )


def _reached(bases: list[type], describer: Describer, host: HostCode) -> Reached:
    """The code of the layers' classes and of all that they hold, and what that code reaches.

    Other extensions replace methods and functions of the host while it runs. What they replaced
    must not be served by a graph of what was there before.
    """
    reached = Reached(describer, host, frozenset(kind.__module__.partition(".")[0] for kind in bases))
    for kind in bases:
        reached.add_layer_class(kind)
    reached.follow()
    return reached


def _read_of(names: set[str], reached: Reached, describer: Describer, lines: list[str]) -> set[str]:
    """Which attributes of these names may be read, also by a name that is itself the value of an attribute."""
    if not names:
        return names
    for code in describer.code:  # with what was met on the way
        reached.reads.add_value(code)
    text = "".join(lines)
    return {name for name in names if reached.reads.may_read(name) or re.search(rf"\b{re.escape(name)}\b", text)}
