"""The module that is accelerated: its weights as they are now, and what identifies its code.

Weights are inputs of a compiled graph, so their values do not matter here: two checkpoints of one architecture have
the same fingerprint. Everything else that can change what the forward computes does matter: see ``module_fingerprint``.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Mapping, Sequence

import torch

from ...messages import Message, message
from ..call import ChangesState
from ..fingerprint.code_ownership import NO_HOST, HostCode
from ..fingerprint.snapshot import is_equal
from ..option_probe import OptionRead
from ..values.value_text import Describer
from .held_objects import AttributeGuard, WeightSpec, WeightTable, holders_of, same_content
from .module_fingerprint import NOT_DESCRIBED, Inspected, inspect, named
from .tensor_parts import TensorSubclasses, WeightFormat

_FORMATS = (TensorSubclasses(),)


class KeepsState(ChangesState):
    """The module's own forward changes what it keeps from call to call. A graph would not."""

    def __init__(self, reason: Message | None = None) -> None:
        super().__init__(reason or message("the model's forward changes what it keeps"))


class Target:
    """A module seen as code plus weights.

    Built once per module and cheap to ask again: ``placed_weights`` reads the tensors that are in place *now* (a LoRA
    replaces them, an offload moves them), ``guard_holds`` notices what replaced an object, ``is_current`` whether the
    module's code is still what was fingerprinted.

    Args:
        module: to be served.
        host: the host's own code.
        formats: the ways in which one weight may be several tensors.

    Attributes:
        layers: the module and all its submodules.
        placed_weights: as ``WeightTable.placed``.
        fingerprint: sha256 over code and weight metadata.
        refusal: why no capture of the module could be relied on, if so.
        guard_holds: returns True if no attribute, child or hook of a layer is another object than before, nor anything
            that code of extensions reads, or what is in it. What else happens inside of an attribute is seen by
            ``is_current`` alone.
    """

    def __init__(
        self, module: torch.nn.Module, host: HostCode = NO_HOST, formats: Sequence[WeightFormat] = _FORMATS
    ) -> None:
        self.module = module
        self.layers = tuple(module.modules())
        self._host = host
        self._table = WeightTable(module, formats)
        self.placed_weights = self._table.placed
        guard = AttributeGuard(self.layers)
        self._inspected = self._inspect()
        self._use(guard)
        self.fingerprint, self.refusal = self._inspected.fingerprint, self._inspected.refusal

    def weights(self, names: tuple[str, ...], device: torch.device) -> Sequence[torch.Tensor]:
        """Return the named weights as they are in place now.

        Raises:
            NotCovered: see ``WeightTable.placed``.
        """
        return self.placed_weights(names, device).tensors

    @property
    def formats(self) -> Sequence[WeightFormat]:
        """Return the ways in which one weight may be several tensors."""
        return self._table.formats

    @property
    def specs(self) -> Mapping[str, WeightSpec]:
        """Return the spec of every weight by name; see ``WeightTable``."""
        return self._table.specs

    @property
    def tells_objects_apart(self) -> bool:
        """Return True if code of extensions may compute something else for another module of the same fingerprint."""
        return self._inspected.tells_objects_apart

    def is_current(self) -> bool:
        """Return True if the layers are the same objects with the same code. Takes milliseconds: ask once a run.

        What was inspected is compared by identity. That is relied on only if another inspection began after it was
        noted down, and found the same: while the first one went on, another thread may have changed something.
        """
        layers = tuple(self.module.modules())
        if len(layers) != len(self.layers) or not all(map(operator.is_, layers, self.layers)):
            return False
        seen = self._inspected.seen
        same = seen if seen is not None and self._guard.holds() and seen.is_same() else None
        if same is not None and same.twice:
            return True
        guard = self._guard if self._guard.holds() else AttributeGuard(self.layers, self._guard.left)
        found = self._inspect()
        if self._is_another(found):
            return False
        if same is not None:
            same.twice = True
        else:
            self._inspected = found
        self._use(guard)
        if guard.leaves_out(found.left):
            return True
        self._use(AttributeGuard(self.layers, found.left))
        return self.is_current()  # what is compared is less now, and may have changed meanwhile

    def attributes(self) -> dict[tuple[str, str], str]:
        """Return what the attributes of the layers are that count, by layer and name. As dear as ``is_current``."""
        layers = {id(layer): path for path, layer in self.module.named_modules()}
        describer = Describer(layers)
        return {
            (named(layers[id(layer)]), name): describer.describe_or_name(value)
            for layer in self.layers
            for name, value in layer.__dict__.items()
            if name not in NOT_DESCRIBED and not self._inspected.left.leaves_out(name, value)
        }

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Put back what forwards change inside of what the layers hold and their code reaches.

        Raises:
            KeepsState: the module is another one after them.
        """
        seen = self._inspected.seen
        if seen is None:  # what could not be described is not compared
            yield
            return
        if not seen.is_same():  # what it holds by now could not be put back: the call before this one may have made it
            found = self._inspect_again()
            if found.seen is None or self._is_another(found):
                raise KeepsState
            self._inspected, seen = found, found.seen
        with seen.put_back() as holds:
            yield
            if not holds() and self._is_another(self._inspect_again()):
                raise KeepsState

    def _is_another(self, found: Inspected) -> bool:
        """Return True if what was found is not the module that this target is of."""
        return (found.fingerprint, found.refusal) != (self.fingerprint, self.refusal)

    def _inspect_again(self) -> Inspected:
        """Inspect the module around a trace.

        Raises:
            KeepsState: its forward left options of a call behind, where now our own look would read them.
        """
        try:
            return self._inspect()
        except OptionRead as read:
            raise KeepsState from read

    @contextlib.contextmanager
    def attributes_unchanged(self) -> Iterator[None]:
        """See that a forward leaves the attributes of the layers as they were, but for those that nothing reads.

        So it is with weights, buffers, children and hooks. Enter it within the trace: at its end torch.export puts
        attributes back by itself, and there is nothing to see.

        Raises:
            KeepsState: it set one to another value.
        """
        before = {path: (vars(layer), dict(vars(layer))) for path, layer in self.module.named_modules()}
        held = [(path, each, dict(each)) for path, layer in self.module.named_modules() for each in holders_of(layer)]
        yield
        for path, holder, content in held:
            if not same_content(holder, content):
                names = {*holder, *content}
                changed = [str(n) for n in names if holder.get(n, content) is not content.get(n, holder)]
                raise KeepsState(_changed(min(changed or map(str, names)), path))  # or only their order
        for path, (now, attributes) in before.items():
            for name in (now.keys() | attributes.keys()) - NOT_DESCRIBED:
                value = now.get(name)
                unread = self._inspected.left.leaves_out(name, value)
                if not unread and not (name in now and name in attributes and is_equal(value, attributes[name])):
                    raise KeepsState(_changed(name, path))

    def forget_addresses(self) -> None:
        """Look at every weight again at the next call: another run begins."""
        self._table.forget_addresses()

    def _use(self, guard: AttributeGuard) -> None:
        self._guard, seen = guard, self._inspected.seen
        self.guard_holds = guard.holds  # asked at every call, so not by way of a method of this class
        if seen is not None and (read := seen.of_extensions) is not None:
            # What a wrapper sets for each step may be the same number as before, in another object.
            self.guard_holds = lambda: guard.holds() and (read.holds() or not read.changed())

    def _inspect(self) -> Inspected:
        return inspect(dict(self.module.named_modules()), self._host, self.formats)


def _changed(name: str, path: str) -> Message:
    return message("the model's forward changes attribute {name} of layer {layer}", name=name, layer=named(path))
