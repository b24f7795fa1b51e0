"""A call of a part of a model as a graph can answer it: what it leaves in its arguments is given back with its output.

Parts of the host's models write to what they are given. Flux' blocks add to tensors; the decoder of a video VAE keeps,
in a list, what its next piece needs of this one. A graph changes nothing that it is given.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.utils._pytree as pytree

from ...capture.call import NotCovered, bind
from ...capture.parameters import parameters_of
from ...messages import message
from ..process.services import OF_A_PART, OPTIONS
from .records import closed, is_record, opened

_GIVEN = "what was given: "
"""Before a number: the tensor of that number among those that were given. In an output it is a dict's only name, over
an empty tuple, for a compiler takes each leaf of an output for a tensor."""
_HELD = "what was in the list: "
"""Before a number: the entry of that number that the list had before; likewise."""
_PLAIN = "as JSON: "
"""Before a value that is no tensor: None, a number, a text; likewise."""
_LEAVES = frozenset((torch.Tensor, type(None), bool, int, float, str))
"""Classes of what mostly is given. There is nothing in them to look for, and looking takes longer."""

Told = tuple[Any, Mapping[str, torch.Tensor], Mapping[str, list[Any]]]
"""What a part gives, what it leaves in the tensors that it writes to, and in the lists; see ``FunctionalCall``."""


class FunctionalCall:
    """A call of a part, a block or a decoder, as a graph can answer it.

    Args:
        forward: of the part.
        args: of the call.
        kwargs: likewise.

    Attributes:
        arguments: by name, with records opened.
        lists: those among the arguments, at any depth.

    Raises:
        NotCovered: they do not fit the forward's signature, or what is left in one of them is left in another, too.
    """

    def __init__(self, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._variadic = parameters_of(forward).variadic
        named = {self._variadic: tuple(args), **kwargs} if self._variadic else bind(forward, args, kwargs)
        self.lists = _lists(_containers(named))
        if len({id(each) for each in self.lists}) < len(self.lists):
            raise NotCovered(message("a part of the model is given one list twice"))
        self.arguments = {name: value if name == OPTIONS else opened(value) for name, value in named.items()}

    @cached_property
    def _tensors(self) -> list[torch.Tensor]:
        """Return the tensors that it is given, which ``telling`` counts likewise."""
        return _tensors(self.arguments)

    @property
    def form(self) -> Hashable:
        """Return what calls have in common of which a graph most likely answers all or none."""
        leaves = pytree.tree_leaves([value for name, value in self.arguments.items() if name != OPTIONS])
        looks = (leaf.shape if isinstance(leaf, torch.Tensor) else type(leaf) for leaf in leaves)
        return tuple(self.arguments), tuple(self.arguments.get(OPTIONS) or ()), tuple(looks)

    def telling(self, forward: Callable[..., Any]) -> Callable[..., Told]:
        """Return a function of the arguments that gives what ``forward``, the part's or its image's, gives and leaves.

        Parts change what they are given in place. A graph cannot, and eager may run on the same tensors after it. So
        the function runs on copies. Tensors of inference mode do not count who writes to them, so the copies are none.

        Where ``forward`` returns what it was given, the caller must be returned that very tensor, too: where the host
        plans what a block allocates, what comes out of one and is kept ends the forward.

        The part is given a bag of options of its own: what it notes there for itself nobody else sees.

        The function raises NotCovered where the part gives or leaves something that cannot be told. Its arguments are
        as they were then.
        """
        variadic = self._variadic

        def telling(**arguments: Any) -> Told:
            with torch.inference_mode(False), torch.no_grad():
                own = {name: copied(value) if name != OPTIONS else value for name, value in arguments.items()}
                tensors = _tensors(own)
                versions = [tensor._version for tensor in tensors]
                given = {name: _own_bag(value) if name == OPTIONS else closed(value) for name, value in own.items()}
                containers = [*_containers(given), given.get(OPTIONS)]
                lists, dicts = _lists(containers), [each for each in containers if type(each) is dict]
                before, items = [tuple(each) for each in lists], [tuple(each.items()) for each in dicts]
                output = forward(*given.pop(variadic), **given) if variadic else forward(**given)
                written = [index for index, tensor in enumerate(tensors) if tensor._version != versions[index]]
            if not all(map(_has_still, dicts, items)):
                raise NotCovered(message("a part of the model changes an object that it is given"))
            given_back = {id(tensor): {f"{_GIVEN}{index}": ()} for index, tensor in enumerate(tensors)}
            shared = {storage for storage in map(_storage, tensors) if storage is not None}
            if any(id(leaf) not in given_back and _storage(leaf) in shared for leaf in pytree.tree_leaves(output)):
                raise NotCovered(message("a part of the model gives a view of a tensor that it is given"))
            output = pytree.tree_map(lambda leaf: given_back.get(id(leaf)) or _told(leaf), output)
            left = {
                str(index): _entries(now, was, given_back)
                for index, (now, was) in enumerate(zip(lists, before, strict=True))
                if not _same(now, was)
            }
            return output, {str(index): tensors[index] for index in written}, left

        kind = type(forward)  # whose name is a partial function's, which has none
        telling.__module__, telling.__name__ = forward.__module__, getattr(forward, "__name__", kind.__name__)
        telling.__qualname__ = f"{getattr(forward, '__qualname__', kind.__qualname__)}{OF_A_PART}"
        return telling

    def out(self, places: tuple[Any, Mapping[str, int], Any]) -> Mapping[int, torch.Tensor]:
        """Return the tensors that the part writes to, by the numbers of the values for them; see ``decision.Out``.

        Only where ``completed`` would put the values there: none overlaps with another tensor.
        """
        _, written, _ = places
        overlapping = bool(written) and self._overlapping(written)
        return {} if overlapping else {place: self._tensors[int(name)] for name, place in written.items()}

    def _overlapping(self, written: Collection[str]) -> bool:
        """Return True if a tensor that is written to overlaps with another."""
        ranges = list(map(_range, self._tensors))
        return any(_overlap(ranges[i], [*ranges[:i], *ranges[i + 1 :]]) for i in map(int, written))

    def completed(self, told: Told) -> Any:
        """Return what the part gives, and leave in the arguments what it leaves there.

        Raises:
            NotCovered: the part writes to a tensor that overlaps with another one. On copies the other has not seen it.
                Nothing was left anywhere.
        """
        output, written, left = told
        tensors = self._tensors
        missing = {name: value for name, value in written.items() if value is not tensors[int(name)]}
        if missing and self._overlapping(written):
            raise NotCovered(message("a part of the model writes to a tensor that it is given twice"))
        for name, value in missing.items():
            tensors[int(name)].copy_(value)
        for name, entries in left.items():
            held = self.lists[int(name)]
            held[:] = [_restored(entry, tensors, tuple(held)) for entry in entries]
        return _restored(output, tensors)


def _own_bag(options: Any) -> Any:
    return {**options} if type(options) is dict else options


def _storage(leaf: Any) -> int | None:
    """Return where the memory begins that a tensor is in; None of what is no tensor, or has no memory in a trace."""
    if not isinstance(leaf, torch.Tensor):
        return None
    try:
        return leaf.untyped_storage().data_ptr() or None
    except (NotImplementedError, RuntimeError):
        return None


def _entries(now: Sequence[Any], was: Sequence[Any], given_back: Mapping[int, Any]) -> list[Any]:
    """Return what is told of a list's entries.

    What is kept is often a part of something larger, as the last of a few frames, and would keep all of it. A compiler
    puts such things together where eager does not. So it is copied.

    Raises:
        NotCovered: one is a container that was not there, which could hold anything.
    """
    stand_ins = {**given_back, **{id(entry): {f"{_HELD}{index}": ()} for index, entry in enumerate(was)}}
    return [stand_ins.get(id(entry)) or _told(entry, copied=True) for entry in now]


def _told(value: Any, copied: bool = False) -> Any:
    """Return a tensor, or what stands for a value that is none, in an output of a graph.

    Raises:
        NotCovered: it is none that could be made again.
    """
    if isinstance(value, torch.Tensor):
        return value.clone(memory_format=torch.contiguous_format) if copied else value
    if type(value) not in (type(None), bool, int, float, str):
        raise NotCovered(message("a part of the model gives or keeps something that is neither a tensor nor a number"))
    return {f"{_PLAIN}{json.dumps(value)}": ()}


def _is_stand_in(part: Any) -> bool:
    return type(part) is dict and len(part) == 1 and str(next(iter(part))).startswith((_GIVEN, _HELD, _PLAIN))


def _restored(told: Any, tensors: Sequence[torch.Tensor], held: Sequence[Any] = ()) -> Any:
    """Return something told, with what stand-ins stand for.

    What blocks give needs no function of pytree's. Those leave a cycle behind, at a thousand blocks an image, and the
    more there are, the sooner Python's collector goes through all objects there are, which takes a third of a second.
    """
    if type(told) in (tuple, list):
        return type(told)(_restored(part, tensors, held) for part in told)
    if isinstance(told, torch.Tensor) or _is_stand_in(told):
        return _meant(told, tensors, held)
    return pytree.tree_map(lambda part: _meant(part, tensors, held), told, is_leaf=_is_stand_in)


def _meant(part: Any, tensors: Sequence[torch.Tensor], held: Sequence[Any]) -> Any:
    if not _is_stand_in(part):
        return part
    (name,) = part
    if name.startswith(_PLAIN):
        return json.loads(name.removeprefix(_PLAIN))
    if name.startswith(_HELD):
        return held[int(name.removeprefix(_HELD))]
    return tensors[int(name.removeprefix(_GIVEN))]


def _overlap(one: tuple[int, int], others: Sequence[tuple[int, int]]) -> bool:
    """Return True if a range of addresses has some in common with one of the others."""
    return any(one[0] < end and start < one[1] for start, end in others)


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where a tensor's elements begin and end in memory; of one without elements nowhere."""
    if not tensor.numel():
        return 0, 0
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    extent = (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.element_size()
    return start, start + extent


def _same(now: Sequence[Any], before: Sequence[Any]) -> bool:
    return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))


def _has_still(now: dict[Any, Any], items: Sequence[tuple[Any, Any]]) -> bool:
    return _same(list(now), [key for key, _ in items]) and _same(list(now.values()), [value for _, value in items])


def rebuilt(value: Any) -> Any:
    """Return a value in containers of their own, with the same tensors: a forward may take from what it is given."""
    return pytree.tree_map(lambda leaf: leaf, value)


def copied(value: Any) -> Any:
    """Return a value in containers of their own, with copies of its tensors."""
    return pytree.tree_map_only(torch.Tensor, torch.clone, value)


def _tensors(arguments: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors of a call but for those in its bag of options, which nobody writes to."""
    values = [arguments[name] for name in sorted(arguments) if name != OPTIONS]
    leaves = values if _LEAVES.issuperset(map(type, values)) else pytree.tree_leaves(values)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _lists(containers: Sequence[Any]) -> list[list[Any]]:
    return [each for each in containers if type(each) is list]


def _containers(arguments: Mapping[str, Any]) -> list[Any]:
    """Return the lists, tuples and dicts of a call, those of records too, but for what is in its bag of options."""
    return [
        found
        for name in sorted(arguments)
        if name != OPTIONS and type(arguments[name]) not in _LEAVES
        for found in _containers_in(arguments[name])
    ]


def _containers_in(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        return
    inside = vars(value) if is_record(value) else value
    if type(inside) not in (list, tuple, dict):
        return
    yield inside
    for part in inside.values() if type(inside) is dict else inside:
        yield from _containers_in(part)
