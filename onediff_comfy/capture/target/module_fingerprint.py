"""The fingerprint of a module: equal for two checkpoints, different for all that computes something else.

Classes and their functions count, attributes, weight names, shapes, dtypes and layouts. Weight values do not, nor
tensors that a forward only notes on itself, nor the host's notes on where weights are, as long as nothing reads them
(unread_attributes.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect as inspect_module
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from ...messages import Message, first_line, message
from ..fingerprint.code_ownership import HostCode
from ..fingerprint.reachable_code import CodeReachability
from ..fingerprint.snapshot import Snapshot, is_equal
from ..fingerprint.sources import Sources
from ..fingerprint.unread_attributes import ALL_READ, Unread, is_tensors, stored_by
from ..fingerprint.watching_describer import WatchingDescriber
from ..values.tensors import own_attributes
from ..values.value_text import Describer, Indescribable
from .tensor_parts import WeightFormat, format_of

NOT_DESCRIBED = frozenset((*vars(torch.nn.Module()), "forward", "_is_torch_compile"))
"""nn.Module's own bookkeeping: described through named_modules/parameters/buffers, or checked apart.

``torch.compile(module)`` leaves the last on the module that it wraps, and only TorchDynamo reads it."""
_MISSING = object()


class Inspected(NamedTuple):
    """What a module is.

    Attributes:
        fingerprint: sha256 over code and weight metadata.
        refusal: why no capture of the module could be relied on, if so.
        left: attributes that are no part of it, because nothing reads them; some may not be there yet.
        seen: all that was looked at, unless there is a refusal.
        tells_objects_apart: code of extensions may compute something else for another module of the same fingerprint.
    """

    fingerprint: str
    refusal: Message | None
    left: Unread = ALL_READ
    seen: Seen | None = None
    tells_objects_apart: bool = False


class Seen:
    """All that an inspection looked at but attributes of layers, as it was then.

    Code and values are compared by identity: whatever may change is watched, so nothing has to be read again. Weights
    are compared by what a graph assumes of them, and constants by their values.

    Args:
        layers: that were inspected, by path.
        weights: the lines of their weights.
        describer: has described all values.
        sources: where all code comes from.
        formats: the ways in which one weight may be several tensors.
        notes: names of attributes that nothing reads, whatever they hold.

    Attributes:
        twice: another inspection, which began later, has found the same.
        of_extensions: what code of extensions reads, if there is any, and what layers with methods of theirs hold.
    """

    def __init__(
        self,
        layers: Mapping[str, torch.nn.Module],
        weights: Sequence[str],
        describer: WatchingDescriber,
        sources: Sources,
        formats: Sequence[WeightFormat],
        notes: frozenset[str],
    ) -> None:
        self._layers, self._weights, self._formats = layers, weights, formats
        self._kinds, self._attributes = list(map(type, layers.values())), list(map(vars, layers.values()))
        self._classes = list(map(type, _weights_in(layers.values())))
        self._describer, self._sources = describer, sources
        for layer in layers.values():
            if not sources.extended.isdisjoint(type(layer).__mro__):
                for name in vars(layer).keys() - NOT_DESCRIBED - notes:
                    sources.of_extensions.add_nested(vars(layer)[name])
        self.of_extensions = None if sources.of_extensions.is_empty else sources.of_extensions
        self.twice = False
        describer.snapshot.take()
        sources.take()

    @contextlib.contextmanager
    def put_back(self) -> Iterator[Callable[[], bool]]:
        """Put back what changes inside of what was described, but for attributes of layers.

        Yields:
            what returns True as long as everything described holds the very objects that it held when inspected.
        """
        snapshot = self._describer.snapshot
        restore, restore_variables = snapshot.restorer(), self._sources.restorer()
        restore_constants = self._describer.constants_restorer()
        try:
            yield lambda: snapshot.holds() and self._sources.hold()
        finally:
            if not snapshot.holds():
                restore()
            restore_variables()
            restore_constants()

    def is_same(self) -> bool:
        """Return True if all of it is what it was. What cannot be looked at is not."""
        try:
            return self._is_same()
        except Exception:  # of whatever an extension's object does when it is looked at
            return False

    def _is_same(self) -> bool:
        layers, known = self._layers.values(), dict[int, str]()
        describer = Describer({id(layer): path for path, layer in self._layers.items()})
        return (
            all(map(operator.is_, map(type, layers), self._kinds))
            and all(map(operator.is_, map(vars, layers), self._attributes))
            and self._sources.hold()
            and self._describer.snapshot.holds()
            and self._describer.are_constants_same()
            and not (_global_forward_hooks or _global_forward_pre_hooks)
            and list(map(type, _weights_in(layers))) == self._classes
            and self._weights
            == [
                line
                for path, layer in self._layers.items()
                for line in _weight_lines(path, layer, describer, known, self._formats)
            ]
        )


def inspect(layers: Mapping[str, torch.nn.Module], host: HostCode, formats: Sequence[WeightFormat]) -> Inspected:
    """Return the fingerprint of a module, all of whose layers these are, and why it must be refused, if it must."""
    objection = _hooked(layers)
    if objection is not None:
        return Inspected("", objection)
    describer = WatchingDescriber({id(layer): path for path, layer in layers.items()}, Snapshot())
    bases = _bases({type(layer) for layer in layers.values()})
    stored = stored_by(bases) - NOT_DESCRIBED
    lines: list[str] = []
    aside: list[tuple[str, str, Any]] = []
    weights, of_classes = dict[int, str](), dict[tuple[type, str], Any]()
    of_weights: list[str] = []
    for path, layer in layers.items():
        apart = _apart(layer, stored, host.notes)
        try:
            lines += _layer_lines(path, layer, describer, apart, of_classes)
            of_layer = list(_weight_lines(path, layer, describer, weights, formats))
        except Exception as error:  # of Indescribable, and of whatever an extension's object does when it is looked at
            return Inspected("", _cannot_be_part(path, error))
        lines += of_layer
        of_weights += of_layer
        aside += [(path, name, layer.__dict__[name]) for name in sorted(apart)]
    try:
        reached = _reached(bases, describer, host)
        while read := _read_of({name for _, name, _ in aside}, reached, describer, lines, host.notes):
            for path, name, value in aside:
                if name in read:
                    try:
                        lines.append(f"\n  {path}: {name} = {describer.describe(value)}")
                    except Exception as error:
                        return Inspected("", _cannot_be_part(path, error))
            aside = [attribute for attribute in aside if attribute[1] not in read]
            reached.follow()
        reached.follow()
        left = {name for _, name, _ in aside}
        # What the first call, or the host's next loading, notes for nobody.
        noted = {name for name in stored | host.notes if not any(name in layer.__dict__ for layer in layers.values())}
        left |= noted - _read_of(noted, reached, describer, lines, host.notes)
        lines += [f"\n{line}" for line in reached.identity.sorted()]
        if reached.identity.refusal is not None:
            return Inspected("", reached.identity.refusal)
    except Exception as error:
        return Inspected("", message("the model's code cannot be read: it uses {what}", what=_unreadable(error)))
    digest = hashlib.sha256("".join(lines).encode()).hexdigest()
    unread = Unread(frozenset(left - host.notes), host.notes & left)
    seen = Seen(layers, of_weights, describer, reached.sources, formats, unread.notes)
    return Inspected(digest, None, unread, seen, reached.sources.tell_objects_apart)


def _hooked(layers: Mapping[str, torch.nn.Module]) -> Message | None:
    """Return which layer runs other code than its class's, or None."""
    if _global_forward_hooks or _global_forward_pre_hooks:
        return message("another extension has set a forward hook on all layers")
    for path, layer in layers.items():
        if "forward" in layer.__dict__ and not _is_own_forward(layer):
            return message("the forward of layer {layer} was replaced by another extension", layer=named(path))
        if layer._forward_hooks or layer._forward_pre_hooks:
            return message("layer {layer} has a forward hook from another extension", layer=named(path))
    return None


def _apart(layer: torch.nn.Module, stored: frozenset[str], notes: frozenset[str]) -> set[str]:
    """Return names of attributes of a layer's that count only if something reads them."""
    attributes = vars(layer)
    return {name for name in attributes.keys() & (stored | notes) if name in notes or is_tensors(attributes[name])}


def _cannot_be_part(path: str, error: Exception) -> Message:
    return message(
        "layer {layer} holds {error}, which cannot be part of a graph's identity",
        layer=named(path),
        error=error if isinstance(error, Indescribable) else _unreadable(error),
    )


def _unreadable(error: Exception) -> Message:
    return message(
        "something unreadable ({kind}: {first_line})", kind=type(error).__name__, first_line=first_line(error)
    )


def named(path: str) -> str:
    """Return how people are told of a layer, by its path."""
    return path or message("(root)")


def _is_own_forward(layer: torch.nn.Module) -> bool:
    """Return True if the forward that was set on a layer is its class's. Hosts put it back so after an extension's."""
    forward = layer.__dict__["forward"]
    return getattr(forward, "__self__", None) is layer and getattr(forward, "__func__", None) is type(layer).forward


def _layer_lines(
    path: str,
    layer: torch.nn.Module,
    describer: Describer,
    aside: set[str],
    of_classes: dict[tuple[type, str], Any],
) -> Iterator[str]:
    """Class, attributes and children of one layer, but for attributes of the names in ``aside``.

    ``of_classes`` collects what classes have by these names: a model has hundreds of layers, and few classes.
    """
    yield f"\nlayer {path} {type(layer).__module__}.{type(layer).__qualname__} {layer.training}"
    attributes = vars(layer)
    for name in sorted(attributes.keys() - NOT_DESCRIBED - aside):
        if (of_class := (type(layer), name)) not in of_classes:
            of_classes[of_class] = inspect_module.getattr_static(*of_class, _MISSING)
        if is_equal(attributes[name], of_classes[of_class]):
            continue  # of an object that had none of its own, and was given it back
        yield f"\n  {name} = {describer.describe(attributes[name])}"
    for name, child in layer._modules.items():
        yield f"\n  child {name} = {describer.describe(child)}"


def _weight_lines(
    path: str, layer: torch.nn.Module, describer: Describer, weights: dict[int, str], formats: Sequence[WeightFormat]
) -> Iterator[str]:
    """Yield the weights of one layer; ``weights`` collects first names by identity."""
    for holder in (layer._parameters, layer._buffers):
        for name, tensor in holder.items():
            if tensor is None:
                yield f"\n  weight {name} None"
            elif id(tensor) in weights:
                yield f"\n  weight {name} is {weights[id(tensor)]}"
            else:
                weights[id(tensor)] = f"{path}.{name}"
                form = format_of(tensor, formats)
                if form is None and (own := own_attributes(tensor)):  # what stands in for it has none
                    raise Indescribable(message("a weight with an attribute of its own ({name})", name=min(own)))
                if form is None:
                    yield f"\n  weight {name} {tuple(tensor.shape)} {tensor.stride()} {tensor.dtype}"
                    continue
                describer.code.append(type(tensor))
                yield f"\n  weight {name} {describer.describe([type(tensor), form.context(tensor)])}"
                for part, plain in zip(form.names(tensor), form.parts(tensor), strict=True):
                    yield f"\n    {part} {tuple(plain.shape)} {plain.stride()} {plain.dtype}"


def _weights_in(layers: Iterable[torch.nn.Module]) -> Iterator[torch.Tensor | None]:
    return (weight for layer in layers for held in (layer._parameters, layer._buffers) for weight in held.values())


def _bases(kinds: set[type]) -> list[type]:
    """Return the classes of layers and all that these are derived from."""
    return sorted(
        {base for kind in kinds for base in kind.__mro__}, key=lambda kind: (kind.__module__, kind.__qualname__)
    )


def _reached(bases: list[type], describer: Describer, host: HostCode) -> CodeReachability:
    """Return the code of the layers' classes and of all that they hold, and what that code reaches.

    Other extensions replace methods and functions of the host while it runs. What they replaced
    must not be served by a graph of what was there before.
    """
    reached = CodeReachability(describer, host, frozenset(kind.__module__.partition(".")[0] for kind in bases))
    for kind in bases:
        reached.add_layer_class(kind)
    reached.follow()
    return reached


def _read_of(
    names: set[str], reached: CodeReachability, describer: Describer, lines: list[str], notes: frozenset[str]
) -> set[str]:
    """Return which attributes of these names may be read, also by a name that is itself the value of an attribute.

    Code that puts names together does not mean ``notes``.
    """
    if not names:
        return names
    for code in describer.code:  # with what was met on the way
        reached.reads.add_value(code)
    text, reads = "".join(lines), reached.reads
    may_read = {name for name in names if (reads.names if name in notes else reads.may_read)(name)}
    return may_read | {name for name in names if re.search(rf"\b{re.escape(name)}\b", text)}
