"""Functions that a call hands over, lifted: their tensors are inputs of the graph, all else that they are is its key.

A function is its code, defaults, closure, bound object and all that these reach. While a forward is traced, copies of
the functions are called, in which traced tensors are in the places of the tensors; the functions themselves are never
touched. Nobody guesses whether a function changes what it holds: everything is looked at again after the trace.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from ...messages import first_line
from ..fingerprint.code_ownership import HostCode
from ..fingerprint.snapshot import Snapshot
from ..fingerprint.sources import Sources
from ..handed_over import ChangedState, Copies, Functions, Unliftable, source_of
from ..values.tensors import own_attributes, put_back
from ..values.value_text import PLAIN, Indescribable
from .forms import empty_like, fill
from .held_state import HeldState, StateDescriber
from .numbers import ALL_NUMBERS, Number, Uses
from .reached_state import ReachedState
from .readings import VALUES, Arriving, Asked, Reading, Readings, Values, is_readable

_facts_of = operator.attrgetter("__class__", "requires_grad")
_MOST_BYTES_MOVED = 16 << 20  # at each call
_CALCULATED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class LiftedFunctions(Functions):
    """The functions of one call.

    Attributes:
        modules: layers that they hold.
        uses: of numbers, as far as it is known.
        readings: by which values they decide, as far as it is known.
        values: those of this call, or of the one before.
        arriving: those of this call, if ``values`` are not.
        objects: what they hold and what has parts, by ``id``, with the parts.
        layers: of the module that they are called by, as far as they hold them.
    """

    modules: Sequence[torch.nn.Module]
    uses: Uses
    readings: Readings
    values: Values
    objects: Mapping[int, tuple[Any, Sequence[Any]]]
    layers: Sequence[torch.nn.Module]
    _snapshot: Snapshot
    _sources: Sources
    _facts: Sequence[object]
    _scalars: dict[torch.device, list[torch.Tensor]] = field(default_factory=dict)
    arriving: Arriving | None = None

    def holds(self) -> bool:
        """Return True if everything that was described holds the same objects."""
        return self._snapshot.holds() and _facts(self.held) == self._facts

    def holds_with_its_code(self) -> bool:
        """Return True if, besides, all code that they run is what it was: asked once a run, for that is more."""
        return self.holds() and self._sources.hold()

    def at(self, options: Mapping[str, Any], before: Values | None = None) -> LiftedFunctions:
        """Return the functions as a call with these options hands them over: how they decide is part of the key.

        Args:
            before: values of the call before. As long as those of this one are on their way, the functions are assumed
                to decide by them as they did, which ``are_as_assumed`` tells.
        """
        held = [(i, held.stride(), held.storage_offset()) for i, held in enumerate(self.held) if _lies_oddly(held)]
        if not self.readings.questions and not held:
            return self
        arriving = self.readings.values(options)
        assumed = before is not None and not arriving.are_here
        values = before if assumed and before is not None else arriving.get()
        digest = f"{self.digest} {self.readings.answers(values, self.numbers)} {held}"
        return replace(self, values=values, arriving=arriving if assumed else None, digest=digest)

    @property
    def are_assumed(self) -> bool:
        return self.arriving is not None

    def decided(self) -> LiftedFunctions:
        return self if self.arriving is None else replace(self, values=self.arriving.get(), arriving=None)

    def are_as_assumed(self) -> bool:
        answers = functools.partial(self.readings.answers, numbers=self.numbers)
        return self.arriving is None or answers(self.arriving.get()) == answers(self.values)

    def learned_from(self, error: BaseException) -> str | None:
        if isinstance(error, GuardOnDataDependentSymNode) and not self.readings.are_read:
            return VALUES
        return ALL_NUMBERS if self.numbers else None

    @functools.cached_property
    def number(self) -> int:
        return _number_of(repr([number.value.hex() for number in self.numbers]))

    def tensors(self, device: torch.device, held: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
        return self._as_inputs(self.held if held is None else held, device)

    def with_other_values(self) -> tuple[list[torch.Tensor], Sequence[Any]]:
        others = list(map(_other_values, self.held))
        instead = dict(zip(map(id, self.held), others, strict=True))
        return others, FunctionCopies(self, Asked(frozenset(), {}, []), instead, {}).functions

    def _as_inputs(self, tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        held = [_placed(tensor.detach().contiguous(), device) for tensor in tensors]
        if self.numbers and device not in self._scalars:
            dtype = torch.float32 if device.type == "mps" else torch.float64  # which has no others
            self._scalars[device] = [torch.tensor(n.value, dtype=dtype, device=device) for n in self.numbers]
        return held + self._scalars.get(device, [])

    def copies(self, tensors: Sequence[torch.Tensor], raised: list[BaseException]) -> FunctionCopies:
        uses = Uses(self.uses.known, raised)
        held, scalars = tensors[: len(self.held)], tensors[len(self.held) :]
        stand_ins = {
            number.parent: Number(scalar, frozenset((number.place,)), number.value, uses)
            for number, scalar in zip(self.numbers, scalars, strict=True)
        }
        asked = Asked(frozenset(self.readings.questions), self.values, raised)
        return FunctionCopies(self, asked, dict(zip(map(id, self.held), held, strict=True)), stand_ins)

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        restore = self._snapshot.restorer()
        try:
            with put_back(self.held):
                yield
        finally:
            changed = self._snapshot.changed()
            if not self._snapshot.holds():
                restore()
        if changed:
            raise ChangedState


class FunctionCopies(Copies):
    """Copies of functions and of all that they hold, with other tensors and numbers.

    Args:
        lifted: the functions to be copied.
        asked: what is known of values in the options.
        tensors: what takes the places of their tensors, by the ``id`` of these.
        numbers: what takes the places of numbers, by the ``id`` of what holds them, and which of its parts they are.
    """

    def __init__(
        self,
        lifted: LiftedFunctions,
        asked: Asked,
        tensors: Mapping[int, torch.Tensor],
        numbers: Mapping[tuple[int, int], Number],
    ) -> None:
        self._are_read, self._asked, self._objects = lifted.readings.are_read, asked, lifted.objects
        self._copies, self._numbers = dict[int, Any](tensors), numbers
        self._empty: list[tuple[Any, Any]] = []
        self.functions = [self._copy(function) for function in lifted.functions]
        while self._empty:
            copy, original = self._empty.pop()
            fill(copy, original, self._parts(original))
        self._snapshot = Snapshot()
        for index in self._objects:
            self._snapshot.add(self._copies.get(index))
        self._snapshot.take()
        self._layers = [(layer, _plain_attributes(layer)) for layer in lifted.layers]

    def hand_over(self, options: dict[str, Any]) -> dict[str, Any]:
        waiting: list[Any] = [options]
        while waiting:
            held = waiting.pop()
            for part in held.values() if isinstance(held, dict) else held:
                if isinstance(part, (dict, list, tuple)) and not self._snapshot.knows(part):
                    self._snapshot.add(part)
                    waiting.append(part)
        self._snapshot.take()
        if not self._are_read:
            return options
        return {
            name: Reading(value, name, "", self._asked) if is_readable(value) else value
            for name, value in options.items()
        }

    def check(self) -> None:
        if self._snapshot.changed() or any(_plain_attributes(layer) != before for layer, before in self._layers):
            raise ChangedState

    def _copy(self, value: Any) -> Any:
        if id(value) in self._copies:
            return self._copies[id(value)]
        if id(value) not in self._objects:
            return value
        copy = self._copies[id(value)] = empty_like(value, lambda: self._parts(value))
        self._empty.append((copy, value))
        return copy

    def _parts(self, value: Any) -> list[Any]:
        parts = enumerate(self._objects[id(value)][1])
        return [self._numbers[at] if (at := (id(value), i)) in self._numbers else self._copy(p) for i, p in parts]


def lift(
    functions: Sequence[Any], layers: Mapping[int, str], host: HostCode, read: Collection[str] = ()
) -> LiftedFunctions:
    """Return the functions of a call, lifted.

    Args:
        functions: of one call: what they share, they share in the graph.
        layers: of the module that is called, by ``id``, with their paths.
        host: the host's own code.
        read: what such functions are known to read, uses of numbers among it.

    Raises:
        Unliftable: one of them cannot be.
    """
    uses = Uses(read)
    snapshot = Snapshot()
    describer = StateDescriber(layers, snapshot)
    held = HeldState(layers, describer, uses)
    index = 0
    try:
        for index, function in enumerate(functions):  # noqa: B007
            held.walk(function)
        reached = ReachedState(held, describer, host)
        lines = reached.lines()
    except Exception as error:  # of Indescribable, and of whatever an extension's object does when it is looked at
        reason = str(error) if isinstance(error, Indescribable) else f"{type(error).__name__}: {first_line(error)}"
        raise Unliftable(index, reason) from error
    if held.numbers and reached.asks_for_types:  # and would not find a stand-in to be a number
        return lift(functions, layers, host, {*read, ALL_NUMBERS})
    snapshot.take()
    reached.sources.take()
    text = "\n".join((*held.lines, "reached", *lines))
    return LiftedFunctions(
        tuple(functions),
        _sha256(text),
        code_of(functions),
        held.tensors,
        held.numbers,
        held.of_kind(torch.nn.Module),
        uses,
        Readings(read),
        {},
        held.objects,
        held.layers_met(),
        snapshot,
        reached.sources,
        _facts(held.tensors),
    )


def code_of(functions: Sequence[Any]) -> str:
    """Return the sha256 over which functions these are, whatever they hold."""
    return _sha256("\n".join(sorted(set(map(source_of, functions)))))


def _placed(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Bring a tensor from the CPU to where a call computes, as functions do at each call: no recording spans that."""
    moves = tensor.device.type == "cpu" != device.type and tensor.nbytes <= _MOST_BYTES_MOVED
    return tensor.to(device) if moves else tensor


def _facts(tensors: Sequence[torch.Tensor]) -> list[object]:
    """Return what code may ask of tensors and their stand-ins do not tell, but for where they lie."""
    return [*map(_facts_of, tensors), *(len(own_attributes(tensor)) if vars(tensor) else 0 for tensor in tensors)]


def _other_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor like another, whose values are off by a tenth at most, and none of which is zero.

    They keep their signs: code may take roots, or logarithms.
    """
    if tensor.dtype not in _CALCULATED or not tensor.numel():
        return tensor
    steps = torch.arange(tensor.numel(), device=tensor.device).reshape(tensor.shape) % 7
    with torch.no_grad():
        values = torch.where(tensor == 0, 0.05, tensor * (1 + 0.1 * torch.cos(steps.float()))).to(tensor.dtype)
    return torch.nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else values


def _lies_oddly(tensor: torch.Tensor) -> bool:
    """Return True for a tensor whose stand-in lies in another way. Code may look at that."""
    return not tensor.is_contiguous() or tensor.storage_offset() > 0


def _plain_attributes(layer: torch.nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(layer).items() if type(value) in PLAIN}


def _number_of(text: str) -> int:
    return int(_sha256(text)[:15], 16)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
