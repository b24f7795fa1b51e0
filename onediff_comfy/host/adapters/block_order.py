"""In which order a model's forward calls its blocks, what deep ones add, and a forward in which they are left out.

Of a forward that computes everything two things are kept: what the first block gives, *early*; and of each of the
model's own lists of blocks what those behind it have added, all together, to what the first of them was given, *deep*.
In a brief forward that one adds it, and the others hand on what they are given.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree

from ...capture.call import NotCovered
from ...messages import Message, message
from ...runtime.step_cache import Features
from ..process.host_compiler import unplanned
from ..process.services import OPTIONS
from .module_image import is_plain
from .module_proxy import Serve

# Of all blocks' weights. A list with fewer refines an input, a prompt alone perhaps: it says nothing of the image.
_LEAST_SHARE = 1 / 8
# Likewise, to be left out: with fewer there is too little to gain for what is lost. Half of the weights of a block that
# has a prompt's tokens apart are for those, which are few: work is less evenly shared than weights.
_LEAST_LEFT_OUT = 1 / 4


@dataclass(frozen=True)
class OutputForm:
    """How a block's output is built of what it is given.

    Attributes:
        spec: as pytrees have it.
        sources: of each leaf, the number of the tensor among those given whose place it takes; None of what is plain.
        same: of each leaf, whether it is that very tensor, written to.
        plain: of each leaf, what it is if it is no tensor.
    """

    spec: pytree.TreeSpec
    sources: tuple[int | None, ...]
    same: tuple[bool, ...]
    plain: tuple[Any, ...]

    @classmethod
    def of(cls, given: Sequence[torch.Tensor], output: Any) -> OutputForm | None:
        """Return the form of an output; None if something in it takes no given tensor's place."""
        leaves, spec = pytree.tree_flatten(output)
        tensors = {number: leaf for number, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
        if not all(number in tensors or is_plain(leaf) for number, leaf in enumerate(leaves)):
            return None
        same = {n: next((i for i, each in enumerate(given) if each is leaf), None) for n, leaf in tensors.items()}
        sources = {n: index for n, index in same.items() if index is not None}
        for number, leaf in tensors.items():
            if number in sources:
                continue
            free = [i for i, each in enumerate(given) if i not in sources.values() and _alike(each, leaf)]
            if not free:
                return None
            # A block adds a little to what it is given: of a prompt and an image of one size, the nearer is meant.
            sources[number] = free[0] if len(free) == 1 else min(free, key=lambda i: _distance(leaf, given[i]))
        numbers = range(len(leaves))
        return cls(
            spec,
            tuple(map(sources.get, numbers)),
            tuple(same.get(number) is not None for number in numbers),
            tuple(None if number in tensors else leaves[number] for number in numbers),
        )

    def fits(self, given: Sequence[torch.Tensor], output: Any) -> bool:
        """Return True if an output is built so."""
        leaves, spec = pytree.tree_flatten(output)
        return spec == self.spec and all(
            (type(leaf), leaf) == (type(plain), plain)
            if source is None
            else source < len(given) and _alike(given[source], leaf) and (given[source] is leaf) == same
            for leaf, source, same, plain in zip(leaves, self.sources, self.same, self.plain, strict=True)
        )

    def built(self, given: Sequence[torch.Tensor], results: Mapping[int, torch.Tensor]) -> Any:
        """Return an output with these results in the places of given tensors, and the others handed on."""
        leaves = []
        for source, same, plain in zip(self.sources, self.same, self.plain, strict=True):
            if source is None:
                leaves.append(plain)
                continue
            result = results.get(source)
            if result is not None and same:
                given[source].copy_(result)
            leaves.append(given[source] if result is None or same else result)
        return pytree.tree_unflatten(leaves, self.spec)


@dataclass(frozen=True)
class BlockCall:
    """A call of a block in a forward.

    Attributes:
        block: which.
        list_name: of the model's list that it is in; None if it is further down.
        form: of its output; None if nothing could be handed on in place of it.
    """

    block: torch.nn.Module
    list_name: str | None
    form: OutputForm | None

    @property
    def weights(self) -> int:
        """Return how many weights it computes with."""
        return sum(weight.numel() for weight in self.block.parameters())

    def is_made(self, block: torch.nn.Module, given: Sequence[torch.Tensor], output: Any) -> bool:
        """Return True if it is this call that was made."""
        return self.block is block and (self.form is None or self.form.fits(given, output))


@dataclass(frozen=True, eq=False)
class Order:
    """The calls of blocks in a forward. Each that is seen is another.

    Attributes:
        calls: in their order.
        first: the number of the one whose result is *early*; those in the model's lists behind it are left out. None
            if too little would be.
        last: of each list the number of the last call.
    """

    calls: Sequence[BlockCall]
    first: int | None
    last: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, calls: Sequence[BlockCall]) -> Order:
        """Return what is known of a forward that made these calls."""
        weights = Counter[str]()
        for call in calls:
            weights[call.list_name or ""] += call.weights
        # None of a list is left out where one gives something else than it is given, as what projects a prompt does.
        fixed = {"", *(call.list_name or "" for call in calls if call.form is None)}
        least = _LEAST_SHARE * weights.total()
        large = {name for name in weights.keys() - fixed if weights[name] > least}
        first = next((number for number, call in enumerate(calls) if call.list_name in large), None)
        if first is None:
            return cls(calls, None)
        deep = {n: call for n, call in enumerate(calls) if n > first and (call.list_name or "") not in fixed}
        if sum(call.weights for call in deep.values()) < _LEAST_LEFT_OUT * weights.total():
            return cls(calls, None)
        return cls(calls, first, {call.list_name or "": number for number, call in deep.items()})

    def left_out(self, number: int) -> str | None:
        """Return the list of a call that is left out of a brief forward; None if it is computed."""
        if self.first is None or not self.first < number < len(self.calls):
            return None
        name = self.calls[number].list_name
        return name if name in self.last else None

    def sources(self, list_name: str) -> list[int]:
        """Return which of the tensors given to a list's blocks its last one gives in another form."""
        form = self.calls[self.last[list_name]].form
        assert form is not None  # of none that is left out
        return [source for source in form.sources if source is not None]


class WholeForward:
    """A forward whose blocks are all computed.

    Args:
        order: that is expected of it.
        serve: computes a block.
        list_of: the model's lists, by block.

    Attributes:
        calls: of blocks, so far.
    """

    def __init__(self, order: Order | None, serve: Serve, list_of: Mapping[torch.nn.Module, str]) -> None:
        self._order, self._serve, self._list_of = order, serve, list_of
        self.calls: list[BlockCall] = []
        self._early: torch.Tensor | None = None
        self._entered: dict[str, dict[int, torch.Tensor]] = {}
        self._deep: dict[str, dict[int, torch.Tensor]] = {}

    def __call__(
        self,
        block: torch.nn.Module,
        forward: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        given, number = _tensors(args, kwargs), len(self.calls)
        name = None if self._order is None else self._order.left_out(number)
        if self._order is not None and name is not None and name not in self._entered:
            with self._noting():  # a block may write to what it is given, and so may the forward behind it
                self._entered[name] = {i: given[i].clone() for i in self._order.sources(name) if i < len(given)}
        output = self._serve(block, forward, args, kwargs)
        expected = self._expected(number)
        if expected is not None and expected.is_made(block, given, output):
            self.calls.append(expected)
            self._leave(number, output)
        else:
            self.calls.append(BlockCall(block, self._list_of.get(block), OutputForm.of(given, output)))
            self._forget()
        return output

    def _expected(self, number: int) -> BlockCall | None:
        return None if self._order is None or number >= len(self._order.calls) else self._order.calls[number]

    def features(self) -> Features | None:
        """Return what later steps may reuse; None if the forward was another one than was expected."""
        order = self._order
        if order is None or self._early is None or len(self.calls) < len(order.calls):
            return None
        return Features(self._early, self._deep)

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        """Keep something inside. Where there is no memory for it, nothing is reused."""
        try:
            with unplanned():
                yield
        except (torch.OutOfMemoryError, NotCovered):
            self._forget()

    def _forget(self) -> None:
        self._order = self._early = None
        self._entered, self._deep = {}, {}

    def _leave(self, number: int, output: Any) -> None:
        """Keep what is wanted of a block that was called as expected."""
        order = self._order
        assert order is not None  # which it was expected of
        if number == order.first:
            with self._noting():
                self._early = _largest(output)
        name = order.left_out(number)
        if name is None or number != order.last[name]:
            return
        form, entered = self.calls[number].form, self._entered[name]
        assert form is not None  # of none that is left out
        leaves = dict(zip(form.sources, pytree.tree_leaves(output), strict=True))
        if not all(source in entered and _alike(entered[source], leaves[source]) for source in order.sources(name)):
            self._forget()
            return
        with self._noting():
            self._deep[name] = {source: leaves[source] - before for source, before in entered.items()}
            self._entered[name] = {}


class BriefForward:
    """A forward whose deep blocks are left out.

    Args:
        order: of its calls.
        features: that an earlier one has found.
        serve: computes a block.
    """

    def __init__(self, order: Order, features: Features, serve: Serve) -> None:
        self._order, self._features, self._serve = order, features, serve
        self._number = 0
        self._early: torch.Tensor | None = None
        self._results: dict[str, dict[int, torch.Tensor]] = {}

    @property
    def early(self) -> torch.Tensor:
        assert self._early is not None  # its forward has ended
        return self._early

    def __call__(
        self,
        block: torch.nn.Module,
        forward: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        order, number = self._order, self._number
        self._number += 1
        if number >= len(order.calls) or order.calls[number].block is not block:
            raise NotCovered(_other_order())
        name = order.left_out(number)
        if name is None:
            output = self._serve(block, forward, args, kwargs)
            if number == order.first:
                with unplanned():
                    self._early = _largest(output)
            return output
        given, form = _tensors(args, kwargs), order.calls[number].form
        assert form is not None  # of none that is left out
        try:
            with unplanned():
                if name not in self._results:
                    self._results[name] = self._added(name, given)
                return form.built(given, self._results[name] if number == order.last[name] else {})
        except torch.OutOfMemoryError as error:
            raise NotCovered(message("there was no memory to reuse a step")) from error

    def end(self) -> None:
        """End the forward.

        Raises:
            NotCovered: it has not called all blocks.
        """
        if self._number < len(self._order.calls):
            raise NotCovered(_other_order())

    def _added(self, name: str, given: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        deep = self._features.deep[name]
        if any(source >= len(given) or not _alike(given[source], added) for source, added in deep.items()):
            raise NotCovered(_other_order())
        return {source: given[source] + added for source, added in deep.items()}


def _other_order() -> Message:
    return message("the model's blocks are called otherwise than in the step before")


def _tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that a block is given, but for those among the options."""
    values = [*args, *(value for name, value in kwargs.items() if name != OPTIONS)]
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _largest(output: Any) -> torch.Tensor | None:
    """Return a copy of the largest tensor in a block's output: the forward may write to it."""
    tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    return max(tensors, key=torch.Tensor.numel).clone() if tensors else None


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(one.float() - other.float()))


def _alike(one: torch.Tensor, other: Any) -> bool:
    return isinstance(other, torch.Tensor) and (one.shape, one.dtype, one.device) == (
        other.shape,
        other.dtype,
        other.device,
    )
