"""Weights that the host loads to new addresses for each run, as copies at addresses that stay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Classes of weights that are one tensor."""


class Place(NamedTuple):
    """Where an image has a weight, and of what dtype and on which device it is to be there."""

    weights: dict[str, Any]
    name: str
    dtype: torch.dtype | None
    device: torch.device


class SmallWeights:
    """Copies of norms, biases and the like, of up to 16 KB.

    In Dynamic VRAM the host loads them anew for each run, and takes them off the device when it needs memory. They are
    copied in each call, some megabytes in one launch, so that whatever is written to them is seen.
    """

    def __init__(self) -> None:
        self._theirs: list[torch.Tensor] = []
        self._own: list[torch.Tensor] = []
        self._made_for: list[Any] = []  # dtype, device and shape that each copy was made for

    def stand_in(self, places: Sequence[Place]) -> None:
        """Put a copy of what is there in each of these places: the copy of before, where it is still of the kind."""
        self._theirs = [place.weights[place.name] for place in places]
        pairs = list(zip(places, self._theirs, strict=True))
        wanted = [(place.dtype, place.device, weight.shape) for place, weight in pairs]
        if wanted != self._made_for:
            with torch.inference_mode(False):  # a tensor of that mode cannot be written to outside of it
                copies = [weight.to(place.device, place.dtype, copy=True) for place, weight in pairs]
                self._own = [torch.nn.Parameter(copy, requires_grad=False) for copy in copies]
            self._made_for = wanted
        for place, own in zip(places, self._own, strict=True):
            place.weights[place.name] = own

    def renew(self, theirs: Sequence[Any]) -> bool:
        """Copy from these from now on. Return False, and change nothing, if one is of another kind than the one before.

        Args:
            theirs: in the order of the places that were given to ``stand_in``.
        """
        if list(map(_kind_of, theirs)) != list(map(_kind_of, self._theirs)):
            return False
        self._theirs = list(theirs)
        return True

    def refresh(self) -> None:
        """Copy all of them."""
        if self._own:
            torch._foreach_copy_(self._own, self._theirs)


def _kind_of(weight: Any) -> Any:
    return type(weight), getattr(weight, "dtype", None), getattr(weight, "device", None), getattr(weight, "shape", None)
