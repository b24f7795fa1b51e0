"""A describer that watches what it describes, so that nothing has to be described again as long as it is the same."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..values.tensors import has_fake, numbers_restorer
from ..values.value_text import Describer
from .snapshot import Snapshot


class WatchingDescriber(Describer):
    """Describes values, and watches whatever of them may change.

    Args:
        layers: as of ``Describer``. What a layer of the tree holds is watched by whoever goes through its attributes.
        snapshot: told of every object that was described.

    Attributes:
        constants: tensors that were described by their values, with the text: they may be written to.
    """

    def __init__(self, layers: Mapping[int, str], snapshot: Snapshot) -> None:
        super().__init__(layers)
        self.snapshot = snapshot
        self.constants: list[tuple[torch.Tensor, str]] = []

    def describe(self, value: Any) -> str:
        """A text for ``value``.

        Raises:
            Indescribable: something in it has no describable state.
        """
        if not isinstance(value, torch.nn.Module) or id(value) not in self._layers:
            self._watch(value)
        text = super().describe(value)
        if isinstance(value, torch.Tensor):
            self.constants.append((value, text))
        return text

    def are_constants_same(self) -> bool:
        """Return True if each tensor that was described would be described alike now."""
        plain = Describer({})
        return all(plain.describe(tensor) == text for tensor, text in self.constants)

    def constants_restorer(self) -> Callable[[], None]:
        """Return what writes the values of now back to constants that were written to meanwhile.

        Nor do tensors of a trace stay among their attributes.
        """
        restore_numbers = numbers_restorer(tensor for tensor, _ in self.constants)
        attributes = [(vars(tensor), dict(vars(tensor))) for tensor, _ in self.constants]

        def restore() -> None:
            restore_numbers()
            for held, before in attributes:
                for name in [name for name, value in held.items() if has_fake([value], depth=2)]:
                    if name in before:
                        held[name] = before[name]
                    else:
                        del held[name]

        return restore

    def _watch(self, value: Any) -> None:
        self.snapshot.add_nested(value)  # a large container is described as a whole, with containers and arrays in it
        if isinstance(value, types.FunctionType):  # a default ``seen=[]`` that is filled meanwhile counts as it is
            for default in (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()):
                self.snapshot.add(default)
        elif isinstance(value, torch.nn.Module):  # with weights, or hooks, it would not be described
            for holder in vars(value).values():
                self.snapshot.add(holder)
