"""Images of the host's modules: objects that compute as a module does, though some of its attributes are other ones.

An object of the host's is never modified. Where a module is to be seen without some attributes, with other children or
with its weights elsewhere, an image stands for it: another object of the module's class with the same attributes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

_PLAIN = frozenset((bool, int, float, str, type(None), torch.dtype, torch.device))


class ModuleImage:
    """A module as it is now, but for some of its attributes.

    Args:
        module: what the image is of.
        hidden: names of attributes that the image does not have.
        instead: attributes that it has in place of the module's. The image holds these very objects, at any time.

    Attributes:
        image: an object of the module's class. It shows the module as it was when it was last shown.
    """

    def __init__(
        self, module: torch.nn.Module, hidden: Collection[str] = (), instead: Mapping[str, Any] | None = None
    ) -> None:
        self.module, self._instead = module, instead or {}
        self._own = frozenset((*hidden, *self._instead))
        self.image: torch.nn.Module = object.__new__(type(module))
        self._copies: dict[str, dict[Any, Any]] = {}  # of dicts that several modules have, by the attribute's name

    def show(self, module: torch.nn.Module | None = None) -> None:
        """Give the image the attributes that its module has now, or another ``module`` of the same class.

        Plain values, and dicts of such, that are equal to what the image has stay the same objects: whoever compares
        objects need not know that it is an image of another module now.
        """
        before, self.module = vars(self.module), module or self.module
        own: dict[str, Any] = vars(self.image)
        shown = {name: value for name, value in vars(self.module).items() if name not in self._own}
        for name in own.keys() - shown.keys() - self._instead.keys():
            del own[name]
        for name, value in shown.items():
            held: Any = own.get(name, own)
            if held is value:
                continue
            if not _equal(held, value):
                own[name] = value
            elif type(value) is dict and held is before.get(name):
                # Nobody's, from now on: what a forward writes to it is found and put back.
                own[name] = self._copies[name] = {**value}
        own.update(self._instead)

    def put_back(self, module: torch.nn.Module | None = None) -> None:
        """Set and delete on the module what was set and deleted on the image since it was shown.

        Args:
            module: another one that looks like the image's, and is meant in its place.
        """
        own, theirs = vars(self.image), vars(module or self.module)
        for name, value in own.items():
            held = theirs.get(name, theirs)
            if name in self._own or held is value or _equal(held, value):
                continue
            copy = self._copies.get(name)
            if copy is not None and value is copy and type(held) is dict:  # the forward wrote to what it took for this
                held.clear()
                held.update(copy)
            else:
                theirs[name] = value
        for name in [name for name in theirs if name not in own and name not in self._own]:
            del theirs[name]

    @contextlib.contextmanager
    def current(self) -> Iterator[torch.nn.Module]:
        """Yield the image, shown anew. What happens to its attributes inside happens to the module's."""
        self.show()
        try:
            yield self.image
        finally:
            self.put_back()


def is_plain(value: Any) -> bool:
    """Return True if an image keeps such a value as it is while others that it shows have an equal one."""
    return _equal(value, value)


def _equal(held: Any, value: Any) -> bool:
    """Return True if two values are alike, to the types and the order of all that is in them, and plain."""
    kind = type(held)
    if kind is not type(value):
        return False
    if kind is tuple or kind is dict:
        parts = (held, value) if kind is tuple else (held.items(), value.items())
        return len(held) == len(value) and all(map(_equal, *parts))
    return kind in _PLAIN and repr(held) == repr(value)  # == takes 0.0 for -0.0, and what a class of its own likes
