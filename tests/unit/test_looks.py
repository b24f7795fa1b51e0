"""Whether layers are as they looked before is asked of each block in each step, and whatever is another is seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from onediff_comfy.host.weights.layer_images import Look


class Block(torch.nn.Module):
    """With layers and a bag that its forward may write to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        self.heads, self.bag, self.empty = 4, {"kept": object()}, dict[str, object]()


def _renamed(block: Any) -> None:
    block.bag["renamed"] = block.bag.pop("kept")


def _moved(block: Any) -> None:
    """An attribute goes from one layer to another; there are as many names as before."""
    del block.heads
    block.first.heads = 4


CHANGES: dict[str, Callable[[Any], None]] = {
    "an attribute is another": lambda block: setattr(block, "heads", 5),
    "there is one more": lambda block: setattr(block.second, "scale", 2.0),
    "one is gone": lambda block: delattr(block, "heads"),
    "one is at another layer": _moved,
    "a note is gone and an attribute is there": lambda block: (
        delattr(block.first, "_v_signature"),
        setattr(block.first, "scale", 2.0),
    ),
    "a layer is another": lambda block: setattr(block, "second", torch.nn.Linear(2, 2)),
    "two layers have changed places": lambda block: block._modules.update(first=block.second, second=block.first),
    "what is in a bag is another": lambda block: block.bag.update(kept=object()),
    "it is called otherwise in the bag": _renamed,
    "there is more in the bag": lambda block: block.bag.update(more=1),
    "there is something in a bag that was empty": lambda block: block.empty.update(more=1),
    "a layer has a layer": lambda block: block.first.add_module("more", torch.nn.Linear(2, 2)),
    "the bag is another of the same content": lambda block: setattr(block, "bag", dict(block.bag)),
    "it is trained": lambda block: block.train(False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_another_is_seen(change: str) -> None:
    block = Block()
    block.first._v_signature = torch.ones(1)
    look = Look(tuple(block.modules()))
    assert look.holds() and look.holds()
    CHANGES[change](block)
    assert not look.holds()


def test_notes_and_weights_come_and_go() -> None:
    block: Any = Block()
    look = Look(tuple(block.modules()))
    for _ in range(2):
        block.first._v_signature = block.first._prefetch = object()
        assert look.holds()
        block.second.weight = torch.nn.Parameter(torch.zeros(2, 2))
        del block.first._prefetch
        assert look.holds()
        del block.first._v_signature
        assert look.holds()
