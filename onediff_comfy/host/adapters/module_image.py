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
        self._shown: dict[str, Any] = {}  # what the image had when it was last shown
        self._in_copies: dict[str, dict[Any, Any]] = {}  # likewise what was in them

    def show(self, module: torch.nn.Module | None = None) -> None:
        """Give the image the class and the attributes that its module has now, or another ``module``.

        Plain values, and dicts of such, that are equal to what the image has stay the same objects: whoever compares
        objects need not know that it is an image of another module now.
        """
        before, self.module = vars(self.module), module or self.module
        if type(self.image) is not type(self.module):  # extensions give modules another class, to change a method
            self.image.__class__ = type(self.module)
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
        self._shown = dict(own)
        self._in_copies = {name: {**copy} for name, copy in self._copies.items() if own.get(name) is copy}

    def put_back(self, module: torch.nn.Module | None = None) -> None:
        """Set and delete on the module what was set and deleted on the image since it was shown.

        What others have set on the module meanwhile stays: an extension's function that a forward calls may keep
        something there.

        Args:
            module: another one that looks like the image's, and is meant in its place.
        """
        own, theirs = vars(self.image), vars(module or self.module)
        for name, value in own.items():
            if name in self._own:
                continue
            if value is not self._shown.get(name, self._shown):
                theirs[name] = value
            elif name in self._in_copies and not _equal(value, self._in_copies[name]):
                held = theirs.get(name)  # the forward wrote to what it took for this
                if type(held) is dict:
                    held.clear()
                    held.update(value)
        for name in self._shown.keys() - own.keys() - self._own:
            theirs.pop(name, None)

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
    """Return True if two values are alike, to the types and the order of all that is in them, and plain.

    A dict in another one is not: what is written there nobody looks for.
    """
    if type(held) is type(value) is dict:
        return len(held) == len(value) and all(map(_equal_parts, held.items(), value.items()))
    return _equal_parts(held, value)


def _equal_parts(held: Any, value: Any) -> bool:
    kind = type(held)
    if kind is not type(value):
        return False
    if kind is tuple:
        return len(held) == len(value) and all(map(_equal_parts, held, value))
    return kind in _PLAIN and repr(held) == repr(value)  # == takes 0.0 for -0.0, and what a class of its own likes
