"""module_image.py: an image computes as its module does, and what is set on it is set on the module."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import nn

from onediff_comfy.capture.target.held_objects import AttributeGuard
from onediff_comfy.host.adapters.module_image import ModuleImage


class Scaled(nn.Linear):
    def __init__(self, scale: float, name: str) -> None:
        super().__init__(4, 4)
        self.scale, self.name, self.note = scale, name, "where my weights are"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x) * self.scale


def test_an_image_is_the_module_without_what_is_hidden() -> None:
    module, x = Scaled(2.0, "a"), torch.randn(2, 4)
    with ModuleImage(module, hidden=["note"]).current() as image:
        assert type(image) is Scaled
        assert not hasattr(image, "note")
        assert torch.equal(image(x), nn.functional.linear(x, module.weight, module.bias) * 2)
        assert not hasattr(module, "calls")
    assert (module.calls, module.note) == (1, "where my weights are")


def test_what_is_deleted_on_an_image_is_gone() -> None:
    module = Scaled(2.0, "a")
    with ModuleImage(module, hidden=["note"]).current() as image:
        del image.name
        image.scale = 3.0
    assert not hasattr(module, "name")
    assert (module.scale, module.note) == (3.0, "where my weights are")


def test_attributes_instead_are_the_images_alone() -> None:
    module, weights = Scaled(1.0, "a"), {"weight": nn.Parameter(torch.eye(4)), "bias": None}
    shown = ModuleImage(module, instead={"_parameters": weights})
    with shown.current() as image:
        x = torch.randn(2, 4)
        assert torch.equal(image(x), x)
        weights["weight"] = nn.Parameter(2 * torch.eye(4))
        assert torch.equal(image(x), 2 * x)
    assert not torch.equal(module.weight, torch.eye(4))


def test_who_compares_objects_sees_the_same_layer_where_values_are_equal() -> None:
    """One image shows one block after the other. A guard of it holds until a block differs in more than weights."""
    first, same, other = (Scaled(float(text), "a") for text in ("0.3", "0.3", "4"))
    assert first.scale is not same.scale
    held = {name: type(kept)() for name, kept in vars(first).items() if isinstance(kept, dict)}
    shown = ModuleImage(first, instead=held)
    shown.show()
    guard = AttributeGuard([shown.image])
    shown.show(same)
    assert guard.holds()
    shown.show(other)
    assert not guard.holds()
    assert shown.image.scale == 4.0
    shown.put_back()
    assert (first.scale, same.scale, other.scale) == (0.3, 0.3, 4.0)


def test_equal_numbers_of_another_type_are_others() -> None:
    shown = ModuleImage(Scaled(1.0, "a"))
    shown.show()
    shown.show(Scaled(1, "a"))
    assert type(shown.image.scale) is int
    shown.show(Scaled(True, "a"))
    assert shown.image.scale is True


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1, 2.0), (1, 2)),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"low": 1}, {"low": True}),
        (0.0, -0.0),
        ((Fraction(1, 2),), (Fraction(1, 2),)),
    ],
)
def test_what_only_compares_equal_is_another_value(before: Any, after: Any) -> None:
    first, second = Scaled(1.0, "a"), Scaled(1.0, "a")
    first.value, second.value = before, after
    shown = ModuleImage(first)
    shown.show()
    shown.show(second)
    assert shown.image.value is after


def test_an_equal_dict_is_no_other_one_and_each_module_keeps_its_own() -> None:
    """Layers of weights of few bits hold a dict each, equal in all blocks."""
    blocks = [Scaled(1.0, "a") for _ in range(3)]
    own = [{"dtype": torch.float16, "bias": True} for _ in blocks]
    for block, options in zip(blocks, own, strict=True):
        block.options = options
    held = {name: type(kept)() for name, kept in vars(blocks[0]).items() if isinstance(kept, (dict, set))}
    held.pop("options")
    shown = ModuleImage(blocks[0], instead=held)
    shown.show()
    assert shown.image.options is own[0]
    shown.show(blocks[1])
    guard = AttributeGuard([shown.image])
    shown.show(blocks[2])
    assert guard.holds(), "whoever compares objects sees another block"
    shown.image.options["bias"] = False
    shown.put_back()
    assert [block.options for block in blocks] == [*own[:2], {"dtype": torch.float16, "bias": False}]
    assert [block.options is options for block, options in zip(blocks, own, strict=True)] == [True] * 3
    assert own[0]["bias"] is own[1]["bias"] is True


def test_a_dict_that_a_forward_puts_in_the_place_of_another_is_not_written_into_that() -> None:
    shared = {"a": 1}
    module = Scaled(1.0, "a")
    module.options = shared
    with ModuleImage(module).current() as image:
        image.options = {"a": 2}
    assert (module.options, shared) == ({"a": 2}, {"a": 1})


def test_a_dict_in_a_dict_is_each_modules_own() -> None:
    """What is written there nobody looks for: an image that kept another block's would compute with that."""
    blocks = [Scaled(1.0, "a") for _ in range(2)]
    for block in blocks:
        block.options = {"scale": {"of": 1.0}}
    shown = ModuleImage(blocks[0])
    for block in blocks:
        shown.show(block)
        assert shown.image.options is block.options


def test_what_others_set_on_the_module_meanwhile_stays() -> None:
    """As extensions' functions do that a forward calls. What the forward itself sets comes last."""
    module = Scaled(2.0, "a")
    with ModuleImage(module).current() as image:
        module.calls, module.scale, module.name = 1, 3.0, "theirs"
        del module.note
        image.name = "ours"
    assert (module.calls, module.scale, module.name, hasattr(module, "note")) == (1, 3.0, "ours", False)


def test_an_image_is_of_the_class_that_its_module_has_by_now() -> None:
    module, x = Scaled(2.0, "a"), torch.ones(1, 4)
    shown = ModuleImage(module)

    class Doubled(Scaled):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    for kind in (Doubled, Scaled):
        module.__class__ = kind
        with shown.current() as image:
            assert type(image) is kind and torch.equal(image(x), module(x))
