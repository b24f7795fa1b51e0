"""A call of a part of a model as a graph can answer it: what it leaves in its arguments is given back with its output.

Parts of the host's models write to what they are given. Flux' blocks add to tensors; the decoder of a video VAE keeps,
in a list, what its next piece needs of this one. A graph changes nothing that it is given.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from ...capture.call import NotCovered, bind
from ...capture.parameters import signature_of
from ...messages import message
from ..process.services import OF_A_PART
from .records import closed, is_record, opened

_OPTIONS = "transformer_options"
_GIVEN = "what was given: "
"""Before a number: the tensor of that number among those that were given. In an output it is a dict's only name, over
an empty tuple, for a compiler takes each leaf of an output for a tensor."""
_PLAIN = "as JSON: "
"""Before a value that is no tensor: None, a number, a text; likewise."""

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
        NotCovered: they do not fit the forward's signature.
    """

    def __init__(self, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._variadic = _variadic(forward)
        named = {self._variadic: tuple(args), **kwargs} if self._variadic else bind(forward, args, kwargs)
        self.lists = _lists(named)
        self.arguments = {name: value if name == _OPTIONS else opened(value) for name, value in named.items()}

    def telling(self, forward: Callable[..., Any]) -> Callable[..., Told]:
        """Return a function of the arguments that gives what ``forward``, the part's or its image's, gives and leaves.

        Parts change what they are given in place. A graph cannot, and eager may run on the same tensors after it. So
        the function runs on copies. Tensors of inference mode do not count who writes to them, so the copies are none.

        Where ``forward`` returns what it was given, the caller must be returned that very tensor, too: where the host
        plans what a block allocates, what comes out of one and is kept ends the forward.
        """
        variadic = self._variadic

        def telling(**arguments: Any) -> Told:
            with torch.inference_mode(False), torch.no_grad():
                own = {name: _copied(value) if name != _OPTIONS else value for name, value in arguments.items()}
                tensors = _tensors(own)
                versions = [tensor._version for tensor in tensors]
                given = {name: value if name == _OPTIONS else closed(value) for name, value in own.items()}
                lists = _lists(given)
                before = [tuple(each) for each in lists]
                output = forward(*given.pop(variadic), **given) if variadic else forward(**given)
                written = [index for index, tensor in enumerate(tensors) if tensor._version != versions[index]]
            stand_ins = {id(tensor): {f"{_GIVEN}{index}": ()} for index, tensor in enumerate(tensors)}
            output = _told(output, {id(tensors[index]): stand_ins[id(tensors[index])] for index in written})
            changed = [index for index, each in enumerate(lists) if not _same(each, before[index])]
            left = {str(index): [_entry(value, stand_ins) for value in lists[index]] for index in changed}
            return output, {str(index): tensors[index] for index in written}, left

        telling.__module__, telling.__name__ = forward.__module__, forward.__name__
        telling.__qualname__ = f"{forward.__qualname__}{OF_A_PART}"
        return telling

    def completed(self, told: Told) -> Any:
        """Return what the part gives, and leave in the arguments what it leaves there."""
        output, written, left = told
        tensors = _tensors(self.arguments)
        for index, value in written.items():
            tensors[int(index)].copy_(value)
        for index, entries in left.items():
            self.lists[int(index)][:] = [_restored(entry, tensors) for entry in entries]
        return _restored(output, tensors)


def _told(output: Any, stand_ins: Mapping[int, Any]) -> Any:
    """Return an output with something in place of what is no tensor, and of tensors that have a stand-in."""
    return pytree.tree_map(
        lambda leaf: stand_ins.get(id(leaf), leaf) if isinstance(leaf, torch.Tensor) else _plain(leaf), output
    )


def _entry(value: Any, stand_ins: Mapping[int, Any]) -> Any:
    """Return what is told of a list's entry.

    What is kept is often a part of something larger, as the last of a few frames, and would keep all of it. A compiler
    puts such things together where eager does not. So it is copied.

    Raises:
        NotCovered: it is a container, which could hold anything.
    """
    if not isinstance(value, torch.Tensor):
        return _plain(value)
    return stand_ins[id(value)] if id(value) in stand_ins else value.clone(memory_format=torch.contiguous_format)


def _plain(value: Any) -> Any:
    """Return what stands for a value that is no tensor, in an output of a graph.

    Raises:
        NotCovered: it is none that could be made again.
    """
    if type(value) not in (type(None), bool, int, float, str):
        raise NotCovered(message("a part of the model gives or keeps something that is neither a tensor nor a number"))
    return {f"{_PLAIN}{json.dumps(value)}": ()}


def _is_stand_in(part: Any) -> bool:
    return type(part) is dict and len(part) == 1 and str(next(iter(part))).startswith((_GIVEN, _PLAIN))


def _restored(told: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return something told, with what stand-ins stand for."""
    return pytree.tree_map(lambda part: _meant(part, tensors), told, is_leaf=_is_stand_in)


def _meant(part: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if not _is_stand_in(part):
        return part
    (name,) = part
    return json.loads(name.removeprefix(_PLAIN)) if name.startswith(_PLAIN) else tensors[int(name.removeprefix(_GIVEN))]


def _same(now: list[Any], before: Sequence[Any]) -> bool:
    return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))


def _variadic(forward: Callable[..., Any]) -> str | None:
    """Return the name of the parameter that takes all positional arguments, as SD3's blocks have; None if none does."""
    first = next(iter(signature_of(forward).parameters.values()), None)
    return first.name if first is not None and first.kind is first.VAR_POSITIONAL else None


def _copied(value: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, torch.clone, value)


def _tensors(arguments: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors of a call but for those in its bag of options, which nobody writes to."""
    values = [arguments[name] for name in sorted(arguments) if name != _OPTIONS]
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _lists(arguments: Mapping[str, Any]) -> list[list[Any]]:
    """Return the lists of a call, likewise."""
    return [found for name in sorted(arguments) if name != _OPTIONS for found in _lists_in(arguments[name])]


def _lists_in(value: Any) -> Iterator[list[Any]]:
    if isinstance(value, torch.Tensor):
        return
    if type(value) is list:
        yield value
    parts: Any = value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()
    if is_record(value):
        parts = vars(value).values()
    for part in parts:
        yield from _lists_in(part)
